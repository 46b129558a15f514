//! One prediction while its request is in the engine: the chain it expects, and how blocks that were stored compare with it.

use std::sync::Arc;
use std::time::Instant;

use fovea_gossip::message::LearntValue;
use fovea_kv::event::Stored;
use fovea_kv::sglang::is_pad;
use fovea_kv::{BlockHasher, MediaId, MediaKey, SequenceHash, chain};

use super::facts::{Facts, Seen, Sight};
use super::verdict::{Cause, Divergence, Found, Media, Reason, ShortCause, bounded};
use super::{Expected, FlightId, Outcome, Shown};

/// A media item of the prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Item {
    pub(super) start: u32,
    pub(super) len: u32,
    pub(super) key: Option<MediaKey>,
    /// Spans: the identity believed.
    id: Option<MediaId>,
    /// What the engine keys it by is in the view.
    pub(super) known: bool,
}

impl Item {
    fn end(&self) -> u32 {
        self.start.saturating_add(self.len)
    }
}

/// Whose a block is that contradicts a prediction, the weakest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Proof {
    /// Of one of several requests that wait there.
    None,
    /// Of the only request that waits there, if its own block never comes.
    Only,
    /// Of this request.
    Own,
}

/// A stored block that the prediction does not have there.
#[derive(Debug)]
pub(super) struct Against {
    /// Block from which on its event was stored; those before `block` agree.
    first: u32,
    pub(super) block: u32,
    pub(super) cause: Cause,
    proof: Proof,
    tokens: Vec<u32>,
    media: Vec<Media>,
}

/// How an event that begins at a place of a flight's chain compares with it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Walk {
    /// Blocks of the event that lie inside the prompt and agree.
    pub(super) agreed: u32,
    /// Why the next does not, and the position from which on: `u32::MAX` when the tokens are equal.
    pub(super) differs: Option<(Cause, u32)>,
    /// The event may be of this request.
    pub(super) fits: bool,
}

#[derive(Debug)]
pub(super) struct Flight {
    pub(super) id: FlightId,
    /// Memory charged for it.
    pub(super) bytes: usize,
    pub(super) size: u32,
    shown: Shown,
    pub(super) session: Option<Arc<str>>,
    tokens: Vec<u32>,
    pub(super) items: Vec<Item>,
    pub(super) root: SequenceHash,
    /// Full blocks of the prompt.
    pub(super) full: u32,
    /// Hashes of the first of them: as far as every identity is known, or was seen.
    pub(super) chain: Vec<SequenceHash>,
    /// Block i was stored, or held until it was removed.
    pub(super) came: Vec<bool>,
    /// Blocks of the chain that were known when the request began.
    pub(super) watched: usize,
    pub(super) against: Option<Against>,
    /// What is learnt if the evidence in `against` holds.
    pub(super) lessons: Vec<Sight>,
    /// A block of the request itself was stored outside the chain.
    pub(super) strayed: bool,
    pub(super) cleared: bool,
    pub(super) exact: bool,
    /// The whole of it was predicted before anything of it was seen.
    pub(super) predicted: bool,
    pub(super) prompt_tokens: u32,
    pub(super) reused_tokens: u32,
    pub(super) over: Option<(Instant, Outcome)>,
    /// Its verdict is given.
    pub(super) reported: bool,
}

