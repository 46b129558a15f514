//! vLLM's KV events: msgpack payloads of its ZMQ publisher, every layout from positional arrays to maps.
//!
//! Mirrors `vllm/distributed/kv_events.py`: the array form of 0.8–0.25, the map form of 0.26–0.33, and the map batch between them.
//! **Invariant:** any bytes give a `Batch` or an error; no panic, and no memory beyond a small multiple of the payload's length.
//!
//! Layouts without `extra_keys` (fewer than 8 positional fields) show neither media nor salt: only plain text is exact with them.

mod event;
mod extra;
mod msgpack;
#[cfg(test)]
mod tests;

use msgpack::{Cursor, Head};

pub use crate::event::DecodeError;
use crate::event::{Batch, Skipped};

/// Longest payload taken. A batch is one engine step: the removal of 100 000 blocks takes 6 MB.
pub const MAX_PAYLOAD_BYTES: usize = 16 << 20;

/// Decodes the last frame of one event message.
///
/// # Errors
/// Only when the batch as a whole cannot be walked. An event that is not understood is listed in [`Batch::skipped`], the rest counts.
pub fn decode(payload: &[u8]) -> Result<Batch, DecodeError> {
    if payload.len() > MAX_PAYLOAD_BYTES {
        return Err(DecodeError::TooLong { bytes: payload.len(), limit: MAX_PAYLOAD_BYTES });
    }
    let mut cursor = Cursor::new(payload);
    let mut batch = Batch::default();
    match cursor.head()? {
        // [ts, events, rank]; the oldest engines leave the rank out.
        Head::Array(fields) if fields >= 2 => {
            cursor.skip()?;
            events(&mut cursor, &mut batch)?;
            if fields > 2 {
                batch.rank = cursor.optional_u32()?.unwrap_or(0);
            }
            for _ in 3..fields {
                cursor.skip()?;
            }
        }
        Head::Map(fields) => {
            let mut found = false;
            for _ in 0..fields {
                match cursor.text()? {
                    "events" => {
                        events(&mut cursor, &mut batch)?;
                        found = true;
                    }
                    "data_parallel_rank" => batch.rank = cursor.optional_u32()?.unwrap_or(0),
                    _ => cursor.skip()?,
                }
            }
            if !found {
                return Err(cursor.wanted("field `events`"));
            }
        }
        _ => return Err(cursor.wanted("batch of at least two fields")),
    }
    if cursor.is_at_end() { Ok(batch) } else { Err(cursor.wanted("end of the payload")) }
}

fn events(cursor: &mut Cursor<'_>, batch: &mut Batch) -> Result<(), DecodeError> {
    let count = cursor.array()?;
    for _ in 0..count {
        match event::Fields::locate(cursor)?.read() {
            Ok(event) => batch.events.push(event),
            Err(cause) => batch.skipped.push(cause),
        }
    }
    Ok(())
}

impl From<DecodeError> for Skipped {
    /// Inside one event, whose bytes have been walked already, an error means a field of another type.
    fn from(_: DecodeError) -> Self {
        Self::Malformed
    }
}
