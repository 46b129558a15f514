//! Bytes of the preamble: a version byte, then a postcard record. `docs/protocols/preamble.md` is the reference.

use fovea_kv::MediaId;
use serde::{Deserialize, Serialize};

use super::{Identity, Preamble};

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
}

#[derive(Serialize, Deserialize)]
struct Record {
    dp_rank: u32,
    prompt_tokens: u32,
    reused_tokens: u32,
    exact: bool,
    runs: Vec<(u32, u32)>,
    spans: Vec<(u32, u32, [u8; 32])>,
    blocks: u32,
    last: u64,
    identities: Vec<(u64, [u8; 32], u32)>,
    cuts: Vec<(u64, u64)>,
}

/// A record over [`MAX_PREAMBLE_BYTES`] is refused by every sidecar: send such a request without its view.
pub fn encode(preamble: &Preamble) -> Vec<u8> {
    let Preamble { dp_rank, prompt_tokens, reused_tokens, exact, blocks, last, .. } = *preamble;
    let record = Record {
        dp_rank,
        prompt_tokens,
        reused_tokens,
        exact,
        runs: preamble.runs.clone(),
        spans: preamble.spans.iter().map(|&(start, len, id)| (start, len, id.0)).collect(),
        blocks,
        last,
        identities: preamble.identities.iter().map(|item| (item.insert_at, item.id.0, item.tokens)).collect(),
        cuts: preamble.cuts.clone(),
    };
    postcard::to_extend(&record, vec![VERSION]).expect("a record of integers and arrays always encodes")
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
    let (record, _): (Record, _) = postcard::take_from_bytes(record).map_err(|_| PreambleError::Malformed)?;
    check_edits(&record)?;
    check_view(&record)?;
    let identity = |(insert_at, id, tokens)| Identity { insert_at, id: MediaId(id), tokens };
    Ok(Preamble {
        dp_rank: record.dp_rank,
        prompt_tokens: record.prompt_tokens,
        reused_tokens: record.reused_tokens,
        exact: record.exact,
        runs: record.runs,
        spans: record.spans.into_iter().map(|(start, len, id)| (start, len, MediaId(id))).collect(),
        blocks: record.blocks,
        last: record.last,
        identities: record.identities.into_iter().map(identity).collect(),
        cuts: record.cuts,
    })
}

/// Cuts ascend and are disjoint; identities ascend and lie outside the cuts (at an edge is outside).
fn check_edits(record: &Record) -> Result<(), PreambleError> {
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

/// Spans ascend by start and lie inside the view.
fn check_view(record: &Record) -> Result<(), PreambleError> {
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
    Ok(())
}

#[cfg(test)]
mod tests;