impl Flight {
    pub(super) fn new(id: FlightId, expected: Expected) -> Self {
        let bytes = Self::bytes(&expected);
        let Expected { view, slots, root, block_size, exact, prompt_tokens, reused_tokens, session, shown } = expected;
        let mut tokens = Vec::with_capacity(view.len() as usize);
        view.runs().iter().for_each(|run| tokens.extend(std::iter::repeat_n(run.token, run.count as usize)));
        let span = |start| {
            let found = view.spans().binary_search_by_key(&start, |span| span.start);
            found.ok().map(|index| view.spans()[index].id)
        };
        let mut items: Vec<_> = slots
            .iter()
            .map(|slot| {
                let id = if slot.known && shown == Shown::Spans { span(slot.start) } else { None };
                let known = slot.known && (shown != Shown::Spans || id.is_some());
                Item { start: slot.start, len: slot.len, key: Some(slot.key), id, known }
            })
            .collect();
        let is_unnamed = |start| slots.binary_search_by_key(start, |slot| slot.start).is_err();
        let unnamed = view.spans().iter().filter(|span| is_unnamed(&span.start));
        items.extend(unnamed.map(|span| Item {
            start: span.start,
            len: span.len,
            key: None,
            id: Some(span.id),
            known: true,
        }));
        items.retain(|item| item.start.checked_add(item.len).is_some_and(|end| item.len > 0 && end <= view.len()));
        items.sort_by_key(|item| item.start);
        let size = block_size.get();
        let full = view.len() / size;
        Self {
            id,
            bytes,
            size,
            shown,
            session,
            tokens,
            items,
            root,
            full,
            chain: Vec::new(),
            came: Vec::new(),
            watched: 0,
            against: None,
            lessons: Vec::new(),
            strayed: false,
            cleared: false,
            exact,
            predicted: false,
            prompt_tokens,
            reused_tokens,
            over: None,
            reported: false,
        }
    }

    /// Memory that a flight of such a view takes, in bytes, about.
    pub(super) fn bytes(expected: &Expected) -> usize {
        let blocks = expected.view.len() / expected.block_size.get();
        512 + 4 * expected.view.len() as usize + 96 * blocks as usize + 80 * expected.slots.len()
    }

    pub(super) fn has_media(&self) -> bool {
        self.items.first().is_some_and(|item| item.start < self.full * self.size)
    }

    pub(super) fn is_open(&self) -> bool {
        self.items.iter().any(|item| !item.known)
    }

    /// Takes what is known of items that are not. True = more of the chain may be known.
    pub(super) fn resolve(&mut self, facts: &mut Facts) -> bool {
        let mut changed = false;
        for item in self.items.iter_mut().filter(|item| !item.known) {
            let Some(key) = item.key else { continue };
            let value = facts.value(&key).filter(|&(tokens, _)| tokens == 0 || tokens == item.len);
            match (self.shown, value) {
                (Shown::Spans, Some((_, LearntValue::Id(id)))) => item.id = Some(id),
                (Shown::Pads, Some((_, LearntValue::Pads(pads)))) => {
                    let end = item.end() as usize;
                    self.tokens[item.start as usize..end]
                        .iter_mut()
                        .zip(pads.iter().cycle())
                        .for_each(|(to, &pad)| *to = pad);
                }
                _ => continue,
            }
            facts.touch(&key);
            (item.known, changed) = (true, true);
        }
        changed
    }

    /// Hashes as many blocks more as are known whole; gives their number.
    pub(super) fn extend(&mut self, hasher: &mut BlockHasher) -> usize {
        let before = self.chain.len();
        // A pair at the position before an item has the item's first token in it.
        let early = u32::from(self.shown == Shown::Pairs);
        let open = self.items.iter().find(|item| !item.known).map_or(u32::MAX, |item| item.start.saturating_sub(early));
        for block in u32::try_from(before).unwrap_or(u32::MAX)..self.full.min(open / self.size) {
            let (start, end) = (block * self.size, (block + 1) * self.size);
            hasher.begin();
            hasher.push_tokens(&self.tokens[start as usize..end as usize]);
            for media in self.media(block) {
                media.id.iter().for_each(|id| hasher.push_span(id, media.offset));
            }
            let previous = self.chain.last().copied().unwrap_or(self.root);
            self.chain.push(chain(previous, hasher.finish()));
            self.came.push(false);
        }
        self.chain.len() - before
    }

    fn items_over(&self, block: u32) -> impl Iterator<Item = &Item> {
        let (start, end) = (block * self.size, (block + 1) * self.size);
        self.items.iter().filter(move |item| item.start < end && item.end() > start)
    }

