//! KV events as every dialect decodes them: engine-neutral, still in the engine's own hashes.

use std::sync::Arc;

use crate::{EngineHash, MediaId, Tier};

/// What one engine step announced, in the engine's order: stores and removals interleave and are applied one by one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Batch {
    pub events: Vec<KvEvent>,
    /// Data-parallel rank that sent it; 0 without data parallelism.
    pub rank: u32,
    /// The tokens are pairs of neighbours, one position fewer than the prompt has (SGLang with EAGLE): see [`crate::sglang::pair`].
    pub pairs: bool,
    /// Events left out because they could not be understood, by cause. The rest of the batch counts.
    pub skipped: Vec<Skipped>,
}

/// Why an event was left out. A closed set: it is a metric label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Skipped {
    /// A type tag this version does not know.
    UnknownType,
    /// A known event with a field missing or of another type.
    Malformed,
    /// A removal that does not say of which blocks: what is held is not known any more.
    Removal,
    /// Token count ≠ blocks × block size: tokens cannot be told apart by block (groups that leave out masked blocks).
    Sparse,
}

/// Why a whole payload was refused. No event of it counts.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DecodeError {
    #[error("payload of {bytes} bytes is over the limit of {limit}: raise no limit, look at what publishes it")]
    TooLong { bytes: usize, limit: usize },
    #[error("payload ends at byte {at} inside a value: it was cut off")]
    Truncated { at: usize },
    #[error("byte {at} is no msgpack: the socket does not carry KV events")]
    NotMsgpack { at: usize },
    #[error("byte {at} is no JSON list of events: the address is not that of the engine's event queue")]
    NotJson { at: usize },
    #[error("byte {at}: {wanted} expected: the engine speaks a layout that this version does not know")]
    Layout { at: usize, wanted: &'static str },
}

#[derive(Clone, Debug, PartialEq)]
pub enum KvEvent {
    Stored(Stored),
    Removed(Removed),
    /// Everything is gone, all tiers and groups.
    Cleared,
}

/// Blocks that became held, consecutive in one chain.
#[derive(Clone, Debug, PartialEq)]
pub struct Stored {
    pub hashes: Vec<EngineHash>,
    /// Hash of the block before the first; `None` = the first block of a prompt.
    pub parent: Option<EngineHash>,
    /// `hashes.len() × block_size` token ids, media placeholders expanded. Empty = the blocks are known by hash alone
    /// (offloaded copies): parent, block size and extra keys then say nothing.
    pub tokens: Vec<u32>,
    pub block_size: u32,
    pub tier: Tier,
    pub lora: Option<Arc<str>>,
    /// One per block; empty = no block has extra keys.
    pub extra: Vec<BlockExtra>,
    /// KV-cache group of a hybrid model; 0 for a plain one.
    pub group: u32,
    pub attention: Attention,
    /// `session_id` of the request that caused it, where the engine echoes it (vLLM map events, SGLang ≥ 0.5.20).
    pub session: Option<Arc<str>>,
}

/// Which kind of attention a group serves. Only full attention can be indexed by prefix.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Attention {
    /// Full or MLA, or not said.
    #[default]
    Full,
    /// Sliding window, Mamba, linear, anything else.
    Other,
}

/// What an engine hashes into a block besides its tokens.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BlockExtra {
    /// Media over the block and (span start − block start) in tokens.
    pub media: Vec<(MediaId, i32)>,
    /// Only on a chain's first block.
    pub salt: Option<Arc<str>>,
    /// A key we cannot predict (digest of prompt embeddings, an unknown shape): the block and its children stay unpublished.
    pub opaque: bool,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Removed {
    pub hashes: Vec<EngineHash>,
    pub tier: Tier,
    pub group: u32,
}
