//! Live batches that wait for a replay to end, in order of their number.

use std::collections::BTreeMap;

/// Bounds of what waits: about 40 s of a busy engine at 100 steps a second, and a memory limit beside it.
const MAX_BATCHES: usize = 4096;
const MAX_BYTES: usize = 32 << 20;

#[derive(Debug, Default)]
pub(super) struct Waiting {
    batches: BTreeMap<u64, Vec<u8>>,
    bytes: usize,
}

impl Waiting {
    /// False when there is no room. A second batch of the same number replaces the first: the later one is of the present life.
    pub(super) fn insert(&mut self, seq: u64, payload: Vec<u8>) -> bool {
        if self.batches.len() >= MAX_BATCHES || self.bytes + payload.len() > MAX_BYTES {
            return false;
        }
        self.bytes += payload.len();
        if let Some(old) = self.batches.insert(seq, payload) {
            self.bytes -= old.len();
        }
        true
    }

    pub(super) fn first(&self) -> Option<u64> {
        self.batches.first_key_value().map(|(&seq, _)| seq)
    }

    pub(super) fn pop(&mut self) -> Option<(u64, Vec<u8>)> {
        let first = self.batches.pop_first()?;
        self.bytes -= first.1.len();
        Some(first)
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }
}