    /// Identities that the engine is to show over a block; none where they are inside the tokens.
    fn media(&self, block: u32) -> Vec<Media> {
        let start = i64::from(block * self.size);
        let offset = |item: &Item| i32::try_from(i64::from(item.start) - start).unwrap_or(i32::MIN);
        let shown = self.items_over(block).filter(|_| self.shown == Shown::Spans);
        shown.map(|item| Media { offset: offset(item), id: item.id }).collect()
    }

    /// Compares an event whose first block would be block `first` of this prompt.
    pub(super) fn walk(&self, first: u32, stored: &Stored, hashes: &[Option<SequenceHash>]) -> Walk {
        let blocks = stored.tokens.chunks_exact(self.size as usize).zip(hashes);
        for ((index, (tokens, hash)), block) in (0..).zip(blocks).zip(first..) {
            let end = |differs, fits| Walk { agreed: index, differs, fits };
            if block >= self.full {
                // What follows the full blocks is the end of the prompt and the answer: no media.
                return end(None, !self.shows_media(stored, index as usize));
            }
            let Some(hash) = hash else { return end(None, false) };
            let known = self.chain.get(block as usize);
            if known == Some(hash) {
                continue;
            }
            match self.compare(block, tokens, &media_of(stored, index as usize)) {
                None if known.is_none() => {}
                None => return end(Some((Cause::Unknown, u32::MAX)), false),
                differs => return end(differs, false),
            }
        }
        Walk { agreed: u32::try_from(hashes.len()).unwrap_or(u32::MAX), differs: None, fits: true }
    }

    fn shows_media(&self, stored: &Stored, from: usize) -> bool {
        match self.shown {
            Shown::Spans => stored.extra.iter().skip(from + 1).any(|extra| !extra.media.is_empty()),
            // The first of these blocks may still have media of the prompt.
            Shown::Pads => stored.tokens.iter().skip((from + 1) * self.size as usize).any(|&token| is_pad(token)),
            Shown::Pairs => false,
        }
    }

    /// Why a block is not this prompt's block, and from which position on; `None` = it may be.
    fn compare(&self, block: u32, tokens: &[u32], media: &[Media]) -> Option<(Cause, u32)> {
        let start = block * self.size;
        if self.shown == Shown::Pairs && self.items_over(block).any(|item| !item.known) {
            return None;
        }
        for (at, &token) in (start..).zip(tokens) {
            let expected = self.tokens[at as usize];
            if token == expected {
                continue;
            }
            let item = self.items.iter().find(|item| item.start <= at && at < item.end());
            let of_media = match self.shown {
                Shown::Pads => is_pad(token),
                // More of the item that ends here.
                Shown::Spans => self.items.iter().any(|item| item.end() == at && self.tokens[at as usize - 1] == token),
                Shown::Pairs => false,
            };
            match (item, of_media) {
                (Some(item), true) if !item.known => {}
                (Some(_), true) => return Some((Cause::MediaIdentity, at)),
                (None, false) => return Some((Cause::Text, at)),
                _ => return Some((Cause::MediaCount, at)),
            }
        }
        let expected = self.media(block);
        if self.shown != Shown::Spans || expected == media {
            return None;
        }
        let same_places = expected.iter().map(|media| media.offset).eq(media.iter().map(|media| media.offset));
        let agrees = |(one, other): (&Media, &Media)| one.id.is_none() || one.id == other.id;
        match same_places {
            true if expected.iter().zip(media).all(agrees) => None,
            true => Some((Cause::MediaIdentity, u32::MAX)),
            false => Some((Cause::MediaCount, u32::MAX)),
        }
    }

