//! vLLM's KV events: msgpack payloads of its ZMQ publisher, every layout from positional arrays to maps.
//!
//! Mirrors `vllm/distributed/kv_events.py`: the array form of 0.8–0.25, the map form of 0.26–0.33, and the map batch between them.
//!
//! Layouts without `extra_keys` (fewer than 8 positional fields) show neither media nor salt: only plain text is exact with them.

mod event;
mod extra;
#[cfg(test)]
mod tests;

use crate::event::Batch;
pub use crate::event::DecodeError;
pub use crate::wire::MAX_PAYLOAD_BYTES;
use crate::wire::{Field, Layout};

const LAYOUT: Layout = Layout {
    stored: &[
        Field::Hashes,
        Field::Parent,
        Field::Tokens,
        Field::BlockSize,
        Field::LoraId,
        Field::Medium,
        Field::LoraName,
        Field::ExtraKeys,
        Field::Group,
        Field::Kind,
    ],
    removed: &[Field::Hashes, Field::Medium, Field::Group],
};

/// Decodes the last frame of one event message.
///
/// # Errors
/// Only when the batch as a whole cannot be walked. An event that is not understood is listed in [`Batch::skipped`], the rest counts.
pub fn decode(payload: &[u8]) -> Result<Batch, DecodeError> {
    crate::wire::decode(payload, &LAYOUT, |fields, _| event::read(fields))
}
