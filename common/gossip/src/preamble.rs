//! The record that a balancer puts before a request body; header `x-fovea-preamble: N` gives its length in bytes.
//!
//! It carries what the balancer predicted (so that the sidecar can compare) and the edits that the body needs (so that the
//! sidecar need not parse it). It is trusted: a sidecar takes it from balancers only.

mod codec;

use fovea_kv::MediaId;

pub use codec::{MAX_PREAMBLE_BYTES, PreambleError, decode, encode};

/// Request header that announces a preamble; always removed before the engine sees the request.
pub const HEADER: &str = "x-fovea-preamble";

/// Request header with the key that proves a balancer to a sidecar; always removed before the engine sees the request.
pub const KEY_HEADER: &str = "x-fovea-key";

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Preamble {
    /// Data-parallel rank that was chosen.
    pub dp_rank: u32,
    /// Tokens of the whole prompt, or of its known part.
    pub prompt_tokens: u32,
    /// Of these, expected in the worker's cache.
    pub reused_tokens: u32,
    /// Is the prediction exact to the end of the prompt?
    pub exact: bool,
    /// Run-length routing view: (token, count).
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
