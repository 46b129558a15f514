//! The pad values that stand for one media item, from the engine's hash of it.
//!
//! Mirrors `MultimodalDataItem` of `srt/managers/schedule_batch.py`: one value up to 0.5.22, a cycle of four from 0.5.23 on, which each
//! span of the item starts anew.

use sha2::{Digest, Sha256};

use super::{FIRST_PAD, token};

/// How an engine makes pad values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rule {
    /// Up to 0.5.22: one value of 30 bits.
    Single,
    /// From 0.5.23 on: four values of 62 bits.
    Wide,
}

impl Rule {
    /// Values per cycle.
    pub fn width(self) -> usize {
        match self {
            Self::Single => 1,
            Self::Wide => 4,
        }
    }

    /// The engine's own ids for an item's hash. Only the low 64 bits of a longer hash count.
    pub fn ids(self, hash: u64) -> Vec<u64> {
        match self {
            Self::Single => vec![u64::from(FIRST_PAD) + hash % (1 << 30)],
            Self::Wide => wide(&hash.to_be_bytes()),
        }
    }

    /// The same for an item with a 32-byte identity (Kimi), whose hash is the first 8 bytes.
    pub fn ids_of_identity(self, identity: &[u8; 32]) -> Vec<u64> {
        match self {
            Self::Single => self.ids(identity[..8].iter().fold(0, |hash, &byte| hash << 8 | u64::from(byte))),
            Self::Wide => wide(identity),
        }
    }

    /// Canonical tokens of [`Self::ids`], to be pushed by [`crate::RoutingView::push_cycle`].
    pub fn pads(self, hash: u64) -> Vec<u32> {
        self.ids(hash).into_iter().map(token).collect()
    }

    /// Canonical tokens of [`Self::ids_of_identity`].
    pub fn pads_of_identity(self, identity: &[u8; 32]) -> Vec<u32> {
        self.ids_of_identity(identity).into_iter().map(token).collect()
    }
}

fn wide(seed: &[u8]) -> Vec<u64> {
    let digest = Sha256::new().chain_update(b"sglang-mm-wide-pad-v1").chain_update(seed).finalize();
    let words = digest.as_slice().as_chunks::<8>().0;
    words.iter().map(|word| u64::from(FIRST_PAD) + (u64::from_be_bytes(*word) & ((1 << 62) - 1))).collect()
}
