//! One event of SGLang.

use super::{pair, token};
use crate::Tier;
use crate::event::{Attention, BlockExtra, KvEvent, Removed, Skipped, Stored};
use crate::wire::msgpack::{Cursor, Head};
use crate::wire::{Field, Fields, opaque};

/// `StorageMedium`: host memory, local disk, and storage outside the server.
const MEDIA: [(&str, Tier); 3] = [("CPU_PINNED", Tier::Cpu), ("DISK", Tier::Storage), ("EXTERNAL", Tier::Storage)];

/// `pairs`: whether the tokens of this batch are pairs, once an event has told. An engine has one kind.
pub(super) fn read(fields: &Fields<'_>, pairs: &mut Option<bool>) -> Result<KvEvent, Skipped> {
    match fields.tag().ok_or(Skipped::Malformed)? {
        b"BlockStored" => stored(fields, pairs).map(KvEvent::Stored),
        b"BlockRemoved" => {
            let tier = fields.tier(&MEDIA)?;
            let hashes = fields.hashes().map_err(|_| Skipped::Removal)?;
            Ok(KvEvent::Removed(Removed { hashes, tier, group: 0 }))
        }
        b"AllBlocksCleared" => Ok(KvEvent::Cleared),
        _ => Err(Skipped::UnknownType),
    }
}

fn stored(fields: &Fields<'_>, pairs: &mut Option<bool>) -> Result<Stored, Skipped> {
    let mut stored = Stored {
        hashes: fields.hashes()?,
        parent: None,
        tokens: Vec::new(),
        block_size: fields.number(Field::BlockSize)?.unwrap_or(0),
        tier: fields.tier(&MEDIA)?,
        lora: fields.name(Field::LoraName)?,
        extra: Vec::new(),
        group: 0,
        attention: Attention::Full,
        session: fields.name(Field::Session)?,
    };
    let Some(tokens) = fields.non_nil(Field::Tokens)? else { return Ok(stored) };
    let (tokens, are_pairs) = tokens_of(tokens, &stored)?;
    if tokens.is_empty() {
        return Ok(stored);
    }
    stored.tokens = tokens;
    stored.parent = fields.parent()?;
    let salt = fields.name(Field::CacheSalt)?;
    if stored.lora.is_none() && fields.non_nil(Field::LoraId)?.is_some() {
        // An adapter without a name: which one it is cannot be told.
        stored.extra = opaque(stored.hashes.len());
    } else if salt.is_some() && stored.parent.is_none() {
        // Said with every page of the chain; it belongs to the first.
        stored.extra = vec![BlockExtra::default(); stored.hashes.len()];
        if let Some(first) = stored.extra.first_mut() {
            first.salt = salt;
        }
    }
    if *pairs.get_or_insert(are_pairs) == are_pairs { Ok(stored) } else { Err(Skipped::Malformed) }
}

/// Canonical tokens, and whether they are pairs.
fn tokens_of(mut cursor: Cursor<'_>, stored: &Stored) -> Result<(Vec<u32>, bool), Skipped> {
    let count = cursor.array()?;
    if count > 0 && count as u64 != stored.hashes.len() as u64 * u64::from(stored.block_size) {
        return Err(Skipped::Sparse);
    }
    let mut tokens = Vec::with_capacity(count);
    let mut are_pairs = false;
    for index in 0..count {
        let (token, is_pair) = match cursor.head()? {
            Head::Unsigned(id) => (token(id), false),
            Head::Array(2) => (pair(half(&mut cursor)?, half(&mut cursor)?), true),
            _ => return Err(Skipped::Malformed),
        };
        if index == 0 {
            are_pairs = is_pair;
        } else if are_pairs != is_pair {
            return Err(Skipped::Malformed);
        }
        tokens.push(token);
    }
    Ok((tokens, are_pairs))
}

fn half(cursor: &mut Cursor<'_>) -> Result<u32, Skipped> {
    match cursor.head()? {
        Head::Unsigned(id) => Ok(token(id)),
        _ => Err(Skipped::Malformed),
    }
}
