//! Block and sequence hashes: xxh3_64 over little-endian fields; a result of 0 becomes 1, so that 0 can mean "none".

use xxhash_rust::xxh3::xxh3_64;

use crate::{BlockHash, MediaId, SequenceHash};

fn nonzero(hash: u64) -> u64 {
    hash.max(1)
}

/// Start of every chain of one LoRA adapter and cache salt (`""` = none): `xxh3_64("fovea1" ‖ len, lora ‖ len, salt)`.
pub fn root(lora: &str, salt: &str) -> SequenceHash {
    let mut bytes = Vec::with_capacity(14 + lora.len() + salt.len());
    bytes.extend_from_slice(b"fovea1");
    for part in [lora, salt] {
        bytes.extend_from_slice(&u32::try_from(part.len()).unwrap_or(u32::MAX).to_le_bytes());
        bytes.extend_from_slice(part.as_bytes());
    }
    SequenceHash(nonzero(xxh3_64(&bytes)))
}

/// Hash of `block` after everything that `previous` stands for: `xxh3_64(previous ‖ block)`.
#[inline]
pub fn chain(previous: SequenceHash, block: BlockHash) -> SequenceHash {
    SequenceHash(nonzero(xxh3_64_of_two(previous.0, block.0)))
}

/// `xxh3_64` (unseeded, default secret) of two little-endian words. A chain is as slow as the way from one hash to the next, so the words
/// stay in registers; the two masks are words 3 ^ 4 and 5 ^ 6 of the secret.
#[inline]
fn xxh3_64_of_two(first: u64, second: u64) -> u64 {
    let (low, high) = (first ^ 0x6782_737b_ea42_39b9, second ^ 0xaf56_bc3b_0996_523a);
    let product = u128::from(low) * u128::from(high);
    let folded = product as u64 ^ (product >> 64) as u64;
    let sum = high.wrapping_add(16).wrapping_add(low.swap_bytes()).wrapping_add(folded);
    let mixed = (sum ^ (sum >> 37)).wrapping_mul(0x1656_6791_9e37_79f9);
    mixed ^ (mixed >> 32)
}

/// Hashes blocks one after another in one reused buffer: no allocation per block.
#[derive(Debug, Default)]
pub struct BlockHasher {
    bytes: Vec<u8>,
}

impl BlockHasher {
    /// Starts a block; what was pushed before is forgotten.
    pub fn begin(&mut self) {
        self.bytes.clear();
    }

    pub fn push_tokens(&mut self, tokens: &[u32]) {
        let start = self.bytes.len();
        self.bytes.resize(start + 4 * tokens.len(), 0);
        for (room, token) in self.bytes[start..].as_chunks_mut().0.iter_mut().zip(tokens) {
            *room = token.to_le_bytes();
        }
    }

    /// Adds `count` copies of one token.
    pub fn push_run(&mut self, token: u32, count: u32) {
        let bytes = token.to_le_bytes();
        if count == 1 {
            return self.bytes.extend_from_slice(&bytes);
        }
        let start = self.bytes.len();
        self.bytes.resize(start + 4 * count as usize, 0);
        self.bytes[start..].as_chunks_mut::<4>().0.fill(bytes);
    }

    /// Adds a media span that lies over the block, after all its tokens, spans in order of their start.
    /// `offset` = span start − block start, in tokens.
    pub fn push_span(&mut self, id: &MediaId, offset: i32) {
        self.bytes.extend_from_slice(&id.0);
        self.bytes.extend_from_slice(&offset.to_le_bytes());
    }

    pub fn finish(&self) -> BlockHash {
        BlockHash(nonzero(xxh3_64(&self.bytes)))
    }
}

/// Blocks that are written before they are hashed: a word read back while the parts it was written in are on their way to the
/// cache would wait for them.
const RECORDS: usize = 32;

/// What [`BlockHasher`] hashes, for some blocks in a row.
#[derive(Default)]
pub(crate) struct Records {
    bytes: Vec<u8>,
    /// Bytes in use.
    used: usize,
    /// Where each block's bytes end.
    ends: [usize; RECORDS],
    count: usize,
}

impl Records {
    /// Room for the tokens of the next block, little-endian.
    #[inline]
    pub fn begin(&mut self, tokens: usize) -> &mut [[u8; 4]] {
        self.room(4 * tokens).as_chunks_mut().0
    }

    /// See [`BlockHasher::push_span`].
    #[inline]
    pub fn push_span(&mut self, id: &MediaId, offset: i32) {
        if let Some((first, second)) = self.room(36).split_first_chunk_mut() {
            *first = id.0;
            second.copy_from_slice(&offset.to_le_bytes());
        }
    }

    /// The next bytes, with anything in them.
    #[inline]
    fn room(&mut self, bytes: usize) -> &mut [u8] {
        let start = self.used;
        self.used += bytes;
        if self.bytes.len() < self.used {
            self.bytes.resize(2 * self.used.max(512), 0);
        }
        &mut self.bytes[start..self.used]
    }

    /// Ends a block. True: there is room for no more before [`Self::chain`].
    #[inline]
    pub fn finish(&mut self) -> bool {
        self.ends[self.count] = self.used;
        self.count += 1;
        self.count == RECORDS
    }

    /// Appends the sequence hash of each block, forgets the blocks and returns the last hash.
    pub fn chain(&mut self, mut previous: SequenceHash, out: &mut Vec<SequenceHash>) -> SequenceHash {
        let mut start = 0;
        out.extend(self.ends[..self.count].iter().map(|&end| {
            previous = chain(previous, BlockHash(nonzero(xxh3_64(&self.bytes[start..end]))));
            start = end;
            previous
        }));
        (self.used, self.count) = (0, 0);
        previous
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_step_of_a_chain_is_the_plain_hash_of_both(previous: u64, block: u64) {
            let bytes = [previous.to_le_bytes(), block.to_le_bytes()].concat();
            prop_assert_eq!(xxh3_64_of_two(previous, block), xxh3_64(&bytes));
        }
    }
}
