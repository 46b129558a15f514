//! One event: finds its fields, whatever the layout, then reads those of its type.

use std::sync::Arc;

use super::extra;
use super::msgpack::{Cursor, Head};
use crate::event::{Attention, BlockExtra, DecodeError, KvEvent, Removed, Skipped, Stored};
use crate::{EngineHash, Tier};

/// The fields that are read, of any event type.
#[derive(Clone, Copy)]
enum Field {
    Hashes,
    Parent,
    Tokens,
    BlockSize,
    LoraId,
    Medium,
    LoraName,
    ExtraKeys,
    Group,
    Kind,
}

/// Order of the positional form of `BlockStored`, after the tag. What follows is not read.
const STORED: [Field; 10] = [
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
];
const REMOVED: [Field; 3] = [Field::Hashes, Field::Medium, Field::Group];

fn named(key: &[u8]) -> Option<Field> {
    Some(match key {
        b"block_hashes" => Field::Hashes,
        b"parent_block_hash" => Field::Parent,
        b"token_ids" => Field::Tokens,
        b"block_size" => Field::BlockSize,
        b"lora_id" => Field::LoraId,
        b"medium" => Field::Medium,
        b"lora_name" => Field::LoraName,
        b"extra_keys" => Field::ExtraKeys,
        b"group_idx" => Field::Group,
        b"kv_cache_spec_kind" => Field::Kind,
        _ => return None,
    })
}

/// Where the fields of one event lie.
#[derive(Default)]
pub(super) struct Fields<'a> {
    tag: Option<&'a [u8]>,
    at: [Option<Cursor<'a>>; STORED.len()],
}

impl<'a> Fields<'a> {
    /// Passes over one event and notes its fields. Fails only when the payload ends inside it or is no msgpack.
    pub(super) fn locate(cursor: &mut Cursor<'a>) -> Result<Self, DecodeError> {
        let mut fields = Self::default();
        match cursor.head()? {
            Head::Array(items) => {
                let mut order: &[Field] = &[];
                for index in 0..items {
                    let start = *cursor;
                    cursor.skip()?;
                    if index == 0 {
                        fields.tag = string(start);
                        order = if fields.tag == Some(b"BlockRemoved") { &REMOVED } else { &STORED };
                    } else if let Some(&field) = order.get(index - 1) {
                        fields.at[field as usize] = Some(start);
                    }
                }
            }
            Head::Map(pairs) => {
                for _ in 0..pairs {
                    let key = *cursor;
                    cursor.skip()?;
                    let value = *cursor;
                    cursor.skip()?;
                    match string(key) {
                        Some(b"type") => fields.tag = string(value),
                        Some(key) => {
                            if let Some(field) = named(key) {
                                fields.at[field as usize] = Some(value);
                            }
                        }
                        None => {}
                    }
                }
            }
            _ => {}
        }
        Ok(fields)
    }

    pub(super) fn read(&self) -> Result<KvEvent, Skipped> {
        match self.tag.ok_or(Skipped::Malformed)? {
            b"BlockStored" => self.stored(),
            b"BlockRemoved" => self.removed(),
            b"AllBlocksCleared" => Ok(KvEvent::Cleared),
            _ => Err(Skipped::UnknownType),
        }
    }

    fn removed(&self) -> Result<KvEvent, Skipped> {
        // Nothing was ever stored to a medium that is not known.
        let tier = self.tier()?;
        match (self.hashes(), self.group()) {
            (Ok(hashes), Ok(group)) => Ok(KvEvent::Removed(Removed { hashes, tier, group })),
            _ => Err(Skipped::Removal),
        }
    }

    fn stored(&self) -> Result<KvEvent, Skipped> {
        let attention = match self.text(Field::Kind)? {
            None | Some("full_attention" | "mla_attention" | "sink_full_attention") => Attention::Full,
            Some(_) => Attention::Other,
        };
        let mut stored = Stored {
            hashes: self.hashes()?,
            parent: None,
            tokens: Vec::new(),
            block_size: self.number(Field::BlockSize)?.unwrap_or(0),
            tier: self.tier()?,
            lora: self.text(Field::LoraName)?.filter(|name| !name.is_empty()).map(Arc::from),
            extra: Vec::new(),
            group: self.group()?,
            attention,
        };
        let Some(tokens) = self.non_nil(Field::Tokens)? else { return Ok(KvEvent::Stored(stored)) };
        stored.tokens = tokens_of(tokens, &stored)?;
        if stored.tokens.is_empty() {
            return Ok(KvEvent::Stored(stored));
        }
        stored.parent = self.non_nil(Field::Parent)?.map(|mut cursor| hash(&mut cursor)).transpose()?;
        let has_lora_id = self.non_nil(Field::LoraId)?.is_some();
        stored.extra = match self.non_nil(Field::ExtraKeys)? {
            // An adapter without a name: which one it is cannot be told.
            _ if has_lora_id && stored.lora.is_none() => {
                vec![BlockExtra { opaque: true, ..BlockExtra::default() }; stored.hashes.len()]
            }
            Some(keys) => extra::read(keys, &stored)?,
            None => Vec::new(),
        };
        Ok(KvEvent::Stored(stored))
    }

    /// A field that is there and not nil.
    fn non_nil(&self, field: Field) -> Result<Option<Cursor<'a>>, DecodeError> {
        let Some(start) = self.at[field as usize] else { return Ok(None) };
        let mut cursor = start;
        Ok(if matches!(cursor.head()?, Head::Nil) { None } else { Some(start) })
    }

    fn number(&self, field: Field) -> Result<Option<u32>, DecodeError> {
        self.at[field as usize].map_or(Ok(None), |mut cursor| cursor.optional_u32())
    }

    fn text(&self, field: Field) -> Result<Option<&'a str>, DecodeError> {
        self.at[field as usize].map_or(Ok(None), |mut cursor| cursor.optional_text())
    }

    fn group(&self) -> Result<u32, DecodeError> {
        Ok(self.number(Field::Group)?.unwrap_or(0))
    }

    fn tier(&self) -> Result<Tier, Skipped> {
        match self.text(Field::Medium)? {
            None | Some("GPU") => Ok(Tier::Gpu),
            Some("CPU") => Ok(Tier::Cpu),
            Some("STORAGE") => Ok(Tier::Storage),
            Some(_) => Err(Skipped::Malformed),
        }
    }

    fn hashes(&self) -> Result<Vec<EngineHash>, Skipped> {
        let mut cursor = self.at[Field::Hashes as usize].ok_or(Skipped::Malformed)?;
        let count = cursor.array()?;
        Ok((0..count).map(|_| hash(&mut cursor)).collect::<Result<_, _>>()?)
    }
}

fn string(mut cursor: Cursor<'_>) -> Option<&[u8]> {
    match cursor.head() {
        Ok(Head::Str(bytes)) => Some(bytes),
        _ => None,
    }
}

/// Engines that hash with Python's own `hash()` send negative numbers: their bits stand for them.
fn hash(cursor: &mut Cursor<'_>) -> Result<EngineHash, DecodeError> {
    let start = *cursor;
    match cursor.head()? {
        Head::Unsigned(value) => Ok(EngineHash::Int(value)),
        Head::Negative(value) => Ok(EngineHash::Int(value.cast_unsigned())),
        Head::Bin(digest @ [_, ..]) if digest.len() <= 32 => {
            let mut bytes = [0; 32];
            bytes[..digest.len()].copy_from_slice(digest);
            Ok(EngineHash::Digest { bytes, len: digest.len() as u8 })
        }
        _ => Err(start.wanted("block hash: number or 1 to 32 bytes")),
    }
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
