//! `fovea-sidecar decode`: a capture of an engine's events, translated to our hashes by the decoder and publisher that production uses.
//!
//! Reads the JSON lines of `tests/vectors/vllm/README.md` and writes one line per record that has `frames`:
//! `{"name", "stored", "removed", "cleared", "notes"}`. `name` is `run/group/name`, as far as the record has them; `stored` are the
//! sequence hashes that its events stored, in order, announced again or not; `removed` likewise, one entry per copy.
//!
//! Each run is an engine of its own and its state goes on from record to record. Its records are taken, and written, in order of their
//! sequence numbers, however they are ordered in the input. One that caused no event stands after the one before it in its group.

use std::collections::HashMap;
use std::io::{BufRead, Write};
use std::path::Path;

use anyhow::{Context, Result, bail, ensure};
use fovea_kv::event::{Batch, KvEvent, Skipped};
use fovea_kv::{EngineHash, SequenceHash, vllm};
use fovea_sidecar_core::publish::{Config, Publisher};
use serde::{Deserialize, Serialize};

/// What is read of a record. Requests and answers, which are most of it, are passed over.
#[derive(Deserialize)]
struct Record {
    name: String,
    run: Option<String>,
    group: Option<String>,
    frames: Option<Vec<Vec<String>>>,
}

