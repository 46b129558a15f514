//! Media items whose encoder output one worker keeps, as its sidecar tells: encoding them there costs nothing.
//!
//! A snapshot in pieces or changes, in order. **Invariant:** at most [`KEYS_MAX`] keys; what comes beyond is left out, which costs a
//! wrong guess and nothing more.

use std::collections::BTreeSet;

/// Keys per worker: 16 bytes each at the most.
pub const KEYS_MAX: usize = 1 << 16;

/// The short name of a media item in these sets: the first eight bytes of its `MediaId`.
pub fn short_key(key: &[u8; 32]) -> u64 {
    key.first_chunk().copied().map_or(0, u64::from_le_bytes)
}

/// What one worker's encoder holds.
#[derive(Debug, Default)]
pub struct Embeddings {
    keys: BTreeSet<u64>,
}

impl Embeddings {
    /// Everything told before is void: another life of the encoder, or a snapshot begins.
    pub fn clear(&mut self) {
        self.keys.clear();
    }

    /// Applies one change, what left first.
    pub fn change(&mut self, stored: &[u64], removed: &[u64]) {
        for key in removed {
            self.keys.remove(key);
        }
        for key in stored {
            if self.keys.len() >= KEYS_MAX {
                return;
            }
            self.keys.insert(*key);
        }
    }

    pub fn holds(&self, key: u64) -> bool {
        self.keys.contains(&key)
    }

    /// Bit i: item i of `keys` is held. Key 0 (no identity known) and items from the 65th on count as not held.
    pub fn held(&self, keys: &[u64]) -> u64 {
        let held = keys.iter().take(64).enumerate().filter(|(_, key)| **key != 0 && self.holds(**key));
        held.fold(0, |bits, (at, _)| bits | 1 << at)
    }

    pub fn len(&self) -> usize {
        self.keys.len()
    }

    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_apply_in_order_and_stay_bounded() {
        let mut held = Embeddings::default();
        held.change(&[1, 2, 3], &[]);
        held.change(&[4], &[2, 9]);
        assert_eq!(held.held(&[1, 2, 3, 4, 5]), 0b01101);
        let many: Vec<u64> = (1..2 * KEYS_MAX as u64).collect();
        held.change(&many, &[]);
        assert_eq!((held.len(), held.held(&vec![1; 100])), (KEYS_MAX, u64::MAX));
        held.clear();
        assert!(held.is_empty());
    }

    #[test]
    fn a_short_key_is_the_front_of_the_long_one() {
        let mut key = [0; 32];
        (key[0], key[31]) = (5, 9);
        assert_eq!(short_key(&key), 5);
    }
}
