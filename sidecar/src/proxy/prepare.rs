//! Makes the engine's body out of the client's: with a preamble the body streams through and is edited by the balancer's offsets;
//! without one it is buffered, scanned, and what a client must not set is cut out.

use std::ops::Range;

use bytes::{Buf, Bytes, BytesMut};
use fovea_gossip::preamble::{self, Preamble};
use fovea_openai::edit::{Edits, Splicer};
use fovea_openai::{CutPolicy, scan};
use http::{HeaderValue, Request, header};
use http_body::Body as _;
use http_body_util::BodyExt;

use super::budget::{Budget, Held, HeldBody};
use super::flight::Predicted;
use super::refusal::Refusal;
use super::speaking::Speaking;
use super::splice::{Bounds, Spliced};
use crate::body::{self, Body};
use crate::config::{Limits, Timeouts};
use crate::engine::dialect::Member;

/// Media parts one preamble may name.
const IDENTITIES_MAX: usize = 4096;
/// Bytes of text per token, to guess at a prompt nobody has counted.
const BYTES_PER_TOKEN: usize = 4;

/// What is known of the prompt, for the accounting and the choice of rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Weight {
    /// Set by a balancer; `None` = the engine chooses.
    pub dp_rank: Option<u32>,
    pub prompt_tokens: u32,
    pub prefill_tokens: u32,
}

pub struct Bodies {
    pub budget: Budget,
    pub limits: Limits,
    pub timeouts: Timeouts,
    /// Clients may send embeddings.
    pub client_embeddings: bool,
}

impl Bodies {
    /// `dialect` says what of the record the engine is told.
    ///
    /// # Errors
    /// Length, time, or a record that cannot be read.
    pub async fn with_preamble(
        &self,
        request: &mut Request<Body>,
        length: usize,
        dialect: &Speaking,
    ) -> Result<(Weight, Option<Predicted>), Refusal> {
        let bad = |problem: String| Refusal::BadPreamble { problem };
        let whole = request.body().size_hint().exact();
        if length as u64 > self.limits.preamble_max.as_u64() {
            return Err(bad(format!("longer than limits.preamble_max ({})", self.limits.preamble_max)));
        }
        let old_len = match whole {
            Some(whole) => Some(whole.checked_sub(length as u64).ok_or_else(|| bad("longer than the body".into()))?),
            None => None,
        };
        self.check_length(old_len)?;
        let mut rest = std::mem::replace(request.body_mut(), body::empty());
        let held = self.budget.take(length as u64).await?;
        let (record, first) = self.in_time(split(&mut rest, length)).await?;
        let record = preamble::decode(&record).map_err(|error| bad(error.to_string()))?;
        drop(held);
        let session = dialect.session(&record);
        let members = dialect.members(&record, session.as_deref());
        // A chunked body is held to them as it passes.
        let bounds = Bounds { least: edits_end(&record, &members), most: self.limits.body_max.as_u64() };
        let edits = edits(&record, members)?;
        old_len.map_or(Ok(()), |len| bounds.check(len)).map_err(Refusal::from)?;
        let new_len = old_len.map(|len| edits.new_len(len));
        set_length(request, new_len);
        *request.body_mut() = body::boxed(Spliced::new(first, rest, Splicer::new(edits), new_len, bounds));
        let weight = Weight {
            dp_rank: Some(record.dp_rank),
            prompt_tokens: record.prompt_tokens,
            prefill_tokens: record.prompt_tokens.saturating_sub(record.reused_tokens),
        };
        Ok((weight, dialect.predicted(record, session)))
    }

    /// `scan` = the path takes chat or completion JSON.
    ///
    /// # Errors
    /// Length, time, room, or JSON that cannot be scanned: what we cannot read might carry what a client must not set.
    pub async fn plain(&self, request: &mut Request<Body>, scan: bool) -> Result<Weight, Refusal> {
        if request.body().is_end_stream() {
            return Ok(Weight::default());
        }
        let told = request.body().size_hint().exact();
        self.check_length(told)?;
        let old = std::mem::replace(request.body_mut(), body::empty());
        let (bytes, held) = self.in_time(self.gather(Bytes::new(), old, told)).await?;
        let (bytes, weight) = if scan { scanned(bytes, self.client_embeddings)? } else { (bytes, Weight::default()) };
        set_length(request, Some(bytes.len() as u64));
        *request.body_mut() = HeldBody::new(bytes, held).boxed();
        Ok(weight)
    }

    pub(super) fn check_length(&self, told: Option<u64>) -> Result<(), Refusal> {
        let limit = self.limits.body_max.as_u64();
        if told.is_some_and(|told| told > limit) { Err(Refusal::BodyTooLong { limit }) } else { Ok(()) }
    }

    pub(super) async fn in_time<T>(&self, work: impl Future<Output = Result<T, Refusal>>) -> Result<T, Refusal> {
        tokio::time::timeout(self.timeouts.client_body, work).await.unwrap_or(Err(Refusal::BodyTooSlow))
    }

