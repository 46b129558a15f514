//! What is particular to TensorRT-LLM: its block key, blocks stored one by one, events that a poll drains.
//!
//! Mirrors the V1 KV cache manager (`cpp/tensorrt_llm/batch_manager`, 1.3) and `POST /kv_cache_events` as read in source; no server
//! of it was asked. Reuse of part of a block is not simulated: a prompt hits whole blocks only.

mod dialect;
pub mod key;
pub mod pull;

pub use dialect::{Event, Rules, key_of};

/// TensorRT-LLM's block cache.
pub type BlockTree = crate::tree::PageTree<Rules>;
