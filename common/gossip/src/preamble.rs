//! The record that a balancer puts before a request body; header `x-fovea-preamble: N` gives its length in bytes.
//!
//! It carries what the balancer predicted (so that the sidecar can compare) and the edits that the body needs (so that the
//! sidecar need not parse it). It is trusted: a sidecar takes it from balancers only.

mod codec;

use fovea_kv::{MediaId, MediaKey};

pub use codec::{MAX_PREAMBLE_BYTES, PreambleError, Routed, decode, encode, encode_routed};

/// Request header that announces a preamble; always removed before the engine sees the request.
pub const HEADER: &str = "x-fovea-preamble";

/// Request header with the key that proves a balancer to a sidecar; always removed before the engine sees the request.
pub const KEY_HEADER: &str = "x-fovea-key";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Preamble {
    /// Data-parallel rank that was chosen.
    pub dp_rank: u32,
    /// Tokens of the whole prompt, or of its known part, or a guess.
    pub prompt_tokens: u32,
    /// Of these, expected in the worker's cache.
    pub reused_tokens: u32,
    /// Is the prediction exact to the end of the prompt?
    pub exact: bool,
    /// Run-length routing view: (token, count). Of pairs where the engine hashes pairs; slots count tokens all the same.
    pub runs: Vec<(u32, u32)>,
    /// Media spans: (start, length, identity).
    pub spans: Vec<(u32, u32, MediaId)>,
    /// Full blocks of the view and the sequence hash of the last; 0 and 0 when there is none.
    pub blocks: u32,
    pub last: u64,
    /// Identities to set, ascending by `insert_at`, none inside a cut.
    pub identities: Vec<Identity>,
    /// Byte ranges of the client's body to leave out: (offset, length), ascending, disjoint.
    pub cuts: Vec<(u64, u64)>,
    /// Sequence hash from which the chain of `last` starts; 0 in records of balancers that do not say it.
    pub root: u64,
    /// Every media item of the prompt whose place in the view is known: ascending, disjoint, inside the view.
    pub slots: Vec<Slot>,
    /// `session_id` that the client set itself.
    pub session: Option<String>,
    /// Byte offset in the client's body, just after the `{` of the whole, where a member may be put; a member follows. 0 = not known.
    pub body_at: u64,
}

/// The place of one media item in the view.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slot {
    /// First position, in tokens from the start of the prompt.
    pub start: u32,
    /// Positions that it is expected to fill; not 0. 1 where that is not known: one placeholder stands for the item, and the view ends
    /// there.
    pub len: u32,
    pub key: MediaKey,
    /// The view holds the identity that the balancer believes (a span, or pad tokens). Else its positions carry placeholders, and nothing
    /// from `start` on is hashed in `blocks` and `last`.
    pub known: bool,
}

/// An identity to give to one media part of the body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Identity {
    /// Byte offset in the client's body, just after the `{` of the media part.
    pub insert_at: u64,
    pub id: MediaId,
    /// Placeholder tokens the item is expected to fill.
    pub tokens: u32,
}
