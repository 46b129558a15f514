//! Bytes of the preamble: a version byte, then a postcard record. `docs/protocols/preamble.md` is the reference.

use std::borrow::Cow;

use fovea_kv::{MediaId, MediaKey};
use serde::{Deserialize, Serialize};

use super::{Identity, Preamble, Slot};

/// Longest preamble that a sidecar takes, in bytes.
pub const MAX_PREAMBLE_BYTES: usize = 4 << 20;

const VERSION: u8 = 1;

/// Why a preamble was refused. The balancer is at fault: the sidecar answers 400 and never forwards the request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PreambleError {
    #[error("preamble of {bytes} bytes is over the limit of {MAX_PREAMBLE_BYTES}; send the request without")]
    TooLong { bytes: usize },
    #[error("preamble is empty; leave out the header")]
    Empty,
    #[error(
        "preamble version {version} is unknown here, {VERSION} is known; run equal versions of balancer and sidecar"
    )]
    Version { version: u8 },
    #[error("preamble record is malformed; run equal versions of balancer and sidecar")]
    Malformed,
    #[error("preamble cut {index} is empty, out of order or overlaps the one before; send ascending, disjoint ranges")]
    Cut { index: usize },
    #[error("preamble identity {index} is out of order or inside a cut; send ascending offsets outside the cuts")]
    Identity { index: usize },
    #[error("preamble view is longer than {} tokens; send a shorter view", u32::MAX)]
    View,
    #[error("preamble span {index} is empty, out of order or outside the view; send ascending spans of the view")]
    Span { index: usize },
    #[error(
        "preamble slot {index} is empty, overlaps the one before or is outside the view; send ascending, disjoint slots of the view"
    )]
    Slot { index: usize },
}

#[derive(Serialize, Deserialize)]
struct Record<'a> {
    dp_rank: u32,
    prompt_tokens: u32,
    reused_tokens: u32,
    exact: bool,
    /// A run per token of text: never copied to be written.
    runs: Cow<'a, [(u32, u32)]>,
    spans: Vec<(u32, u32, [u8; 32])>,
    blocks: u32,
    last: u64,
    identities: Vec<(u64, [u8; 32], u32)>,
    cuts: Cow<'a, [(u64, u64)]>,
}

/// What follows the record; absent in records of balancers older than it.
#[derive(Default, Serialize, Deserialize)]
struct Tail {
    root: u64,
    /// Start, length, key, known.
    slots: Vec<(u32, u32, [u8; 32], bool)>,
    session: Option<String>,
    body_at: u64,
}

/// Of a run of one token of a large vocabulary, and of all the rest of a record without media.
const RUN_BYTES: usize = 4;
const HEAD_BYTES: usize = 256;

/// A record over [`MAX_PREAMBLE_BYTES`] is refused by every sidecar: send such a request without its view.
pub fn encode(preamble: &Preamble) -> Vec<u8> {
    let Preamble { dp_rank, prompt_tokens, reused_tokens, .. } = *preamble;
    encode_routed(preamble, Routed { dp_rank, prompt_tokens, reused_tokens })
}

/// What only the choice of a worker tells.
#[derive(Clone, Copy, Debug)]
pub struct Routed {
    pub dp_rank: u32,
    pub prompt_tokens: u32,
    pub reused_tokens: u32,
}

/// As [`encode`], with these in place of the preamble's own.
pub fn encode_routed(preamble: &Preamble, routed: Routed) -> Vec<u8> {
    let Routed { dp_rank, prompt_tokens, reused_tokens } = routed;
    let Preamble { exact, blocks, last, .. } = *preamble;
    let record = Record {
        dp_rank,
        prompt_tokens,
        reused_tokens,
        exact,
        runs: Cow::Borrowed(&preamble.runs),
        spans: preamble.spans.iter().map(|&(start, len, id)| (start, len, id.0)).collect(),
        blocks,
        last,
        identities: preamble.identities.iter().map(|item| (item.insert_at, item.id.0, item.tokens)).collect(),
        cuts: Cow::Borrowed(&preamble.cuts),
    };
    let tail = Tail {
        root: preamble.root,
        slots: preamble.slots.iter().map(|slot| (slot.start, slot.len, slot.key.0, slot.known)).collect(),
        session: preamble.session.clone(),
        body_at: preamble.body_at,
    };
    let mut bytes = Vec::with_capacity(HEAD_BYTES + preamble.runs.len() * RUN_BYTES);
    bytes.push(VERSION);
    postcard::to_extend(&(record, tail), bytes).expect("a record of integers, arrays and strings always encodes")
}

