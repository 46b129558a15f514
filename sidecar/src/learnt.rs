//! What the closed loop learnt, in the order in which it was learnt: each balancer stream reads on from where it stopped.

use std::collections::{BTreeMap, HashMap};

use fovea_gossip::message::Learnt;
use fovea_kv::MediaKey;

/// Facts kept, the oldest go first; about 150 bytes each.
const FACTS_MAX: usize = 64 << 10;
/// Facts in one message.
const MESSAGE_MAX: usize = 512;

/// The last fact about each key.
#[derive(Debug, Default)]
pub struct Log {
    facts: HashMap<MediaKey, (u64, Learnt)>,
    order: BTreeMap<u64, MediaKey>,
    last: u64,
}

impl Log {
    /// Takes a fact; true = it says something new.
    pub fn put(&mut self, fact: Learnt) -> bool {
        if self.facts.get(&fact.key).is_some_and(|(_, known)| *known == fact) {
            return false;
        }
        self.last += 1;
        let key = fact.key;
        if let Some((old, _)) = self.facts.insert(key, (self.last, fact)) {
            self.order.remove(&old);
        }
        self.order.insert(self.last, key);
        if self.facts.len() > FACTS_MAX
            && let Some((_, oldest)) = self.order.pop_first()
        {
            self.facts.remove(&oldest);
        }
        true
    }

    /// The next facts after place `seen`, and the new place; empty when there are none.
    pub fn after(&self, seen: u64) -> (Vec<Learnt>, u64) {
        let next = self.order.range(seen + 1..).take(MESSAGE_MAX);
        let mut place = seen;
        let facts = next.filter_map(|(&at, key)| {
            place = at;
            self.facts.get(key).map(|(_, fact)| fact.clone())
        });
        (facts.collect(), place)
    }

    /// Another engine: nothing of what was learnt holds. Places stay, so that readers miss nothing that comes.
    pub fn clear(&mut self) {
        self.facts.clear();
        self.order.clear();
    }

    pub fn len(&self) -> usize {
        self.facts.len()
    }

    pub fn is_empty(&self) -> bool {
        self.facts.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use fovea_gossip::message::LearntValue;

    use super::*;

    fn fact(key: u8, tokens: u32) -> Learnt {
        Learnt { key: MediaKey([key; 32]), tokens, value: LearntValue::Nothing }
    }

    #[test]
    fn a_reader_gets_each_fact_once_and_a_newer_one_in_place_of_the_older() {
        let mut log = Log::default();
        assert!(log.put(fact(1, 5)) && log.put(fact(2, 6)) && !log.put(fact(1, 5)));
        let (first, place) = log.after(0);
        assert_eq!(first, [fact(1, 5), fact(2, 6)]);
        assert_eq!(log.after(place), (Vec::new(), place));
        assert!(log.put(fact(1, 9)));
        assert_eq!(log.after(place).0, [fact(1, 9)]);
        assert_eq!(log.after(0).0, [fact(2, 6), fact(1, 9)]);
        assert_eq!(log.len(), 2);
    }

    #[test]
    fn what_comes_after_a_clear_is_read_from_the_old_place() {
        let mut log = Log::default();
        log.put(fact(1, 5));
        let (_, place) = log.after(0);
        log.clear();
        assert_eq!((log.after(0).0, log.len()), (Vec::new(), 0));
        log.put(fact(1, 5));
        assert_eq!(log.after(place).0, [fact(1, 5)]);
    }

    #[test]
    fn the_oldest_go_first() {
        let mut log = Log::default();
        for n in 0..FACTS_MAX as u32 + 1 {
            let mut key = [0; 32];
            key[..4].copy_from_slice(&n.to_le_bytes());
            log.put(Learnt { key: MediaKey(key), tokens: n, value: LearntValue::Nothing });
        }
        assert_eq!((log.len(), log.after(0).0[0].tokens), (FACTS_MAX, 1));
    }
}
