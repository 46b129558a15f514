//! `v1_block_key`, the 64-bit hash by which V1 names a block. Mirrors `batch_manager/blockKey.cpp`.

use sha2::{Digest, Sha256};

/// The golden ratio, in both widths.
const GOLDEN: u32 = 0x9e37_79b9;

/// Key of a block after that of `parent` (0 = root). `media`: digest and start offset of each item that touches it. Salt
/// enters a first block only.
pub fn block(parent: u64, tokens: &[u64], salt_id: Option<u64>, media: &[([u8; 32], u64)]) -> u64 {
    let mut seed = (tokens.len() as u64) ^ parent.wrapping_mul(0xbf58_476d_1ce4_e5b9);
    if let Some(salt) = salt_id.filter(|_| parent == 0) {
        seed = mix64(seed, salt);
    }
    for token in tokens {
        let [a, b, c, d, ..] = token.to_le_bytes();
        seed = mix32(seed, u32::from_le_bytes([a, b, c, d]));
    }
    for (digest, offset) in media {
        for word in digest.as_chunks::<4>().0 {
            seed = mix32(seed, u32::from_le_bytes(*word));
        }
        seed = mix64(seed, *offset);
    }
    seed
}

/// Number of a salt. V1 takes C++'s `std::hash`, which cannot be had; this is V2's rule.
pub fn salt_id(salt: &str) -> u64 {
    let [a, b, c, d, e, f, g, h, ..]: [u8; 32] = Sha256::digest(salt.as_bytes()).into();
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

fn mix32(seed: u64, word: u32) -> u64 {
    let mut a = ((word >> 16) ^ word).wrapping_mul(0x045d_9f3b);
    a = ((a >> 16) ^ a).wrapping_mul(0x045d_9f3b);
    a ^= a >> 16;
    // This sum wraps at 32 bits, as C++'s unsigned int does.
    blend(seed, u64::from(a.wrapping_add(GOLDEN)))
}

fn mix64(seed: u64, word: u64) -> u64 {
    let mut b = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    b = (b ^ (b >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    b ^= b >> 31;
    blend(seed, b.wrapping_add(u64::from(GOLDEN)))
}

fn blend(seed: u64, mixed: u64) -> u64 {
    seed ^ mixed.wrapping_add(seed << 6).wrapping_add(seed >> 2)
}