    /// The whole body in one buffer, sized beforehand when the length is told.
    pub(super) async fn gather(
        &self,
        first: Bytes,
        mut old: Body,
        told: Option<u64>,
    ) -> Result<(Bytes, Held), Refusal> {
        let mut held = self.budget.take(told.unwrap_or(0)).await?;
        let mut buffer = BytesMut::with_capacity(told.and_then(|told| usize::try_from(told).ok()).unwrap_or(0));
        self.check_length(Some(first.len() as u64))?;
        self.budget.grow(&mut held, first.len() as u64).await?;
        buffer.extend_from_slice(&first);
        while let Some(frame) = old.frame().await {
            let Ok(chunk) = frame.map_err(Refusal::BodyBroken)?.into_data() else { continue };
            let len = (buffer.len() + chunk.len()) as u64;
            self.check_length(Some(len))?;
            self.budget.grow(&mut held, len).await?;
            buffer.extend_from_slice(&chunk);
        }
        Ok((buffer.freeze(), held))
    }
}

pub(super) fn set_length(request: &mut Request<Body>, length: Option<u64>) {
    if let Some(length) = length {
        request.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(length));
    }
}

/// The first `length` bytes, and what came after them in the same frame.
pub(super) async fn split(body: &mut Body, length: usize) -> Result<(Bytes, Bytes), Refusal> {
    let mut record = BytesMut::with_capacity(length);
    loop {
        if record.len() == length {
            return Ok((record.freeze(), Bytes::new()));
        }
        let Some(frame) = body.frame().await else {
            return Err(Refusal::BadPreamble { problem: format!("ends after {} of {length} bytes", record.len()) });
        };
        let Ok(mut chunk) = frame.map_err(Refusal::BodyBroken)?.into_data() else { continue };
        let take = chunk.len().min(length - record.len());
        record.extend_from_slice(&chunk[..take]);
        chunk.advance(take);
        if !chunk.is_empty() {
            return Ok((record.freeze(), chunk));
        }
    }
}

/// Ranges that go away, and texts that come in.
pub(super) type Changes = (Vec<Range<usize>>, Vec<(usize, Vec<u8>)>);

fn edits(record: &Preamble, members: Vec<Member>) -> Result<Edits, Refusal> {
    let (cuts, inserts) = changes(record, members)?;
    Edits::new(cuts, inserts).map_err(|error| Refusal::BadPreamble { problem: error.to_string() })
}

/// The record's cuts, and what the engine is told.
pub(super) fn changes(record: &Preamble, members: Vec<Member>) -> Result<Changes, Refusal> {
    let bad = |problem: &str| Refusal::BadPreamble { problem: problem.into() };
    if record.identities.len() > IDENTITIES_MAX {
        return Err(bad("names too many media parts"));
    }
    let at = |offset: u64| usize::try_from(offset).map_err(|_| bad("an offset is beyond memory"));
    let mut cuts = Vec::with_capacity(record.cuts.len());
    for &(offset, length) in &record.cuts {
        let end = offset.checked_add(length).ok_or_else(|| bad("a cut is too long"))?;
        cuts.push(at(offset)?..at(end)?);
    }
    let mut inserts = Vec::with_capacity(members.len());
    for (offset, text) in members {
        inserts.push((at(offset)?, text.into_bytes()));
    }
    Ok((cuts, inserts))
}

/// Where in the client's body the last edit ends.
pub(super) fn edits_end(record: &Preamble, members: &[Member]) -> u64 {
    let cut = record.cuts.last().map_or(0, |&(offset, length)| offset.saturating_add(length));
    members.last().map_or(0, |&(offset, _)| offset).max(cut)
}

/// Of a body of this many bytes that nobody has counted.
pub(super) fn guessed(len: usize) -> Weight {
    let tokens = u32::try_from(len / BYTES_PER_TOKEN).unwrap_or(u32::MAX);
    Weight { dp_rank: None, prompt_tokens: tokens, prefill_tokens: tokens }
}

/// Cuts out what a client must not set, and guesses the prompt's length.
fn scanned(bytes: Bytes, embeddings: bool) -> Result<(Bytes, Weight), Refusal> {
    let unread = |problem: String| Refusal::BadJson { problem };
    let text = std::str::from_utf8(&bytes)
        .map_err(|error| unread(format!("not utf-8 at byte {}; send utf-8", error.valid_up_to())))?;
    let found = scan(text, CutPolicy::default(), embeddings).map_err(|error| unread(error.to_string()))?;
    if let Some(hazard) = found.hazard {
        return Err(hazard.into());
    }
    let cuts = found.cuts;
    // Base64 is no prompt text: the charge is capped by the longest sequence of the engine.
    let weight = guessed(text.len());
    if cuts.is_empty() {
        return Ok((bytes, weight));
    }
    let edits = Edits::new(cuts, []).map_err(|error| unread(error.to_string()))?;
    Ok((Bytes::from(edits.apply(&bytes)), weight))
}

#[cfg(test)]
mod tests;
