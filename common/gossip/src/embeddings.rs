//! Sidecar side of "which media embeddings the encoder holds": one log of changes for all balancers, each with a place in it.
//!
//! **Invariant:** memory is bounded by [`KEYS_MAX`] keys and [`LOG_MAX`] changes whatever balancers do; one that is behind the log gets
//! everything anew.

use std::collections::{BTreeSet, VecDeque};

use crate::message::Embeddings;

/// Keys told of at most; what comes beyond is not told, which costs a wrong guess and nothing more.
pub const KEYS_MAX: usize = 1 << 16;
/// Changes kept for balancers that lag.
pub const LOG_MAX: usize = 1 << 12;

/// Where one balancer is; a new connection starts with nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place(Option<u64>);

#[derive(Debug, Default)]
pub struct Held {
    keys: BTreeSet<u64>,
    /// Key, and whether it came.
    log: VecDeque<(u64, bool)>,
    /// Changes since the start.
    changes: u64,
}

impl Held {
    /// The encoder keeps the output for this key (the first eight bytes of a `MediaId`, little-endian).
    pub fn stored(&mut self, key: u64) {
        if self.keys.len() < KEYS_MAX && self.keys.insert(key) {
            self.push(key, true);
        }
    }

    pub fn removed(&mut self, key: u64) {
        if self.keys.remove(&key) {
            self.push(key, false);
        }
    }

    /// The encoder lost everything.
    pub fn clear(&mut self) {
        // Nobody's place is in a log that begins later: everything is told anew.
        self.changes += self.log.len() as u64 + 1;
        self.keys.clear();
        self.log.clear();
    }

    /// What a balancer at `place` has to be told; it is up to date after that.
    pub fn poll(&self, place: &mut Place) -> Option<Embeddings> {
        let told = place.0.replace(self.changes);
        let behind = told.and_then(|told| usize::try_from(self.changes - told).ok());
        let Some(start) = behind.and_then(|behind| self.log.len().checked_sub(behind)) else {
            let stored = self.keys.iter().copied().collect();
            return Some(Embeddings { first: true, stored, removed: Vec::new() });
        };
        // The last word about a key counts.
        let (mut stored, mut removed) = (BTreeSet::new(), BTreeSet::new());
        for (key, came) in self.log.range(start..) {
            let (to, from) = if *came { (&mut stored, &mut removed) } else { (&mut removed, &mut stored) };
            from.remove(key);
            to.insert(*key);
        }
        let told = Embeddings { first: false, stored: Vec::from_iter(stored), removed: Vec::from_iter(removed) };
        (!told.stored.is_empty() || !told.removed.is_empty()).then_some(told)
    }

    fn push(&mut self, key: u64, came: bool) {
        self.changes += 1;
        if self.log.len() >= LOG_MAX {
            self.log.pop_front();
        }
        self.log.push_back((key, came));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn told(held: &Held, place: &mut Place) -> String {
        held.poll(place)
            .map_or_else(String::new, |told| format!("{} +{:?} -{:?}", told.first, told.stored, told.removed))
    }

    #[test]
    fn a_new_balancer_gets_all_then_changes() {
        let (mut held, mut place) = (Held::default(), Place::default());
        held.stored(5);
        held.stored(6);
        assert_eq!(told(&held, &mut place), "true +[5, 6] -[]");
        assert_eq!(told(&held, &mut place), "");
        held.removed(5);
        held.removed(9);
        held.stored(7);
        held.stored(7);
        assert_eq!(told(&held, &mut place), "false +[7] -[5]");
        held.clear();
        held.stored(1);
        assert_eq!(told(&held, &mut place), "true +[1] -[]");
    }

    #[test]
    fn a_balancer_behind_the_log_gets_all_and_memory_is_bounded() {
        let (mut held, mut place) = (Held::default(), Place::default());
        told(&held, &mut place);
        for key in 0..2 * KEYS_MAX as u64 {
            held.stored(key);
        }
        assert_eq!((held.keys.len(), held.log.len()), (KEYS_MAX, LOG_MAX));
        let all = held.poll(&mut place).unwrap();
        assert!(all.first && all.stored.len() == KEYS_MAX);
        crate::codec::encode_sidecar(&crate::message::FromSidecar::Embeddings(all)).unwrap();
    }
}
