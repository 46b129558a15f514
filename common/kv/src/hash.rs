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

/// Hash of `block` after everything that `previous` stands for.
pub fn chain(previous: SequenceHash, block: BlockHash) -> SequenceHash {
    let mut bytes = [0; 16];
    bytes[..8].copy_from_slice(&previous.0.to_le_bytes());
    bytes[8..].copy_from_slice(&block.0.to_le_bytes());
    SequenceHash(nonzero(xxh3_64(&bytes)))
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
        self.bytes.extend(tokens.iter().flat_map(|token| token.to_le_bytes()));
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
