//! Finds out what a capture is made of: a JSON value per line, or one or more whole documents.

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::{Deserializer, Value};

use super::{Capture, Dialect, Numbered, samples, scenario};

/// What is read of a record. Requests and answers, which are most of it, are passed over.
#[derive(Deserialize)]
struct Record {
    name: String,
    run: Option<String>,
    group: Option<String>,
    frames: Option<Vec<Vec<String>>>,
}

pub(super) fn read(text: &str, dialect: Dialect) -> Result<Vec<Capture>> {
    let mut captures = Vec::new();
    let mut lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()).peekable();
    if lines.peek().is_some_and(|(_, line)| serde_json::from_str::<Value>(line).is_ok()) {
        for (index, line) in lines {
            let at = || format!("line {} of the capture", index + 1);
            let value = serde_json::from_str(line).with_context(at)?;
            take(value, dialect, &mut captures).with_context(at)?;
        }
    } else {
        for (index, value) in Deserializer::from_str(text).into_iter().enumerate() {
            let at = || format!("document {} of the capture", index + 1);
            take(value.with_context(at)?, dialect, &mut captures).with_context(at)?;
        }
    }
    Ok(captures)
}

fn take(value: Value, dialect: Dialect, captures: &mut Vec<Capture>) -> Result<()> {
    if value["steps"].is_array() {
        scenario::read(&value, dialect, captures)
    } else if let (true, Dialect::TrtLlm(media)) = (samples::are_in(&value), dialect) {
        samples::read(&value, media, captures)
    } else {
        captures.extend(record(value, dialect)?);
        Ok(())
    }
}

/// Replays, legacy encodings and the like share the format but have no frames, some of them no name: no record.
fn record(value: Value, dialect: Dialect) -> Result<Option<Capture>> {
    if !value.get("frames").is_some_and(Value::is_array) {
        return Ok(None);
    }
    let record: Record = serde_json::from_value(value)?;
    let frames = record.frames.unwrap_or_default();
    let batches = frames.iter().map(|frame| batch(frame, dialect)).collect::<Result<Vec<_>>>()?;
    let (run, group) = (record.run.unwrap_or_default(), record.group.unwrap_or_default());
    let parts = [run.as_str(), group.as_str(), record.name.as_str()];
    let name = parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("/");
    let order = batches.iter().map(|batch| batch.seq).max();
    Ok(Some(Capture { name, run, group, batches, order }))
}

/// Sequence number and payload: the last two parts, whatever comes before them.
fn batch(frame: &[String], dialect: Dialect) -> Result<Numbered> {
    let [.., seq, payload] = frame else { bail!("a frame has {} parts; [topic, seq, payload] expected", frame.len()) };
    let decode = |text: &str| base64_simd::STANDARD.decode_to_vec(text).context("a part of a frame is no base64");
    Ok(Numbered { seq: seq_of(decode(seq)?)?, batch: dialect.decode(&decode(payload)?) })
}

pub(super) fn seq_of(bytes: Vec<u8>) -> Result<u64> {
    let bytes = bytes.try_into().map_err(|seq: Vec<u8>| anyhow::anyhow!("seq has {} bytes; 8 expected", seq.len()))?;
    Ok(u64::from_be_bytes(bytes))
}
