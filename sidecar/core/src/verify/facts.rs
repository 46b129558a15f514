//! What engines were seen to use for media items: bounded, least recently used first out.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use fovea_gossip::message::{Learnt, LearntValue};
use fovea_kv::{MediaId, MediaKey};

/// Longest cycle of pads (SGLang 0.5.23).
const PADS_MAX: usize = 4;

/// What one look at an item showed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Seen {
    Id(MediaId),
    /// By place in the cycle; only the first `width` count.
    Pads([Option<u32>; PADS_MAX]),
}

/// An observation of one item, to be learnt when it is sure whose it is.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sight {
    pub(super) key: MediaKey,
    /// `None` = the pads followed no cycle: nothing to learn.
    pub(super) seen: Option<Seen>,
    /// Positions it was predicted to fill.
    pub(super) expected: u32,
    /// Positions it fills, if its end was seen.
    pub(super) tokens: Option<u32>,
}

#[derive(Debug)]
struct Fact {
    seen: Seen,
    /// Positions that the item fills; 0 = its end was not seen.
    tokens: u32,
    used: u64,
}

/// Events counted since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Facts learnt that were not known before.
    pub learnt: u64,
    /// Looks that showed what was known.
    pub confirmed: u64,
    /// Facts dropped because a look showed another value.
    pub conflicts: u64,
    /// Runs of positions that follow no cycle of pads: another number of positions than predicted, or no pads.
    pub irregular: u64,
    /// Items that filled another number of positions than predicted.
    pub token_count: u64,
    /// Blocks that several requests with unlike media may have caused.
    pub ambiguous: u64,
    /// Stores after a block that has no name of ours.
    pub unknown_parent: u64,
    /// Requests not followed because too many or too long ones are.
    pub over_limit: u64,
}

#[derive(Debug)]
pub(super) struct Facts {
    max: usize,
    facts: HashMap<MediaKey, Fact>,
    by_use: BTreeMap<u64, MediaKey>,
    clock: u64,
    /// Pads in a cycle, 1 or 4; `None` until a span showed two tokens.
    width: Option<usize>,
    /// Keys of which something new can be said.
    changed: BTreeSet<MediaKey>,
    pub(super) counters: Counters,
}

impl Facts {
    pub(super) fn new(max: usize) -> Self {
        Self {
            max: max.max(1),
            facts: HashMap::new(),
            by_use: BTreeMap::new(),
            clock: 0,
            width: None,
            changed: BTreeSet::new(),
            counters: Counters::default(),
        }
    }

    /// What `tokens` from place `from` of an item show of its cycle; `None` = they follow none.
    pub(super) fn cycle(&mut self, from: u32, tokens: &[u32]) -> Option<Seen> {
        if let (None, &[first, second, ..]) = (self.width, tokens) {
            self.width = Some(if first == second { 1 } else { PADS_MAX });
        }
        let mut pads = [None; PADS_MAX];
        if self.width.is_none() && from > 0 {
            // One token, and its place in the cycle is not known.
            return Some(Seen::Pads(pads));
        }
        let width = self.width.unwrap_or(1);
        for (at, &token) in (from as usize..).zip(tokens) {
            if pads[at % width].replace(token).is_some_and(|before| before != token) {
                return None;
            }
        }
        Some(Seen::Pads(pads))
    }

    /// True = the value of a key became known whole.
    pub(super) fn learn(&mut self, sight: &Sight) -> bool {
        if sight.tokens.is_some_and(|tokens| tokens != sight.expected) {
            self.counters.token_count += 1;
        }
        let Some(seen) = sight.seen else {
            self.counters.irregular += 1;
            return false;
        };
        let before = self.value(&sight.key);
        let Some(known) = self.facts.get_mut(&sight.key) else {
            let tokens = sight.tokens.unwrap_or(0);
            self.counters.learnt += 1;
            self.insert(sight.key, Fact { seen, tokens, used: 0 });
            return self.value(&sight.key).is_some();
        };
        let Some(both) = merged(known.seen, seen) else {
            self.counters.conflicts += 1;
            self.forget(&sight.key);
            return false;
        };
        self.counters.confirmed += 1;
        known.seen = both;
        known.tokens = sight.tokens.unwrap_or(known.tokens);
        self.touch(&sight.key);
        let after = self.value(&sight.key);
        if before != after {
            self.changed.insert(sight.key);
        }
        after.is_some() && before != after
    }

    fn insert(&mut self, key: MediaKey, fact: Fact) {
        self.facts.insert(key, fact);
        self.touch(&key);
        self.changed.insert(key);
        if self.facts.len() > self.max
            && let Some((_, oldest)) = self.by_use.pop_first()
        {
            self.facts.remove(&oldest);
            self.changed.remove(&oldest);
        }
    }

    fn forget(&mut self, key: &MediaKey) {
        if let Some(fact) = self.facts.remove(key) {
            self.by_use.remove(&fact.used);
        }
        // Of what was dropped at most as many are remembered as of what is known.
        if self.changed.len() < 2 * self.max {
            self.changed.insert(*key);
        }
    }

    /// Marks a fact as used.
    pub(super) fn touch(&mut self, key: &MediaKey) {
        if let Some(fact) = self.facts.get_mut(key) {
            self.clock += 1;
            self.by_use.remove(&fact.used);
            fact.used = self.clock;
            self.by_use.insert(self.clock, *key);
        }
    }

    /// Positions (0 = not seen) and value of a key, once known whole.
    pub(super) fn value(&self, key: &MediaKey) -> Option<(u32, LearntValue)> {
        let Fact { seen, tokens, .. } = self.facts.get(key)?;
        let value = match seen {
            Seen::Id(id) => LearntValue::Id(*id),
            Seen::Pads(pads) => LearntValue::Pads(pads[..self.width?].iter().copied().collect::<Option<_>>()?),
        };
        Some((*tokens, value))
    }

    fn told(&self, key: MediaKey) -> Option<Learnt> {
        match self.value(&key) {
            Some((tokens, value)) => Some(Learnt { key, tokens, value }),
            // Known in part: later.
            None if self.facts.contains_key(&key) => None,
            None => Some(Learnt { key, tokens: 0, value: LearntValue::Nothing }),
        }
    }

    pub(super) fn drain(&mut self) -> Vec<Learnt> {
        let changed = std::mem::take(&mut self.changed);
        changed.into_iter().filter_map(|key| self.told(key)).collect()
    }

    pub(super) fn all(&self) -> Vec<Learnt> {
        self.facts.keys().filter_map(|&key| self.told(key)).collect()
    }

    pub(super) fn len(&self) -> usize {
        self.facts.len()
    }
}

/// What both say together; `None` = they contradict each other.
fn merged(one: Seen, other: Seen) -> Option<Seen> {
    match (one, other) {
        (Seen::Id(one), Seen::Id(other)) => (one == other).then_some(Seen::Id(one)),
        (Seen::Pads(mut pads), Seen::Pads(other)) => {
            for (pad, other) in pads.iter_mut().zip(other) {
                *pad = match (*pad, other) {
                    (Some(one), Some(other)) if one != other => return None,
                    (one, other) => one.or(other),
                };
            }
            Some(Seen::Pads(pads))
        }
        _ => None,
    }
}
