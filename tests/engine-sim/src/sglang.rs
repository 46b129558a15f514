//! What is particular to SGLang: identity inside tokens, a radix tree of pages, its hashes and its events.
//!
//! Mirrors `srt/mem_cache/radix_cache.py`, `srt/mem_cache/events.py`, `srt/disaggregation/kv_events.py` and the placeholder
//! padding of `srt/managers/mm_utils.py`, releases 0.5.9 to 0.5.23; held to captures of five of them by `tests/sglang`.

mod dialect;
pub mod digest;
pub mod event;
pub mod identity;
pub mod rules;

pub use event::Event;
pub use rules::{Rules, Version};

/// SGLang's page cache.
pub type PageTree = crate::tree::PageTree<Rules>;
