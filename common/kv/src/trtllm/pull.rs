//! The queue behind `POST /kv_cache_events`. Fetching drains it, so that one reader sees every event once.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde_json::value::RawValue;

use super::block::{Key, Reader, Token};
use super::json::{self, Data, Hash, Item, TokenId};
use super::{DecodeError, KvEvent, Media, Pulled, Skipped};
use crate::Tier;
use crate::event::{Attention, BlockExtra, Removed, Stored};

/// Longest answer taken: a token takes about 70 bytes, so this is almost a million of them.
pub const MAX_BODY_BYTES: usize = 64 << 20;
/// Most events in one answer; `event_buffer_max_size` of an engine is far below.
const MAX_ITEMS: usize = 1 << 20;

/// Decodes the answers of one engine.
///
/// Remembers across answers what no single one tells: the largest window of attention (of a model with several only the largest counts,
/// the events of the others say nothing), and the block size (the last block of an event may be partial, and is left out).
#[derive(Clone, Copy, Debug)]
pub struct Puller {
    media: Media,
    block_size: Option<u32>,
    window: Option<u64>,
    /// A block was seen outside the GPU.
    offloads: bool,
}

/// One item of the list, before it is known what counts.
struct Parsed<'a> {
    event_id: u64,
    rank: u32,
    window: u64,
    data: Result<Data<'a>, Skipped>,
}

impl Puller {
    pub fn new(media: Media) -> Self {
        Self { media, block_size: None, window: None, offloads: false }
    }

    /// With the engine's `tokens_per_block`. Without it an event of one block says nothing until one of several has shown the size.
    pub fn with_block_size(self, tokens: u32) -> Self {
        Self { block_size: Some(tokens).filter(|&tokens| tokens > 0), ..self }
    }

    /// As one that knows nothing of earlier answers.
    pub(super) fn without_memory(media: Media) -> Self {
        Self { offloads: true, ..Self::new(media) }
    }

    /// Decodes one answer.
    ///
    /// # Errors
    /// When it is no JSON list. An event that is not understood is left out with its cause.
    pub fn pull(&mut self, body: &[u8]) -> Result<Vec<Pulled>, DecodeError> {
        if body.len() > MAX_BODY_BYTES {
            return Err(DecodeError::TooLong { bytes: body.len(), limit: MAX_BODY_BYTES });
        }
        let items = parse(body)?;
        let mut out = Vec::with_capacity(items.len());
        self.measure(&items, &mut out);
        for item in items {
            let counts = Some(item.window) == self.window;
            let mut put = |event| out.push(Pulled { event_id: item.event_id, rank: item.rank, event });
            match item.data {
                Err(cause) => put(Err(cause)),
                Ok(Data::Stored(stored)) if counts => self.stored(&stored, &mut put),
                Ok(Data::Removed(hashes)) if counts => {
                    let hashes: Vec<_> = hashes.into_iter().map(|Hash(hash)| hash).collect();
                    // It does not say from where: a block lies in one tier at a time.
                    let tiers = if self.offloads { &Tier::ALL[..] } else { &[Tier::Gpu] };
                    for &tier in tiers {
                        put(Ok(KvEvent::Removed(Removed { hashes: hashes.clone(), tier, group: 0 })));
                    }
                }
                Ok(Data::Moved { hash: Hash(hash), from, to }) if counts => {
                    // In this order it is remembered all along.
                    put(Ok(KvEvent::Stored(Stored { hashes: vec![hash], ..empty(tier(to)) })));
                    put(Ok(KvEvent::Removed(Removed { hashes: vec![hash], tier: tier(from), group: 0 })));
                }
                Ok(_) => put(Ok(nothing())),
            }
        }
        Ok(out)
    }

