//! `extra_keys`: what vLLM hashed into each block besides its tokens.
//!
//! Per block nil, or untagged keys in this order: LoRA name, `[media id, offset]` pairs, cache salt, digest of prompt embeddings.
//! Engines between vllm#33304 and #36708 sent bare media ids. Such a string is opaque, except as the only one on a chain's first
//! block, where it reads as a salt: the hash then matches no request, which under-credits as opaque does.

use std::sync::Arc;

use crate::MediaId;
use crate::event::{BlockExtra, DecodeError, Stored};
use crate::wire::msgpack::{Cursor, Head};

pub(super) fn read(mut cursor: Cursor<'_>, stored: &Stored) -> Result<Vec<BlockExtra>, DecodeError> {
    let start = cursor;
    if cursor.array()? != stored.hashes.len() {
        return Err(start.wanted("one entry of extra_keys per block"));
    }
    (0..stored.hashes.len()).map(|index| block(&mut cursor, stored, index == 0 && stored.parent.is_none())).collect()
}

fn block(cursor: &mut Cursor<'_>, stored: &Stored, starts_chain: bool) -> Result<BlockExtra, DecodeError> {
    let mut extra = BlockExtra::default();
    let start = *cursor;
    cursor.skip()?;
    let mut inside = start;
    match inside.head()? {
        Head::Nil => {}
        Head::Array(keys) => {
            for index in 0..keys {
                let mut key = inside;
                inside.skip()?;
                match key.head()? {
                    // A string in first place is the LoRA name exactly when the event has one.
                    Head::Str(_) if index == 0 && stored.lora.is_some() => {}
                    Head::Str(salt) if starts_chain && extra.salt.is_none() => match std::str::from_utf8(salt) {
                        Ok(salt) => extra.salt = Some(Arc::from(salt)),
                        Err(_) => extra.opaque = true,
                    },
                    Head::Array(2) => match pair(key) {
                        // With look-ahead hashing an engine also lists media that only start after the block.
                        Some((_, offset)) if i64::from(offset) >= i64::from(stored.block_size) => {}
                        Some(media) => extra.media.push(media),
                        None => extra.opaque = true,
                    },
                    _ => extra.opaque = true,
                }
            }
        }
        _ => extra.opaque = true,
    }
    extra.media.sort_by_key(|&(_, offset)| offset);
    Ok(extra)
}

fn pair(mut cursor: Cursor<'_>) -> Option<(MediaId, i32)> {
    let id = cursor.text().ok()?;
    let offset = match cursor.head().ok()? {
        Head::Unsigned(offset) => i32::try_from(offset).ok()?,
        Head::Negative(offset) => i32::try_from(offset).ok()?,
        _ => return None,
    };
    Some((MediaId::from_engine_id(id), offset))
}
