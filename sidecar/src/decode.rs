//! `fovea-sidecar decode`: a capture of an engine's events, translated to our hashes by the decoder and publisher that production uses.
//!
//! Writes one line per record: `{"name", "stored", "removed", "cleared", "notes"}`. `stored` are the sequence hashes that its events
//! stored, in order, announced again or not; `removed` likewise, one entry per copy. What is read, by its form ([`input`]):
//!
//! * JSON lines of `tests/vectors/vllm/README.md`, of any engine: the records that have `frames`; `name` is `run/group/name`, as far as
//!   the record has them. Records of a run are taken, and written, in order of their sequence numbers, however they are ordered in the
//!   input. One that caused no event stands after the one before it in its group.
//! * Scenarios of `tests/vectors/sglang/README.md`: a record per step, in order; `name` is `scenario/step`, both numbers.
//! * Event samples of `tests/vectors/trtllm/README.md`: a record per event of a section, `name` is `section/event_id`.
//!
//! Each run, scenario or section is an engine of its own, and its state goes on from record to record.

mod input;
mod pack;
mod samples;
mod scenario;
#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};
use fovea_kv::event::{Batch, DecodeError, KvEvent, Skipped};
use fovea_kv::trtllm::Media;
use fovea_kv::{EngineHash, SequenceHash, sglang, trtllm, vllm};
use fovea_sidecar_core::publish::{Config, Publisher};
use serde::Serialize;

/// How the captured engine writes its events.
#[derive(Clone, Copy)]
enum Dialect {
    Vllm,
    Sglang,
    TrtLlm(Media),
}

impl Dialect {
    fn new(engine: &str, model_dir: &Path) -> Result<Self> {
        Ok(match engine {
            "vllm" => Self::Vllm,
            "sglang" => Self::Sglang,
            "trtllm" => Self::TrtLlm(media(model_dir)?),
            _ => bail!("engine `{engine}` is not supported: give --engine vllm, sglang or trtllm"),
        })
    }

    fn decode(self, payload: &[u8]) -> Result<Batch, DecodeError> {
        match self {
            Self::Vllm => vllm::decode(payload),
            Self::Sglang => sglang::decode(payload),
            Self::TrtLlm(media) => trtllm::push(payload, media),
        }
    }
}

/// What a model's config.json says; nothing when there is none.
fn media(model_dir: &Path) -> Result<Media> {
    let path = model_dir.join("config.json");
    if model_dir.as_os_str().is_empty() || !path.exists() {
        return Ok(Media::default());
    }
    let text = std::fs::read(&path).with_context(|| path.display().to_string())?;
    let config = serde_json::from_slice(&text).with_context(|| path.display().to_string())?;
    Ok(Media::of_config(&config))
}

/// One record of the input, whatever its form.
struct Capture {
    name: String,
    run: String,
    group: String,
    batches: Vec<Numbered>,
    /// Sequence number by which its run stands at the end of this record.
    order: Option<u64>,
}

/// One batch; an unreadable one is kept for the note about it.
struct Numbered {
    seq: u64,
    batch: Result<Batch, DecodeError>,
}

#[derive(Default, Serialize)]
struct Line {
    name: String,
    stored: Vec<String>,
    removed: Vec<String>,
    cleared: bool,
    notes: Vec<String>,
}

/// One engine: a publisher per data-parallel rank.
#[derive(Default)]
struct Run {
    ranks: HashMap<u32, Publisher>,
    next: u64,
}

/// Translates `input` to `out`; what concerns the whole capture goes to `notes`.
///
/// The events of vLLM and SGLang carry all that is needed; those of TensorRT-LLM are read with the config.json in `model_dir`, or with the
/// `image_token_id` of the capture. `model_dir` may be empty.
///
/// # Errors
/// An unknown engine, input of no known form, or a stream that cannot be read or written.
pub fn run(
    engine: &str,
    model_dir: &Path,
    mut input: impl BufRead,
    mut out: impl Write,
    mut notes: impl Write,
) -> Result<()> {
    let dialect = Dialect::new(engine, model_dir)?;
    let mut text = String::new();
    input.read_to_string(&mut text).context("the capture cannot be read as text")?;
    let captures = in_stream_order(input::read(&text, dialect)?);
    let mut runs = HashMap::<&str, Run>::new();
    for capture in &captures {
        let run = runs.entry(&capture.run).or_default();
        let line = run.translate(capture);
        serde_json::to_writer(&mut out, &line)?;
        writeln!(out)?;
    }
    writeln!(notes, "{} records of {} runs translated", captures.len(), runs.len())?;
    out.flush()?;
    Ok(())
}

