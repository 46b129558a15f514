//! The ZMQ publisher: batches like vLLM's, with `mm_keys`.

use super::block::{Key, Reader, Token};
use super::{Batch, DecodeError, KvEvent, Media, Skipped};
use crate::Tier;
use crate::event::{Attention, BlockExtra, Removed, Stored};
use crate::wire::msgpack::{Cursor, Head};
use crate::wire::{Field, Fields, Layout, opaque};

/// Events are maps; the order of the other publishers is taken for arrays.
const LAYOUT: Layout = Layout {
    stored: &[
        Field::Hashes,
        Field::Parent,
        Field::Tokens,
        Field::BlockSize,
        Field::LoraId,
        Field::Medium,
        Field::LoraName,
    ],
    removed: &[Field::Hashes, Field::Medium],
};
const MEDIA: [(&str, Tier); 3] = [("CPU", Tier::Cpu), ("HOST", Tier::Cpu), ("DISK", Tier::Storage)];

pub(super) fn decode(payload: &[u8], media: Media) -> Result<Batch, DecodeError> {
    crate::wire::decode(payload, &LAYOUT, |fields, _| match fields.tag().ok_or(Skipped::Malformed)? {
        b"BlockStored" => stored(fields, media).map(KvEvent::Stored),
        b"BlockRemoved" => {
            let tier = fields.tier(&MEDIA)?;
            let hashes = fields.hashes().map_err(|_| Skipped::Removal)?;
            Ok(KvEvent::Removed(Removed { hashes, tier, group: 0 }))
        }
        b"AllBlocksCleared" => Ok(KvEvent::Cleared),
        _ => Err(Skipped::UnknownType),
    })
}

fn stored(fields: &Fields<'_>, media: Media) -> Result<Stored, Skipped> {
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
    let Some(mut cursor) = fields.non_nil(Field::Tokens)? else { return Ok(stored) };
    let (count, size) = (cursor.array()?, stored.block_size as usize);
    if count == 0 {
        return Ok(stored);
    }
    if Some(count) != stored.hashes.len().checked_mul(size) || size == 0 {
        return Err(Skipped::Sparse);
    }
    let mut keys = fields.non_nil(Field::MediaKeys)?;
    if let Some(lists) = &mut keys
        && lists.array()? != stored.hashes.len()
    {
        return Err(Skipped::Malformed);
    }
    stored.tokens.reserve(count);
    let mut reader = Reader::new(media);
    let (mut tokens, mut of_block) = (Vec::with_capacity(size.min(count)), Vec::new());
    for _ in 0..stored.hashes.len() {
        tokens.clear();
        of_block.clear();
        for _ in 0..size {
            tokens.push(token(&mut cursor)?);
        }
        if let Some(lists) = &mut keys {
            read_keys(lists, &mut of_block)?;
        }
        stored.extra.push(reader.read(&tokens, &of_block, &mut stored.tokens));
    }
    stored.parent = fields.parent()?;
    if stored.lora.is_none() && fields.non_nil(Field::LoraId)?.is_some() {
        // An adapter without a name: which one it is cannot be told.
        stored.extra = opaque(stored.hashes.len());
    } else if stored.parent.is_none()
        && let Some(first) = stored.extra.first_mut()
    {
        first.salt = fields.name(Field::CacheSalt)?;
    }
    if stored.extra.iter().all(|extra| *extra == BlockExtra::default()) {
        stored.extra = Vec::new();
    }
    Ok(stored)
}

fn token<'a>(cursor: &mut Cursor<'a>) -> Result<Token<'a>, Skipped> {
    match cursor.head()? {
        Head::Unsigned(id) => u32::try_from(id).map(Token::Id).map_err(|_| Skipped::Malformed),
        Head::Str(digest) => std::str::from_utf8(digest).map(Token::Digest).map_err(|_| Skipped::Malformed),
        _ => Err(Skipped::Malformed),
    }
}

/// The list of one block: nil, or maps with `hash` and `start_offset` among others.
fn read_keys<'a>(lists: &mut Cursor<'a>, out: &mut Vec<Key<'a>>) -> Result<(), Skipped> {
    let count = match lists.head()? {
        Head::Nil => 0,
        Head::Array(count) => count,
        _ => return Err(Skipped::Malformed),
    };
    for _ in 0..count {
        let Head::Map(pairs) = lists.head()? else { return Err(Skipped::Malformed) };
        let (mut hash, mut start) = (None, None);
        for _ in 0..pairs {
            match lists.text()? {
                "hash" => hash = Some(lists.text()?),
                "start_offset" => start = lists.optional_u32()?,
                _ => lists.skip()?,
            }
        }
        out.push(Key { hash: hash.ok_or(Skipped::Malformed)?, start: start.ok_or(Skipped::Malformed)? });
    }
    Ok(())
}
