//! TensorRT-LLM's KV events, from both of its paths: the queue behind `POST /kv_cache_events` (JSON), and the ZMQ publisher (msgpack).
//!
//! Mirrors main of 2026 (1.3.0rc, 1.4.0rc) as read in its source and documentation: `serve/openai_server.py`, `_utils.py`
//! (`KVCacheEventSerializer`), `cpp/tensorrt_llm/batch_manager`. No frame of a real server was seen.
//!
//! Tokens are made canonical: a media position carries the placeholder id, whichever manager wrote it (V1 keeps the placeholder; V2 has
//! the item's digest and then `vocab_size` + k), and the identity is in [`BlockExtra::media`](crate::event::BlockExtra). A block whose
//! media cannot be told is opaque. A LoRA adapter is not shown: its blocks read as those of the plain model.
//!
//! The C++ publisher leaves out every block with media: blocks after it name a parent that was never announced, and stay orphans with
//! whoever applies the events.

mod block;
mod json;
mod pull;
mod push;
#[cfg(test)]
mod tests;

use crate::event::{Batch, DecodeError, KvEvent, Skipped};
pub use pull::{MAX_BODY_BYTES, Puller};

/// What of the model's configuration is needed to read its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Media {
    /// Token id at media positions in the routing view. Without it blocks with media are opaque.
    pub placeholder: Option<u32>,
    /// Ids from here on stand for the later positions of an item (V2).
    pub vocab_size: Option<u32>,
}

impl Media {
    /// Out of a model's config.json. A text model inside a larger one has its vocabulary in `text_config`.
    pub fn of_config(config: &serde_json::Value) -> Self {
        let number = |at: &serde_json::Value, name| at[name].as_u64().and_then(|number| u32::try_from(number).ok());
        let either = |name| number(config, name).or_else(|| number(&config["text_config"], name));
        Self {
            placeholder: either("image_token_id").or_else(|| either("image_token_index")),
            vocab_size: either("vocab_size"),
        }
    }
}

/// One event of the queue, or a part of one: what is said under one `event_id` may come as several of these in a row.
#[derive(Clone, Debug, PartialEq)]
pub struct Pulled {
    /// Numbers the events of a rank without a hole; a jump means that the queue ran over. Events that say nothing of blocks are here too,
    /// as removals of no block.
    pub event_id: u64,
    /// `attention_dp_rank`.
    pub rank: u32,
    pub event: Result<KvEvent, Skipped>,
}

/// Decodes one answer by itself: [`Puller`] without a memory of earlier ones.
///
/// # Errors
/// When it is no JSON list. An event that is not understood is left out with its cause.
pub fn pull(body: &[u8], media: Media) -> Result<Vec<Pulled>, DecodeError> {
    Puller::without_memory(media).pull(body)
}

/// Decodes the last frame of one message of the publisher.
///
/// # Errors
/// Only when the batch as a whole cannot be walked. An event that is not understood is listed in [`Batch::skipped`], the rest counts.
pub fn push(payload: &[u8], media: Media) -> Result<Batch, DecodeError> {
    push::decode(payload, media)
}
