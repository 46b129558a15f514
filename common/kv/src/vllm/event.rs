//! One event of vLLM.

use super::extra;
use crate::Tier;
use crate::event::{Attention, KvEvent, Removed, Skipped, Stored};
use crate::wire::msgpack::Cursor;
use crate::wire::{Field, Fields, opaque};

const MEDIA: [(&str, Tier); 2] = [("CPU", Tier::Cpu), ("STORAGE", Tier::Storage)];

pub(super) fn read(fields: &Fields<'_>) -> Result<KvEvent, Skipped> {
    match fields.tag().ok_or(Skipped::Malformed)? {
        b"BlockStored" => stored(fields).map(KvEvent::Stored),
        b"BlockRemoved" => removed(fields),
        b"AllBlocksCleared" => Ok(KvEvent::Cleared),
        _ => Err(Skipped::UnknownType),
    }
}

fn removed(fields: &Fields<'_>) -> Result<KvEvent, Skipped> {
    let tier = fields.tier(&MEDIA)?;
    match (fields.hashes(), fields.number(Field::Group)) {
        (Ok(hashes), Ok(group)) => Ok(KvEvent::Removed(Removed { hashes, tier, group: group.unwrap_or(0) })),
        _ => Err(Skipped::Removal),
    }
}

fn stored(fields: &Fields<'_>) -> Result<Stored, Skipped> {
    let attention = match fields.text(Field::Kind)? {
        None | Some("full_attention" | "mla_attention" | "sink_full_attention") => Attention::Full,
        Some(_) => Attention::Other,
    };
    let mut stored = Stored {
        hashes: fields.hashes()?,
        parent: None,
        tokens: Vec::new(),
        block_size: fields.number(Field::BlockSize)?.unwrap_or(0),
        tier: fields.tier(&MEDIA)?,
        lora: fields.name(Field::LoraName)?,
        extra: Vec::new(),
        group: fields.number(Field::Group)?.unwrap_or(0),
        attention,
        session: fields.name(Field::Session)?,
    };
    let Some(tokens) = fields.non_nil(Field::Tokens)? else { return Ok(stored) };
    stored.tokens = tokens_of(tokens, &stored)?;
    if stored.tokens.is_empty() {
        return Ok(stored);
    }
    stored.parent = fields.parent()?;
    let has_lora_id = fields.non_nil(Field::LoraId)?.is_some();
    stored.extra = match fields.non_nil(Field::ExtraKeys)? {
        // An adapter without a name: which one it is cannot be told.
        _ if has_lora_id && stored.lora.is_none() => opaque(stored.hashes.len()),
        Some(keys) => extra::read(keys, &stored)?,
        None => Vec::new(),
    };
    Ok(stored)
}

fn tokens_of(mut cursor: Cursor<'_>, stored: &Stored) -> Result<Vec<u32>, Skipped> {
    let count = cursor.array()?;
    if count > 0 && count as u64 != stored.hashes.len() as u64 * u64::from(stored.block_size) {
        return Err(Skipped::Sparse);
    }
    let mut tokens = Vec::with_capacity(count);
    for _ in 0..count {
        tokens.push(cursor.optional_u32()?.ok_or(Skipped::Malformed)?);
    }
    Ok(tokens)
}