    /// Takes window and block size from all items of one answer. A larger window than before voids what was taken until then.
    fn measure(&mut self, items: &[Parsed<'_>], out: &mut Vec<Pulled>) {
        let Some(largest) = items.iter().max_by_key(|item| item.window) else { return };
        match self.window {
            Some(window) if window >= largest.window => {}
            before => {
                if let (Some(_), Some(first)) = (before, items.first()) {
                    out.push(Pulled { event_id: first.event_id, rank: first.rank, event: Ok(KvEvent::Cleared) });
                }
                self.window = Some(largest.window);
            }
        }
        for item in items {
            self.offloads |= match &item.data {
                Ok(Data::Stored(stored)) => stored.blocks.iter().any(|block| level(block) != Tier::Gpu),
                Ok(Data::Moved { to, .. }) => *to != 0,
                _ => false,
            };
            if let (None, Ok(Data::Stored(stored))) = (self.block_size, &item.data)
                && let [first, _, ..] = stored.blocks.as_slice()
                && Some(item.window) == self.window
            {
                self.block_size = u32::try_from(first.tokens.len()).ok().filter(|&tokens| tokens > 0);
            }
        }
    }

    fn stored(&self, stored: &json::Stored<'_>, put: &mut impl FnMut(Result<KvEvent, Skipped>)) {
        let mut blocks = stored.blocks.as_slice();
        let full = |block: &json::Block<'_>| Some(block.tokens.len()) == self.block_size.map(|size| size as usize);
        if let Some((last, before)) = blocks.split_last()
            && !full(last)
            && self.block_size.is_none_or(|size| last.tokens.len() < size as usize)
        {
            if self.block_size.is_none() {
                return put(Err(Skipped::Sparse));
            }
            blocks = before;
        }
        if !blocks.iter().all(full) {
            return put(Err(Skipped::Sparse));
        }
        let mut reader = Reader::new(self.media);
        let mut parent = stored.parent_hash.map(|Hash(hash)| hash);
        if blocks.is_empty() {
            put(Ok(nothing()));
        }
        for run in blocks.chunk_by(|a, b| level(a) == level(b)) {
            let mut event = Stored { parent, block_size: self.block_size.unwrap_or(0), ..empty(level(&run[0])) };
            for block in run {
                let mut extra = read_block(&mut reader, block, &mut event.tokens);
                let starts = parent.is_none();
                salt(block, starts, &mut extra);
                event.extra.push(extra);
                event.hashes.push(block.block_hash.0);
                parent = Some(block.block_hash.0);
            }
            if event.extra.iter().all(|extra| *extra == BlockExtra::default()) {
                event.extra = Vec::new();
            }
            put(Ok(KvEvent::Stored(event)));
        }
    }
}

fn read_block(reader: &mut Reader, block: &json::Block<'_>, out: &mut Vec<u32>) -> BlockExtra {
    let tokens: Vec<_> = block
        .tokens
        .iter()
        .map(|token| match token.token_id {
            TokenId::Id(id) => Token::Id(id),
            TokenId::Digest(digest) => Token::Digest(digest),
        })
        .collect();
    let keys = block.mm_keys.as_deref().unwrap_or_default();
    let keys: Vec<_> = keys.iter().map(|key| Key { hash: &key.hash, start: key.start_offset }).collect();
    let mut extra = reader.read(&tokens, &keys, out);
    // Ids besides the token's own are those of prompt tables: no prompt shows them.
    extra.opaque |= block.tokens.iter().any(|token| token.token_extra_id.is_some_and(|id| id != 0));
    extra
}

/// The salt is told with every block and belongs to the first. One that is no text is the engine's own form of it.
fn salt(block: &json::Block<'_>, starts_chain: bool, extra: &mut BlockExtra) {
    match &block.cache_salt {
        serde_json::Value::Null => {}
        serde_json::Value::String(salt) if starts_chain && !salt.is_empty() => extra.salt = Some(salt.as_str().into()),
        serde_json::Value::String(_) => {}
        _ => extra.opaque |= starts_chain,
    }
}

fn level(block: &json::Block<'_>) -> Tier {
    tier(block.cache_level.unwrap_or(0))
}

/// `cache_level`: 0 GPU, 1 host.
fn tier(level: u8) -> Tier {
    Tier::from_index(level).unwrap_or(Tier::Storage)
}

/// A store of no block.
fn empty(tier: Tier) -> Stored {
    Stored {
        hashes: Vec::new(),
        parent: None,
        tokens: Vec::new(),
        block_size: 0,
        tier,
        lora: None,
        extra: Vec::new(),
        group: 0,
        attention: Attention::Full,
        session: None,
    }
}

fn nothing() -> KvEvent {
    KvEvent::Removed(Removed { hashes: Vec::new(), tier: Tier::Gpu, group: 0 })
}

fn parse(body: &[u8]) -> Result<Vec<Parsed<'_>>, DecodeError> {
    let items: Items<'_> = serde_json::from_slice(body).map_err(|error| {
        let lines = body.split_inclusive(|&byte| byte == b'\n');
        let before: usize = lines.take(error.line().saturating_sub(1)).map(<[u8]>::len).sum();
        DecodeError::NotJson { at: (before + error.column().saturating_sub(1)).min(body.len()) }
    })?;
    Ok(items.0)
}

struct Items<'a>(Vec<Parsed<'a>>);

impl<'de: 'a, 'a> Deserialize<'de> for Items<'a> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct OfItems;
        impl<'de> Visitor<'de> for OfItems {
            type Value = Items<'de>;
            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a list of events")
            }
            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<Items<'de>, A::Error> {
                let mut items = Vec::<Parsed<'de>>::new();
                while let Some(raw) = list.next_element::<&'de RawValue>()? {
                    if items.len() >= MAX_ITEMS {
                        return Err(A::Error::custom("too many events"));
                    }
                    items.extend(item(raw, items.last()));
                }
                Ok(Items(items))
            }
        }
        deserializer.deserialize_seq(OfItems)
    }
}

fn item<'a>(raw: &'a RawValue, before: Option<&Parsed<'_>>) -> Option<Parsed<'a>> {
    if is_empty(raw.get()) {
        return None;
    }
    Some(match serde_json::from_str::<Item<'a>>(raw.get()) {
        Ok(item) => Parsed {
            event_id: item.event_id,
            rank: item.attention_dp_rank.unwrap_or(0),
            window: item.window_size.unwrap_or(0),
            data: json::data(item.data),
        },
        // Without a number of its own it has that of the one before it; the hole shows at the next.
        Err(_) => {
            let (event_id, rank) = before.map_or((0, 0), |before| (before.event_id, before.rank));
            Parsed { event_id, rank, window: 0, data: Err(Skipped::Malformed) }
        }
    })
}

/// `{}`: the server puts such items where it had nothing to say.
fn is_empty(item: &str) -> bool {
    item.strip_prefix('{').and_then(|rest| rest.strip_suffix('}')).is_some_and(|inside| inside.trim().is_empty())
}
