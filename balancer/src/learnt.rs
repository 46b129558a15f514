//! How the engines of one pool key media items, as their sidecars saw it: the bridge from what we call an item to what they call it.

use fovea_gossip::message::{Learnt as Fact, LearntValue};
use fovea_kv::MediaKey;
use quick_cache::sync::Cache;

use crate::prepare::{Learnt, LearntMedia};

/// Facts kept per pool, about 150 bytes each; the least used go first.
const FACTS_MAX: usize = 64 << 10;

/// What was learnt, by our key.
pub struct Store(Cache<MediaKey, LearntMedia>);

impl Default for Store {
    fn default() -> Self {
        Self(Cache::new(FACTS_MAX))
    }
}

impl Store {
    /// The last fact about a key counts.
    pub fn put(&self, fact: Fact) {
        if fact.value == LearntValue::Nothing {
            self.0.remove(&fact.key);
        } else {
            self.0.insert(fact.key, LearntMedia { tokens: fact.tokens, value: fact.value });
        }
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

impl Learnt for Store {
    fn get(&self, key: &MediaKey) -> Option<LearntMedia> {
        self.0.get(key)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_fact_counts_and_nothing_forgets() {
        let (store, key) = (Store::default(), MediaKey([3; 32]));
        let pads = |n| LearntValue::Pads(vec![n]);
        store.put(Fact { key, tokens: 4, value: pads(1_000_001) });
        store.put(Fact { key, tokens: 6, value: pads(1_000_002) });
        assert_eq!(store.get(&key), Some(LearntMedia { tokens: 6, value: pads(1_000_002) }));
        store.put(Fact { key, tokens: 0, value: LearntValue::Nothing });
        assert_eq!((store.get(&key), store.len()), (None, 0));
    }
}