    /// What the first `blocks` of an event show of the items that begin at `last` or before, when its first is block `first`.
    pub(super) fn sights(
        &self,
        first: u32,
        blocks: usize,
        last: u32,
        stored: &Stored,
        facts: &mut Facts,
    ) -> Vec<Sight> {
        let from = first * self.size;
        let shown = stored.tokens.len().min(blocks.saturating_mul(self.size as usize));
        let end = from.saturating_add(u32::try_from(shown).unwrap_or(u32::MAX));
        let mut sights = Vec::new();
        for (index, item) in self.items.iter().enumerate() {
            let Some(key) = item.key.filter(|_| item.start <= last && item.start < end && item.end() > from) else {
                continue;
            };
            let begin = item.start.max(from);
            let next = self.items.get(index + 1).filter(|next| next.start == item.end());
            let limit = next.map_or(end, |next| next.start.min(end));
            let tokens = &stored.tokens[(begin - from) as usize..(limit - from) as usize];
            let uniform = |&&token: &&u32| match self.shown {
                Shown::Pads => is_pad(token),
                _ => token == self.tokens[item.start as usize],
            };
            let run = tokens.iter().take_while(uniform).count();
            let stop = begin + u32::try_from(run).unwrap_or(u32::MAX);
            let mut seen_end = (stop < limit).then_some(stop - item.start);
            let seen = match self.shown {
                Shown::Spans => {
                    let whole = &self.tokens[item.start as usize..item.end() as usize];
                    // A replacement of several tokens: where it ends cannot be told from its text.
                    seen_end = seen_end.filter(|_| whole.iter().all(|&token| token == whole[0]));
                    let block = begin / self.size;
                    let offset = i64::from(item.start) - i64::from(block * self.size);
                    let shown = media_of(stored, (block - first) as usize);
                    let found = shown.iter().find(|media| i64::from(media.offset) == offset);
                    let Some(id) = found.and_then(|media| media.id) else { continue };
                    Some(Seen::Id(id))
                }
                Shown::Pads if run == 0 => None,
                Shown::Pads => facts.cycle(begin - item.start, &tokens[..run]),
                Shown::Pairs => continue,
            };
            sights.push(Sight { key, seen, expected: item.len, tokens: seen_end });
        }
        sights
    }

    /// Items that begin before the end of block `end`: with equal ones two requests teach the same.
    pub(super) fn shape(&self, end: u32) -> impl Iterator<Item = (u32, u32, Option<MediaKey>)> {
        let before = self.items.iter().filter(move |item| item.start < end.saturating_mul(self.size));
        before.map(|item| (item.start, item.len, item.key))
    }

    /// Takes the blocks of an event that are this prompt's, beyond what the chain has.
    pub(super) fn take(&mut self, first: u32, agreed: u32, stored: &Stored, hashes: &[Option<SequenceHash>]) -> usize {
        let before = self.chain.len();
        let blocks = stored.tokens.chunks_exact(self.size as usize).zip(hashes).take(agreed as usize);
        for ((tokens, hash), block) in blocks.zip(first as usize..) {
            let Some(hash) = hash.filter(|_| block == self.chain.len()) else { continue };
            let start = block * self.size as usize;
            self.tokens[start..start + tokens.len()].copy_from_slice(tokens);
            self.chain.push(hash);
            self.came.push(true);
        }
        self.chain.len() - before
    }

    /// Keeps a block that speaks against the prediction, unless better evidence is there. Gives the last position of which it shows something.
    pub(super) fn contradict(&mut self, first: u32, walk: &Walk, stored: &Stored, proof: Proof) -> Option<u32> {
        let (cause, last) = walk.differs?;
        let block = first + walk.agreed;
        let is_better = |kept: &Against| kept.proof > proof || (kept.proof == proof && kept.block <= block);
        // Evidence at a place where this event agrees was another request's.
        if self.against.as_ref().is_some_and(|kept| is_better(kept) && !(first..block).contains(&kept.block)) {
            return None;
        }
        let index = walk.agreed as usize;
        let tokens = bounded(stored.tokens.chunks_exact(self.size as usize).nth(index).unwrap_or_default());
        let media = bounded(&media_of(stored, index));
        self.against = Some(Against { first, block, cause, proof, tokens, media });
        self.lessons.clear();
        // Items of which only the identity differs show nothing of later blocks.
        (cause != Cause::Unknown).then(|| last.min((block + 1).saturating_mul(self.size) - 1))
    }

