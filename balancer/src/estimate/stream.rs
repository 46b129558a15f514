//! The pseudo-tokens that llm-d's estimator makes of a request, and the block hashes that its approximate prefix cache makes of these
//! (llm-d-router ebab68792, `dataproducer/tokenizer/estimate.go` and `approx-prefix-cache-producer`).

use xxhash_rust::xxh64::xxh64;

/// Bytes of one pseudo-token.
const TOKEN_BYTES: usize = 4;

/// A media item of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Asset {
    /// `image`, `video` or `audio`.
    pub modality: &'static str,
    /// XXH64 of its URL or data.
    pub hash: u64,
    /// Its first pseudo-token, and their count.
    pub offset: u64,
    pub tokens: u32,
}

/// One prompt, flattened to little-endian words of 32 bits.
#[derive(Clone, Debug)]
pub struct Stream {
    /// The first `bytes_max` bytes.
    bytes: Vec<u8>,
    bytes_max: usize,
    /// Of all of it, kept or not.
    length: u64,
    pub assets: Vec<Asset>,
}

impl Stream {
    /// Keeps what the first `tokens_max` pseudo-tokens take; counts all.
    pub fn new(tokens_max: usize) -> Self {
        Self { bytes: Vec::new(), bytes_max: tokens_max.saturating_mul(TOKEN_BYTES), length: 0, assets: Vec::new() }
    }

    pub fn text(&mut self, text: &str) {
        self.push(text.as_bytes());
    }

    pub fn token(&mut self, token: u32) {
        self.push(&token.to_le_bytes());
    }

    /// A media item: one token that stands for `content`, repeated.
    pub fn asset(&mut self, modality: &'static str, content: &str, tokens: u32) {
        self.align();
        let hash = xxh64(content.as_bytes(), 0);
        self.assets.push(Asset { modality, hash, offset: self.tokens(), tokens });
        let room = (self.bytes_max - self.bytes.len()) / TOKEN_BYTES;
        let [a, b, c, d, ..] = hash.to_le_bytes();
        for _ in 0..room.min(tokens as usize) {
            self.bytes.extend([a, b, c, d]);
        }
        self.length += u64::from(tokens) * TOKEN_BYTES as u64;
    }

    /// Zeros up to the next whole token.
    pub fn align(&mut self) {
        while !self.length.is_multiple_of(TOKEN_BYTES as u64) {
            self.push(&[0]);
        }
    }

    /// Whole tokens so far.
    pub fn tokens(&self) -> u64 {
        self.length / TOKEN_BYTES as u64
    }

    /// What was kept.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    fn push(&mut self, bytes: &[u8]) {
        let room = self.bytes_max - self.bytes.len();
        self.bytes.extend_from_slice(&bytes[..bytes.len().min(room)]);
        self.length += bytes.len() as u64;
    }
}

/// Hashes of the blocks of `tokens` (little-endian words), a last partial one included.
///
/// As in llm-d nothing separates model and salt, so that `ab` with salt `c` equals `a` with `bc`.
pub fn chain(model: &str, salt: &str, tokens: &[u8], block_tokens: usize, blocks_max: usize) -> Vec<u64> {
    let mut last = xxh64([model, salt].concat().as_bytes(), 0);
    let blocks = tokens.chunks(block_tokens.max(1).saturating_mul(TOKEN_BYTES)).take(blocks_max);
    let hash = |block: &[u8]| {
        let mut link = [0; 16];
        link[..8].copy_from_slice(&xxh64(block, 0).to_le_bytes());
        link[8..].copy_from_slice(&last.to_le_bytes());
        last = xxh64(&link, 0);
        last
    };
    blocks.map(hash).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_chained_from_model_and_salt() {
        let tokens: Vec<u8> = (0..150_u32).flat_map(u32::to_le_bytes).collect();
        let hashes = chain("m", "", &tokens, 64, 2048);
        assert_eq!(hashes, [10737944481019725661, 208820148868097414, 10782844546323161346]);
        assert_eq!(chain("m", "", &tokens, 64, 2), hashes[..2]);
        let salted = [10631652750705364594, 10237833664982085275, 18278987246927966642];
        assert_eq!(chain("m", "s1", &tokens, 64, 2048), salted);
        assert_eq!(chain("ab", "c", &tokens, 64, 9), chain("a", "bc", &tokens, 64, 9));
        assert!(chain("m", "", &[], 0, 9).is_empty());
    }

    #[test]
    fn no_more_is_kept_than_is_hashed() {
        let mut stream = Stream::new(4);
        stream.text("user1");
        stream.asset("image", "https://example.com/a.png", u32::MAX);
        stream.text("and more");
        stream.align();
        assert_eq!(stream.bytes().len(), 16);
        assert_eq!(&stream.bytes()[..8], b"user1\0\0\0");
        assert_eq!(&stream.bytes()[12..], &1860292282_u32.to_le_bytes());
        assert_eq!(stream.tokens(), 4 + u64::from(u32::MAX));
        assert_eq!((stream.assets[0].offset, stream.assets[0].hash), (2, 0x9f4f_deae_6ee1_ceba));
    }
}