/// Runs by first appearance, the records of each in the order in which the engine served them.
fn in_stream_order(mut captures: Vec<Capture>) -> Vec<Capture> {
    let mut runs = HashMap::<String, usize>::new();
    let mut last = HashMap::<(String, String), u64>::new();
    for capture in &mut captures {
        let count = runs.len();
        runs.entry(capture.run.clone()).or_insert(count);
        let group = (capture.run.clone(), capture.group.clone());
        match capture.order {
            Some(order) => _ = last.insert(group, order),
            None => capture.order = last.get(&group).copied(),
        }
    }
    // Those at the head of their group stand just before the first one that has events.
    let mut first = HashMap::<(String, String), u64>::new();
    for capture in captures.iter_mut().rev() {
        let group = (capture.run.clone(), capture.group.clone());
        match capture.batches.iter().map(|batch| batch.seq).min() {
            Some(seq) => _ = first.insert(group, seq),
            None if capture.order.is_none() => capture.order = first.get(&group).map(|seq| seq.saturating_sub(1)),
            None => {}
        }
    }
    captures.sort_by_key(|capture| (runs[&capture.run], capture.order.unwrap_or(u64::MAX)));
    captures
}

impl Run {
    fn translate(&mut self, capture: &Capture) -> Line {
        let mut line = Line { name: capture.name.clone(), ..Line::default() };
        let mut batches: Vec<_> = capture.batches.iter().collect();
        batches.sort_by_key(|batch| batch.seq);
        for Numbered { seq, batch } in batches {
            if *seq > self.next {
                line.notes.push(format!("batches {} to {} are not in the capture", self.next, seq - 1));
            } else if *seq < self.next {
                line.notes.push(format!("batch {seq} is there twice: the second is left out"));
                continue;
            }
            self.next = seq.saturating_add(1);
            match batch {
                Ok(batch) => self.take(batch, *seq, &mut line),
                Err(error) => line.notes.push(format!("batch {seq}: {error}")),
            }
        }
        line
    }

    fn take(&mut self, batch: &Batch, seq: u64, line: &mut Line) {
        let publisher = self.ranks.entry(batch.rank).or_insert_with(|| Publisher::new(Config::default()));
        for event in &batch.events {
            match event {
                KvEvent::Stored(stored) => {
                    publisher.apply(event);
                    let unknown = translate(publisher, &stored.hashes, stored.group, &mut line.stored);
                    note(
                        line,
                        unknown,
                        seq,
                        "stored blocks have no hash: a key that cannot be predicted, or an unknown ancestor",
                    );
                }
                KvEvent::Removed(removed) => {
                    let unknown = translate(publisher, &removed.hashes, removed.group, &mut line.removed);
                    note(line, unknown, seq, "removed blocks have no hash");
                    publisher.apply(event);
                }
                KvEvent::Cleared => {
                    publisher.apply(event);
                    line.cleared = true;
                }
            }
            // Nothing is published here: what would be sent is dropped.
            publisher.take_delta();
        }
        for (cause, text) in [
            (Skipped::UnknownType, "events are of an unknown type"),
            (Skipped::Malformed, "events are malformed"),
            (Skipped::Removal, "removals do not say of which blocks"),
            (Skipped::Sparse, "events do not say which tokens are in which block"),
        ] {
            note(line, batch.skipped.iter().filter(|skipped| **skipped == cause).count(), seq, text);
        }
    }
}

/// Appends the hashes that are known; returns how many are not.
fn translate(publisher: &Publisher, hashes: &[EngineHash], group: u32, out: &mut Vec<String>) -> usize {
    let known = hashes.iter().filter_map(|&hash| publisher.translate(hash, group));
    let before = out.len();
    out.extend(known.map(|hash: SequenceHash| hash.to_string()));
    hashes.len() - (out.len() - before)
}

fn note(line: &mut Line, count: usize, seq: u64, text: &str) {
    if count > 0 {
        line.notes.push(format!("batch {seq}: {count} {text}"));
    }
}
