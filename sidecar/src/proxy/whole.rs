//! A chat in front of an encoder: gathered whole, its images encoded, and each image's part replaced by the hand-off's.

use std::ops::Range;

use bytes::Bytes;
use fovea_gossip::message::EngineFacts;
use fovea_gossip::preamble::{self, Preamble};
use fovea_openai::edit::Edits;
use fovea_openai::{CutPolicy, scan};
use http::Request;
use http_body::Body as _;

use super::budget::HeldBody;
use super::flight::Predicted;
use super::prepare::{Bodies, Changes, Weight, changes, edits_end, guessed, set_length, split};
use super::refusal::Refusal;
use super::speaking::Speaking;
use super::splice::Bounds;
use crate::body::{self, Body};
use crate::encode::images::{self, Image, ReadError};
use crate::encode::{Encoding, Fault, Leases, Ready};

/// What is known of a chat that was made ready for the engine.
pub struct Made {
    pub weight: Weight,
    pub predicted: Option<Predicted>,
    pub leases: Option<Leases>,
}

impl Bodies {
    /// `announced` = bytes of the balancer's record in front, if there is one.
    ///
    /// # Errors
    /// As with and without a record; and that an image cannot be encoded, when nothing reaches the engine.
    pub async fn encoded(
        &self,
        request: &mut Request<Body>,
        announced: Option<usize>,
        speaking: &Speaking,
        encoding: &Encoding,
        facts: Option<&EngineFacts>,
    ) -> Result<Made, Refusal> {
        let (record, first, rest, told) = self.record(request, announced).await?;
        let (bytes, mut held) = self.in_time(self.gather(first, rest, told)).await?;
        let model = facts.map(|facts| facts.engine_model.clone()).unwrap_or_default();
        let (body, limits) = (bytes.clone(), encoding.config.images.clone());
        let read = tokio::task::spawn_blocking(move || images::read(&body, &limits, &model));
        let read = read.await.map_err(|_| Fault::Internal)?.map_err(|error| match error {
            ReadError::Json(problem) => Refusal::BadJson { problem },
            ReadError::Fault(fault) => fault.into(),
        })?;
        if let Some(hazard) = read.hazard {
            return Err(hazard.into());
        }
        let (mut changes, weight, predicted) = match &record {
            Some(record) => told_changes(record, speaking, bytes.len())?,
            None => found_changes(&bytes)?,
        };
        let mut images = read.images;
        let mut leases = None;
        if !images.is_empty() {
            let ready = encoding.ready(facts)?;
            name(&mut images, record.as_ref(), &ready)?;
            // The files beside the body, until they are encoded.
            let files: u64 = images.iter().map(|image| image.bytes.len() as u64).sum();
            let files = self.budget.take(files).await?;
            let encoded = ready.encode(&images, &encoding.config).await?;
            drop(files);
            replace(&mut changes, &images, encoded.parts);
            leases = Some(encoded.leases);
        }
        let edits = Edits::new(changes.0, changes.1);
        let edits = edits.map_err(|error| Refusal::BadPreamble { problem: error.to_string() })?;
        let new_len = edits.new_len(bytes.len() as u64);
        self.budget.grow(&mut held, new_len.saturating_add(bytes.len() as u64)).await?;
        let bytes = if edits.is_empty() { bytes } else { Bytes::from(edits.apply(&bytes)) };
        set_length(request, Some(bytes.len() as u64));
        *request.body_mut() = HeldBody::new(bytes, held).boxed();
        Ok(Made { weight, predicted, leases })
    }

    /// The record, what came in one frame with its end, the rest, and the length of both as far as it was told.
    async fn record(
        &self,
        request: &mut Request<Body>,
        announced: Option<usize>,
    ) -> Result<(Option<Preamble>, Bytes, Body, Option<u64>), Refusal> {
        let told = request.body().size_hint().exact();
        let Some(length) = announced else {
            self.check_length(told)?;
            return Ok((None, Bytes::new(), std::mem::replace(request.body_mut(), body::empty()), told));
        };
        let bad = |problem: String| Refusal::BadPreamble { problem };
        if length as u64 > self.limits.preamble_max.as_u64() {
            return Err(bad(format!("longer than limits.preamble_max ({})", self.limits.preamble_max)));
        }
        let left = |told: u64| told.checked_sub(length as u64).ok_or_else(|| bad("longer than the body".into()));
        let told = told.map(left).transpose()?;
        self.check_length(told)?;
        let mut rest = std::mem::replace(request.body_mut(), body::empty());
        let _held = self.budget.take(length as u64).await?;
        let (record, first) = self.in_time(split(&mut rest, length)).await?;
        let record = preamble::decode(&record).map_err(|error| bad(error.to_string()))?;
        Ok((Some(record), first, rest, told))
    }
}

type Known = (Changes, Weight, Option<Predicted>);

fn told_changes(record: &Preamble, speaking: &Speaking, len: usize) -> Result<Known, Refusal> {
    let session = speaking.session(record);
    let members = speaking.members(record, session.as_deref());
    Bounds { least: edits_end(record, &members), most: u64::MAX }.check(len as u64)?;
    let changes = changes(record, members)?;
    let weight = Weight {
        dp_rank: Some(record.dp_rank),
        prompt_tokens: record.prompt_tokens,
        prefill_tokens: record.prompt_tokens.saturating_sub(record.reused_tokens),
    };
    Ok((changes, weight, speaking.predicted(record.clone(), session)))
}

fn found_changes(bytes: &Bytes) -> Result<Known, Refusal> {
    let unread = |problem: String| Refusal::BadJson { problem };
    let text = std::str::from_utf8(bytes).map_err(|error| unread(error.to_string()))?;
    let found = scan(text, CutPolicy::default(), false).map_err(|error| unread(error.to_string()))?;
    match found.hazard {
        Some(hazard) => Err(hazard.into()),
        None => Ok(((found.cuts, Vec::new()), guessed(bytes.len()), None)),
    }
}

/// Holds the balancer's names against those that the bytes give, and takes over its counts.
fn name(images: &mut [Image], record: Option<&Preamble>, ready: &Ready) -> Result<(), Fault> {
    for image in images {
        let at = image.insert_at as u64;
        let told = record.and_then(|record| record.identities.iter().find(|identity| identity.insert_at == at));
        let Some(told) = told else { continue };
        if told.id != ready.identity(image) {
            return Err(Fault::Misnamed { index: image.index });
        }
        image.rows = Some(told.tokens).filter(|&tokens| tokens > 0);
    }
    Ok(())
}

/// Puts `parts` in place of the images' own; what was to change inside those is gone with them.
fn replace((cuts, inserts): &mut Changes, images: &[Image], parts: Vec<Bytes>) {
    let inside = |range: &Range<usize>| {
        let next = images.partition_point(|image| image.at.end <= range.start);
        images.get(next).is_some_and(|image| image.at.start < range.start && range.end <= image.at.end)
    };
    cuts.retain(|cut| !inside(cut));
    inserts.retain(|(at, _)| !inside(&(*at..*at)));
    for (image, part) in images.iter().zip(parts) {
        cuts.push(image.at.clone());
        inserts.push((image.at.start, part.to_vec()));
    }
}