struct Capture {
    name: String,
    run: String,
    group: String,
    batches: Vec<(u64, Vec<u8>)>,
    /// Sequence number by which its run stands at the end of this record.
    order: Option<u64>,
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
/// vLLM's events carry token ids, media ids and salts, so that nothing of `model_dir` is needed: it is there for engines whose events do not.
///
/// # Errors
/// Another engine than `vllm`, a line that is no record, or a stream that cannot be read or written.
pub fn run(
    engine: &str,
    _model_dir: &Path,
    input: impl BufRead,
    mut out: impl Write,
    mut notes: impl Write,
) -> Result<()> {
    ensure!(engine == "vllm", "engine `{engine}` is not supported: give --engine vllm");
    let captures = in_stream_order(read(input)?);
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

fn read(input: impl BufRead) -> Result<Vec<Capture>> {
    let mut captures = Vec::new();
    for (index, line) in input.lines().enumerate() {
        let line = line?;
        if line.trim().is_empty() {
            continue;
        }
        let at = || format!("line {} of the capture", index + 1);
        // Replays, legacy encodings and the like share the format but have no frames, some of them no name.
        let value: serde_json::Value = serde_json::from_str(&line).with_context(at)?;
        if !value.get("frames").is_some_and(serde_json::Value::is_array) {
            continue;
        }
        let record: Record = serde_json::from_value(value).with_context(at)?;
        let batches = record.frames.unwrap_or_default().iter().map(|frame| batch(frame)).collect::<Result<Vec<_>>>();
        let batches = batches.with_context(at)?;
        let (run, group) = (record.run.unwrap_or_default(), record.group.unwrap_or_default());
        let parts = [run.as_str(), group.as_str(), record.name.as_str()];
        let name = parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("/");
        let order = batches.iter().map(|&(seq, _)| seq).max();
        captures.push(Capture { name, run, group, batches, order });
    }
    Ok(captures)
}

/// Sequence number and payload: the last two parts, whatever comes before them.
fn batch(frame: &[String]) -> Result<(u64, Vec<u8>)> {
    let [.., seq, payload] = frame else { bail!("a frame has {} parts; [topic, seq, payload] expected", frame.len()) };
    let decode = |text: &str| base64_simd::STANDARD.decode_to_vec(text).context("a part of a frame is no base64");
    let seq =
        decode(seq)?.try_into().map_err(|seq: Vec<u8>| anyhow::anyhow!("seq has {} bytes; 8 expected", seq.len()))?;
    Ok((u64::from_be_bytes(seq), decode(payload)?))
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
        match capture.batches.iter().map(|&(seq, _)| seq).min() {
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
        batches.sort_by_key(|(seq, _)| *seq);
        for (seq, payload) in batches {
            if *seq > self.next {
                line.notes.push(format!("batches {} to {} are not in the capture", self.next, seq - 1));
            } else if *seq < self.next {
                line.notes.push(format!("batch {seq} is there twice: the second is left out"));
                continue;
            }
            self.next = seq.saturating_add(1);
            match vllm::decode(payload) {
                Ok(batch) => self.take(batch, *seq, &mut line),
                Err(error) => line.notes.push(format!("batch {seq}: {error}")),
            }
        }
        line
    }

    fn take(&mut self, batch: Batch, seq: u64, line: &mut Line) {
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

#[cfg(test)]
mod tests {
    use std::collections::HashSet;
    use std::io::Cursor;

    use serde_json::Value;

    use super::*;

    const VECTORS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/vllm");

    /// All captures, one file after another, in the order of their names: not the order of the stream.
    fn translated() -> Vec<Value> {
        let mut files: Vec<_> = std::fs::read_dir(VECTORS).unwrap().map(|file| file.unwrap().path()).collect();
        files.retain(|file| file.extension().is_some_and(|extension| extension == "jsonl"));
        files.sort();
        let input: String = files.iter().map(|file| std::fs::read_to_string(file).unwrap()).collect();
        let mut out = Vec::new();
        run("vllm", Path::new(VECTORS), Cursor::new(input), &mut out, std::io::sink()).unwrap();
        String::from_utf8(out).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    #[test]
    fn every_golden_hash_is_stored_up_to_its_request() {
        let golden: HashMap<String, Vec<String>> = serde_json::from_str(
            &std::fs::read_to_string(Path::new(VECTORS).join("golden_sequence_hashes.json")).unwrap(),
        )
        .unwrap();
        let mut stored = HashMap::<String, HashSet<String>>::new();
        let mut exact = 0;
        for line in translated() {
            let name = line["name"].as_str().unwrap();
            let run = stored.entry(name.split('/').next().unwrap().to_owned()).or_default();
            run.extend(line["stored"].as_array().unwrap().iter().map(|hash| hash.as_str().unwrap().to_owned()));
            if let Some(hashes) = golden.get(name) {
                assert!(hashes.iter().all(|hash| run.contains(hash)), "{name}");
                exact += 1;
            }
        }
        assert_eq!((exact, golden.len()), (121, 121));
    }

    #[test]
    fn clears_removals_and_what_cannot_be_told_are_reported() {
        let lines = translated();
        let find = |name: &str| lines.iter().find(|line| line["name"] == name).unwrap();
        assert_eq!(find("pool/reset/after_reset")["cleared"], true);
        assert_eq!(find("pool/reset/reset_prefix_cache")["stored"], Value::Array(Vec::new()));
        assert!(lines.iter().map(|line| line["removed"].as_array().unwrap().len()).sum::<usize>() > 100);
        let embeds = lines.iter().filter(|line| line["name"].as_str().unwrap().contains("prompt_embeds"));
        assert!(embeds.map(|line| line["notes"].as_array().unwrap().len()).sum::<usize>() > 0);
        let gaps = lines.iter().filter(|line| line["notes"].to_string().contains("not in the capture"));
        assert_eq!(gaps.count(), 0);
    }

    #[test]
    fn a_line_that_is_no_record_is_named() {
        let error = |input: &str| {
            format!(
                "{:#}",
                run("vllm", Path::new(""), Cursor::new(input.to_owned()), std::io::sink(), std::io::sink())
                    .unwrap_err()
            )
        };
        assert!(error("{}\n{").contains("line 2 of the capture"));
        assert!(error(r#"{"name":"a","frames":[["!"]]}"#).contains("[topic, seq, payload]"));
        assert!(run("sglang", Path::new(""), Cursor::new(""), std::io::sink(), std::io::sink()).is_err());
    }
}
