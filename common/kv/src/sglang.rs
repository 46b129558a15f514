//! SGLang's KV events, and how its token ids are named here.
//!
//! Mirrors `srt/disaggregation/kv_events.py` of 0.5.9 to 0.5.23: positional arrays with and without trailing defaults up to 0.5.19, maps
//! from 0.5.20 on. The identity of media is in the token ids themselves: every placeholder is replaced by pad values before the prefix
//! cache sees it, so a view of such an engine has no media spans. Ids need 64 bits from 0.5.23 on; with EAGLE a position is a pair of them.
//!
//! What the events do not show: an `extra_key` in any version, a LoRA adapter up to 0.5.22, a salt up to 0.5.17. In the default format
//! such namespaces share their hashes, so one block may be stored and removed several times: copies are counted by who applies the
//! events. In the `dynamo` format (≥ 0.5.22) the hashes of namespaces differ and the tokens are equal. Both read as the plain prompt.

mod event;
pub mod pads;
#[cfg(test)]
mod tests;

use xxhash_rust::xxh3::xxh3_64;

use crate::event::{Batch, DecodeError};
use crate::wire::{Field, Layout};

/// Ids from here on are pad values: SGLang refuses a larger vocabulary (`MM_PAD_SHIFT_VALUE`).
pub const FIRST_PAD: u32 = 1_000_000;

const LAYOUT: Layout = Layout {
    stored: &[Field::Hashes, Field::Parent, Field::Tokens, Field::BlockSize, Field::LoraId, Field::Medium, Field::Tail],
    removed: &[Field::Hashes, Field::Medium],
};

/// Decodes the last frame of one event message. Tokens come in their canonical form, one or a pair per position.
///
/// # Errors
/// Only when the batch as a whole cannot be walked. An event that is not understood is listed in [`Batch::skipped`], the rest counts.
pub fn decode(payload: &[u8]) -> Result<Batch, DecodeError> {
    let mut pairs = None;
    let mut batch = crate::wire::decode(payload, &LAYOUT, |fields, _| event::read(fields, &mut pairs))?;
    batch.pairs = pairs.unwrap_or(false);
    Ok(batch)
}

/// The canonical form of a token id: itself below 2^31 (text and the 30-bit pads up to 0.5.22), else folded to 32 bits with the top one set.
#[inline]
pub fn token(id: u64) -> u32 {
    match u32::try_from(id) {
        Ok(id) if id < 1 << 31 => id,
        _ => xxh3_64(&id.to_le_bytes()) as u32 | 1 << 31,
    }
}

/// Whether a canonical token is a pad value, and no token of the text.
#[inline]
pub fn is_pad(token: u32) -> bool {
    token >= FIRST_PAD
}

/// One position of an engine with EAGLE, from the canonical tokens at this position and the next.
#[inline]
pub fn pair(a: u32, b: u32) -> u32 {
    let mut bytes = [0; 8];
    bytes[..4].copy_from_slice(&a.to_le_bytes());
    bytes[4..].copy_from_slice(&b.to_le_bytes());
    xxh3_64(&bytes) as u32
}
