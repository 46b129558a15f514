//! TensorRT-LLM's tree: a node per block, the last block of a request kept though it is not full.

use super::key;
use crate::blocks::MediaSpan;
use crate::hash::Digest;
use crate::tree::{Dialect, Namespace, Run};
use serde_json::{Value, json};

/// `data` of an event.
pub type Event = Value;

/// Retention priority of blocks that ask for none.
const PRIORITY: u32 = 35;

/// Rules of the V1 manager.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rules;

/// The key that a digest of ours holds.
pub fn key_of(digest: &Digest) -> u64 {
    let [a, b, c, d, e, f, g, h, ..] = digest.0;
    u64::from_be_bytes([a, b, c, d, e, f, g, h])
}

fn digest_of(key: u64) -> Digest {
    let mut digest = [0; 32];
    digest[..8].copy_from_slice(&key.to_be_bytes());
    Digest(digest)
}

/// Items over a block: id, and where in the item the block begins (0 when the item begins in the block).
fn media_of(media: &[MediaSpan], start: usize, end: usize) -> impl Iterator<Item = (&str, u64)> {
    let touched = media.iter().filter(move |span| span.start < end && start < span.start + span.tokens);
    touched.map(move |span| (span.id.as_str(), start.saturating_sub(span.start) as u64))
}

fn bytes_of(hex: &str) -> [u8; 32] {
    let mut out = [0; 32];
    for (byte, at) in out.iter_mut().zip((0..hex.len()).step_by(2)) {
        *byte = hex.get(at..at + 2).and_then(|pair| u8::from_str_radix(pair, 16).ok()).unwrap_or(0);
    }
    out
}

fn stored_block(run: &Run<'_>, index: usize, digest: &Digest) -> Value {
    let from = index * run.page_size;
    let tokens = &run.tokens[from..run.tokens.len().min(from + run.page_size)];
    let start = run.start + from;
    let media = media_of(run.media, start, start + tokens.len());
    let keys: Value = media.map(|(id, at)| json!({"type": "mm_key", "hash": id, "start_offset": at})).collect();
    let token = |id: &u64| json!({"type": "unique_token", "token_id": id, "token_extra_id": 0});
    let tokens: Value = tokens.iter().map(token).collect();
    json!({"type": "stored_block", "block_hash": key_of(digest), "tokens": tokens, "cache_level": 0,
        "priority": PRIORITY, "mm_keys": keys, "cache_salt": run.space.salt})
}

impl Dialect for Rules {
    type Event = Event;
    const NODE_PAGES_MAX: usize = 1;
    const KEEPS_PARTIAL: bool = true;

    fn namespace(&self, salt: Option<&str>, _extra: Option<&str>) -> Namespace {
        Namespace { salt: salt.filter(|salt| !salt.is_empty()).map(str::to_owned), extra: None }
    }

    /// Placeholders stay; identity is beside the tokens.
    fn keyed(&self, tokens: &[u32], _media: &[MediaSpan]) -> Vec<u64> {
        tokens.iter().map(|token| u64::from(*token)).collect()
    }

    fn digest(
        &self,
        space: &Namespace,
        prior: Option<&Digest>,
        tokens: &[u64],
        media: &[MediaSpan],
        start: usize,
    ) -> Digest {
        let media: Vec<_> =
            media_of(media, start, start + tokens.len()).map(|(id, offset)| (bytes_of(id), offset)).collect();
        digest_of(key::block(prior.map_or(0, key_of), tokens, space.salt.as_deref().map(key::salt_id), &media))
    }

    fn created(&self, capacity: usize, events: &mut Vec<Event>) {
        events.push(json!({"type": "created", "num_blocks_per_cache_level": [capacity, 0]}));
    }

    fn stored(&self, run: &Run<'_>, events: &mut Vec<Event>) {
        let blocks: Value = run.digests.iter().enumerate().map(|(i, digest)| stored_block(run, i, digest)).collect();
        events.push(json!({"type": "stored", "parent_hash": run.parent.map(key_of), "blocks": blocks}));
    }

    fn removed(&self, pages: &[Digest], events: &mut Vec<Event>) {
        events.push(json!({"type": "removed", "block_hashes": pages.iter().map(key_of).collect::<Value>()}));
    }

    /// Nobody can ask for it.
    fn cleared(&self, _events: &mut Vec<Event>) {}
}
