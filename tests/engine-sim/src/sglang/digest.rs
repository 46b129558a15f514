//! SGLang's page digest: SHA-256 chained on full digests; events carry its first 8 bytes.

use crate::hash::Digest;
use sha2::{Digest as _, Sha256};

/// Tokens above need eight bytes.
const NARROW_MAX: u64 = u32::MAX as u64;

/// Digest of one full page after the page of `prior`.
pub fn page(prior: Option<&Digest>, tokens: &[u64]) -> Digest {
    let mut hasher = Sha256::new();
    if let Some(prior) = prior {
        hasher.update(prior.0);
    }
    if tokens.iter().any(|token| *token > NARROW_MAX) {
        hasher.update([0xff]);
        tokens.iter().for_each(|token| hasher.update(token.to_le_bytes()));
    } else {
        tokens.iter().for_each(|token| hasher.update(&token.to_le_bytes()[..4]));
    }
    Digest(hasher.finalize().into())
}

/// What a salted prompt's first page is chained on.
pub fn salted_root(salt: &str) -> Digest {
    let mut hasher = Sha256::new();
    hasher.update(b"sglang-cache-salt-v1\0");
    hasher.update(salt.as_bytes());
    Digest(hasher.finalize().into())
}

/// As events carry it: the first 8 bytes, big-endian, signed.
pub fn on_wire(digest: &Digest) -> i64 {
    i64::from_be_bytes(first8(&digest.0))
}

/// The first 8 bytes.
pub(super) fn first8(bytes: &[u8; 32]) -> [u8; 8] {
    let [a, b, c, d, e, f, g, h, ..] = *bytes;
    [a, b, c, d, e, f, g, h]
}