/// # Errors
/// When the bytes are no preamble of this version, or its parts contradict each other.
pub fn decode(bytes: &[u8]) -> Result<Preamble, PreambleError> {
    if bytes.len() > MAX_PREAMBLE_BYTES {
        return Err(PreambleError::TooLong { bytes: bytes.len() });
    }
    let (&version, record) = bytes.split_first().ok_or(PreambleError::Empty)?;
    if version != VERSION {
        return Err(PreambleError::Version { version });
    }
    let (record, later): (Record<'_>, _) = postcard::take_from_bytes(record).map_err(|_| PreambleError::Malformed)?;
    let tail = match later {
        [] => Tail::default(),
        _ => postcard::take_from_bytes(later).map_err(|_| PreambleError::Malformed)?.0,
    };
    check_edits(&record)?;
    check_view(&record, &tail)?;
    let identity = |(insert_at, id, tokens)| Identity { insert_at, id: MediaId(id), tokens };
    let slot = |(start, len, key, known)| Slot { start, len, key: MediaKey(key), known };
    Ok(Preamble {
        dp_rank: record.dp_rank,
        prompt_tokens: record.prompt_tokens,
        reused_tokens: record.reused_tokens,
        exact: record.exact,
        runs: record.runs.into_owned(),
        spans: record.spans.into_iter().map(|(start, len, id)| (start, len, MediaId(id))).collect(),
        blocks: record.blocks,
        last: record.last,
        identities: record.identities.into_iter().map(identity).collect(),
        cuts: record.cuts.into_owned(),
        root: tail.root,
        slots: tail.slots.into_iter().map(slot).collect(),
        session: tail.session,
        body_at: tail.body_at,
    })
}

/// Cuts ascend and are disjoint; identities ascend and lie outside the cuts (at an edge is outside).
fn check_edits(record: &Record<'_>) -> Result<(), PreambleError> {
    let mut free_from = 0;
    for (index, &(offset, length)) in record.cuts.iter().enumerate() {
        let end = offset.checked_add(length).filter(|_| length > 0 && offset >= free_from);
        free_from = end.ok_or(PreambleError::Cut { index })?;
    }
    let (mut next, mut cuts) = (0, record.cuts.iter().copied().peekable());
    for (index, &(at, _, _)) in record.identities.iter().enumerate() {
        while cuts.next_if(|&(offset, length)| offset + length <= at).is_some() {}
        let inside = cuts.peek().is_some_and(|&(offset, _)| offset < at);
        if inside || at < next {
            return Err(PreambleError::Identity { index });
        }
        next = at.checked_add(1).ok_or(PreambleError::Identity { index })?;
    }
    Ok(())
}

/// Spans and slots ascend by start and lie inside the view; slots do not overlap.
fn check_view(record: &Record<'_>, tail: &Tail) -> Result<(), PreambleError> {
    let length: u64 = record.runs.iter().map(|&(_, count)| u64::from(count)).sum();
    if length > u64::from(u32::MAX) {
        return Err(PreambleError::View);
    }
    let mut previous = 0;
    for (index, &(start, len, _)) in record.spans.iter().enumerate() {
        if len == 0 || start < previous || u64::from(start) + u64::from(len) > length {
            return Err(PreambleError::Span { index });
        }
        previous = start;
    }
    let mut free_from = 0;
    for (index, &(start, len, _, _)) in tail.slots.iter().enumerate() {
        let end = u64::from(start) + u64::from(len);
        if len == 0 || u64::from(start) < free_from || end > length {
            return Err(PreambleError::Slot { index });
        }
        free_from = end;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
