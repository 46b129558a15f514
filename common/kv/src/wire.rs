//! What the dialects of the ZMQ publishers share: the msgpack batch, and events as positional arrays or as maps.
//!
//! **Invariant:** any bytes give a `Batch` or an error; no panic, and no memory beyond a small multiple of the payload's length.

mod fields;
pub(crate) mod msgpack;
#[cfg(test)]
pub(crate) mod pack;

use crate::event::{Batch, DecodeError, KvEvent, Skipped};
use msgpack::{Cursor, Head};

pub(crate) use fields::{Field, Fields, opaque};

/// Longest payload taken. A batch is one engine step: the removal of 100 000 blocks takes 6 MB.
pub const MAX_PAYLOAD_BYTES: usize = 16 << 20;

/// Order of the fields in the positional form, after the tag. What follows is not read.
pub(crate) struct Layout {
    pub(crate) stored: &'static [Field],
    pub(crate) removed: &'static [Field],
}

/// Walks `[ts, events, rank]`, or the same as a map; `read` turns the fields of one event into it.
pub(crate) fn decode(
    payload: &[u8],
    layout: &Layout,
    mut read: impl FnMut(&Fields<'_>, &mut Batch) -> Result<KvEvent, Skipped>,
) -> Result<Batch, DecodeError> {
    if payload.len() > MAX_PAYLOAD_BYTES {
        return Err(DecodeError::TooLong { bytes: payload.len(), limit: MAX_PAYLOAD_BYTES });
    }
    let mut cursor = Cursor::new(payload);
    let mut batch = Batch::default();
    let mut events = |cursor: &mut Cursor<'_>, batch: &mut Batch| -> Result<(), DecodeError> {
        for _ in 0..cursor.array()? {
            match read(&Fields::locate(cursor, layout)?, batch) {
                Ok(event) => batch.events.push(event),
                Err(cause) => batch.skipped.push(cause),
            }
        }
        Ok(())
    };
    match cursor.head()? {
        // The oldest engines leave the rank out.
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
                    "data_parallel_rank" | "attn_dp_rank" => batch.rank = cursor.optional_u32()?.unwrap_or(0),
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

impl From<DecodeError> for Skipped {
    /// Inside one event, whose bytes have been walked already, an error means a field of another type.
    fn from(_: DecodeError) -> Self {
        Self::Malformed
    }
}
