//! One event: finds its fields, whatever the layout, and reads those that mean the same in every dialect.

use std::sync::Arc;

use super::Layout;
use super::msgpack::{Cursor, Head};
use crate::event::{BlockExtra, DecodeError, Skipped};
use crate::{EngineHash, Tier};

/// The fields that are read, of any event type and dialect.
#[derive(Clone, Copy)]
pub(crate) enum Field {
    Hashes,
    Parent,
    Tokens,
    BlockSize,
    LoraId,
    Medium,
    LoraName,
    /// vLLM.
    ExtraKeys,
    Group,
    Kind,
    Session,
    /// SGLang, TensorRT-LLM.
    CacheSalt,
    /// SGLang 0.5.18 and 0.5.19: a map at the end of the positional form.
    Tail,
    /// TensorRT-LLM.
    MediaKeys,
}

/// Number of fields.
const FIELDS: usize = Field::MediaKeys as usize + 1;

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
        b"session_id" => Field::Session,
        b"cache_salt" => Field::CacheSalt,
        b"mm_keys" => Field::MediaKeys,
        _ => return None,
    })
}

/// Where the fields of one event lie.
#[derive(Default)]
pub(crate) struct Fields<'a> {
    tag: Option<&'a [u8]>,
    at: [Option<Cursor<'a>>; FIELDS],
}

impl<'a> Fields<'a> {
    /// Passes over one event and notes its fields. Fails only when the payload ends inside it or is no msgpack.
    pub(super) fn locate(cursor: &mut Cursor<'a>, layout: &Layout) -> Result<Self, DecodeError> {
        let mut fields = Self::default();
        match cursor.head()? {
            Head::Array(items) => {
                let mut order: &[Field] = &[];
                for index in 0..items {
                    let start = *cursor;
                    cursor.skip()?;
                    if index == 0 {
                        fields.tag = string(start);
                        order = if fields.tag == Some(b"BlockRemoved") { layout.removed } else { layout.stored };
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
        fields.open_tail()?;
        Ok(fields)
    }

    /// Notes the named fields of a map at the end of the positional form, unless they are there already.
    fn open_tail(&mut self) -> Result<(), DecodeError> {
        let Some(mut cursor) = self.at[Field::Tail as usize].take() else { return Ok(()) };
        let Head::Map(pairs) = cursor.head()? else { return Ok(()) };
        for _ in 0..pairs {
            let key = cursor;
            cursor.skip()?;
            let value = cursor;
            cursor.skip()?;
            if let Some(field) = string(key).and_then(named) {
                self.at[field as usize].get_or_insert(value);
            }
        }
        Ok(())
    }

    pub(crate) fn tag(&self) -> Option<&'a [u8]> {
        self.tag
    }

    /// A field that is there and not nil.
    pub(crate) fn non_nil(&self, field: Field) -> Result<Option<Cursor<'a>>, DecodeError> {
        let Some(start) = self.at[field as usize] else { return Ok(None) };
        let mut cursor = start;
        Ok(if matches!(cursor.head()?, Head::Nil) { None } else { Some(start) })
    }

    pub(crate) fn number(&self, field: Field) -> Result<Option<u32>, DecodeError> {
        self.at[field as usize].map_or(Ok(None), |mut cursor| cursor.optional_u32())
    }

    pub(crate) fn text(&self, field: Field) -> Result<Option<&'a str>, DecodeError> {
        self.at[field as usize].map_or(Ok(None), |mut cursor| cursor.optional_text())
    }

    /// A string to keep; an empty one says as little as none.
    pub(crate) fn name(&self, field: Field) -> Result<Option<Arc<str>>, DecodeError> {
        Ok(self.text(field)?.filter(|text| !text.is_empty()).map(Arc::from))
    }

    /// `media` gives the names of the dialect besides the GPU's; nothing was ever stored to a medium that is not known.
    pub(crate) fn tier(&self, media: &[(&str, Tier)]) -> Result<Tier, Skipped> {
        match self.text(Field::Medium)? {
            None | Some("GPU") => Ok(Tier::Gpu),
            Some(medium) => {
                media.iter().find(|(name, _)| *name == medium).map(|&(_, tier)| tier).ok_or(Skipped::Malformed)
            }
        }
    }

    pub(crate) fn hashes(&self) -> Result<Vec<EngineHash>, Skipped> {
        let mut cursor = self.at[Field::Hashes as usize].ok_or(Skipped::Malformed)?;
        let count = cursor.array()?;
        Ok((0..count).map(|_| hash(&mut cursor)).collect::<Result<_, _>>()?)
    }

    pub(crate) fn parent(&self) -> Result<Option<EngineHash>, DecodeError> {
        self.non_nil(Field::Parent)?.map(|mut cursor| hash(&mut cursor)).transpose()
    }
}

/// An entry for each of `blocks` that says only that they cannot be predicted.
pub(crate) fn opaque(blocks: usize) -> Vec<BlockExtra> {
    vec![BlockExtra { opaque: true, ..BlockExtra::default() }; blocks]
}

fn string(mut cursor: Cursor<'_>) -> Option<&[u8]> {
    match cursor.head() {
        Ok(Head::Str(bytes)) => Some(bytes),
        _ => None,
    }
}

/// A block hash. Those that are signed on the wire stand for their bits.
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