    /// What its end says, if it is all that comes. O(blocks).
    pub(super) fn judge(&self, held: impl Fn(SequenceHash) -> bool, outcome: &Outcome) -> Found {
        if outcome.failed {
            return Found::Unchecked(Reason::Failed);
        }
        let is_missing = |(&hash, &came): (&SequenceHash, &bool)| !came && !held(hash);
        let blocks = || self.chain.iter().zip(&self.came);
        let missing = blocks().position(is_missing);
        // The first block that is not there; where the chain is not known to its end, the one behind.
        let first = missing.unwrap_or(self.chain.len());
        let block = u32::try_from(first).ok();
        // What was not watched from the beginning may have been there unseen: only a block of its own shows that it was not.
        let watched = missing.is_some_and(|missing| missing < self.watched);
        let needed = if watched { Proof::Only } else { Proof::Own };
        let holds = |against: &&Against| {
            against.proof >= needed && (against.first as usize..=against.block as usize).contains(&first)
        };
        if let Some(against) = self.against.as_ref().filter(holds) {
            return Found::Diverged { block: Some(against.block), cause: against.cause };
        }
        if self.exact && outcome.prompt_tokens.is_some_and(|tokens| tokens != self.prompt_tokens) {
            let cause = if self.items.is_empty() { Cause::Text } else { Cause::MediaCount };
            return Found::Diverged { block: None, cause };
        }
        if watched && self.strayed {
            return Found::Diverged { block, cause: Cause::Unknown };
        }
        if !self.predicted {
            return Found::Unchecked(Reason::Inexact);
        }
        if self.full == 0 {
            return Found::Unchecked(Reason::NoBlocks);
        }
        let Some(first) = missing else {
            let doubted =
                self.against.as_ref().is_some_and(|against| self.came.get(against.block as usize) == Some(&false));
            return if doubted { Found::Unchecked(Reason::Ambiguous) } else { Found::Exact };
        };
        let missing = blocks().filter(|&block| is_missing(block)).count();
        let cause = match () {
            () if self.cleared => ShortCause::Evicted,
            () if first > 0 && self.came[first - 1] => ShortCause::Cut,
            () => ShortCause::NoEvents,
        };
        Found::Short { missing: u32::try_from(missing).unwrap_or(u32::MAX), cause }
    }

    /// The evidence for a verdict.
    pub(super) fn divergence(&self, block: Option<u32>, cause: Cause, actual_tokens: Option<u32>) -> Divergence {
        let against = self.against.as_ref().filter(|against| Some(against.block) == block);
        let first = block.unwrap_or(0) * self.size;
        let shown = block.filter(|_| against.is_some());
        let expected =
            shown.map(|_| self.tokens[first as usize..].iter().take(self.size as usize).copied().collect::<Vec<_>>());
        Divergence {
            flight: self.id,
            session: self.session.as_deref().map(str::to_owned),
            cause,
            block,
            first,
            expected: bounded(&expected.unwrap_or_default()),
            actual: against.map(|against| against.tokens.clone()).unwrap_or_default(),
            expected_media: shown.map(|block| bounded(&self.media(block))).unwrap_or_default(),
            actual_media: against.map(|against| against.media.clone()).unwrap_or_default(),
            prompt_tokens: (self.prompt_tokens, actual_tokens),
        }
    }
}

/// Identities that an event shows over one of its blocks.
fn media_of(stored: &Stored, index: usize) -> Vec<Media> {
    let shown = stored.extra.get(index).map_or(&[][..], |extra| &extra.media);
    shown.iter().map(|&(id, offset)| Media { offset, id: Some(id) }).collect()
}
