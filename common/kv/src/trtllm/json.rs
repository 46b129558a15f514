//! Items of the queue as they are in JSON. Unknown fields are passed over.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, Visitor};
use serde_json::value::RawValue;

use crate::event::Skipped;
use crate::{EngineHash, MediaId};

/// What all events have.
#[derive(Deserialize)]
pub(super) struct Item<'a> {
    pub(super) event_id: u64,
    pub(super) attention_dp_rank: Option<u32>,
    pub(super) window_size: Option<u64>,
    #[serde(borrow)]
    pub(super) data: &'a RawValue,
}

/// What an event says.
pub(super) enum Data<'a> {
    Stored(Stored<'a>),
    Removed(Vec<Hash>),
    /// A block moved from one level to another.
    Moved {
        hash: Hash,
        from: u8,
        to: u8,
    },
    /// Nothing about which blocks are held.
    Nothing,
}

#[derive(Deserialize)]
pub(super) struct Stored<'a> {
    pub(super) parent_hash: Option<Hash>,
    #[serde(borrow)]
    pub(super) blocks: Vec<Block<'a>>,
}

#[derive(Deserialize)]
pub(super) struct Block<'a> {
    pub(super) block_hash: Hash,
    #[serde(borrow)]
    pub(super) tokens: Vec<Token<'a>>,
    pub(super) cache_level: Option<u8>,
    #[serde(borrow)]
    pub(super) mm_keys: Option<Vec<MediaKey<'a>>>,
    #[serde(default)]
    pub(super) cache_salt: serde_json::Value,
}

#[derive(Deserialize)]
pub(super) struct Token<'a> {
    #[serde(borrow)]
    pub(super) token_id: TokenId<'a>,
    pub(super) token_extra_id: Option<u64>,
}

#[derive(Clone, Copy)]
pub(super) enum TokenId<'a> {
    Id(u32),
    Digest(&'a str),
}

#[derive(Deserialize)]
pub(super) struct MediaKey<'a> {
    #[serde(borrow)]
    pub(super) hash: Cow<'a, str>,
    pub(super) start_offset: u32,
}

/// A number, or 64 hex digits.
#[derive(Clone, Copy)]
pub(super) struct Hash(pub(super) EngineHash);

#[derive(Deserialize)]
struct Tag<'a> {
    #[serde(rename = "type", borrow)]
    name: Cow<'a, str>,
}

#[derive(Deserialize)]
struct Removed {
    block_hashes: Vec<Hash>,
}

#[derive(Deserialize)]
struct Updated {
    block_hash: Hash,
    cache_level: Option<Diff>,
}

#[derive(Deserialize)]
struct Diff {
    old_value: u8,
    new_value: u8,
}

/// # Errors
/// Why the event cannot be understood.
pub(super) fn data(raw: &RawValue) -> Result<Data<'_>, Skipped> {
    let text = raw.get();
    let malformed = |_| Skipped::Malformed;
    let tag: Tag<'_> = serde_json::from_str(text).map_err(malformed)?;
    match &*tag.name {
        "stored" => serde_json::from_str(text).map(Data::Stored).map_err(malformed),
        "removed" => serde_json::from_str(text)
            .map(|Removed { block_hashes }| Data::Removed(block_hashes))
            .map_err(|_| Skipped::Removal),
        "updated" => {
            let Updated { block_hash: hash, cache_level } = serde_json::from_str(text).map_err(malformed)?;
            Ok(match cache_level {
                Some(diff) if diff.old_value != diff.new_value => {
                    Data::Moved { hash, from: diff.old_value, to: diff.new_value }
                }
                _ => Data::Nothing,
            })
        }
        "created" => Ok(Data::Nothing),
        _ => Err(Skipped::UnknownType),
    }
}

impl<'de> Deserialize<'de> for Hash {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OfHash;
        impl Visitor<'_> for OfHash {
            type Value = Hash;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a block hash: a number or 64 hex digits")
            }
            fn visit_u64<E: Error>(self, hash: u64) -> Result<Hash, E> {
                Ok(Hash(EngineHash::Int(hash)))
            }
            fn visit_i64<E: Error>(self, hash: i64) -> Result<Hash, E> {
                Ok(Hash(EngineHash::Int(hash.cast_unsigned())))
            }
            fn visit_str<E: Error>(self, text: &str) -> Result<Hash, E> {
                let digest = MediaId::from_hex(text).ok_or_else(|| E::custom("not 64 hex digits"))?;
                Ok(Hash(EngineHash::Digest { bytes: digest.0, len: 32 }))
            }
        }
        deserializer.deserialize_any(OfHash)
    }
}

impl<'de: 'a, 'a> Deserialize<'de> for TokenId<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OfToken;
        impl<'de> Visitor<'de> for OfToken {
            type Value = TokenId<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a token id or a digest")
            }
            fn visit_u64<E: Error>(self, id: u64) -> Result<TokenId<'de>, E> {
                u32::try_from(id).map(TokenId::Id).map_err(E::custom)
            }
            fn visit_borrowed_str<E: Error>(self, digest: &'de str) -> Result<TokenId<'de>, E> {
                Ok(TokenId::Digest(digest))
            }
        }
        deserializer.deserialize_any(OfToken)
    }
}
