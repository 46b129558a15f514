//! Scenarios of `tests/vectors/sglang/README.md`: steps with at most one frame each, in hex.

use anyhow::{Context, Result, ensure};
use serde_json::Value;

use super::input::seq_of;
use super::{Capture, Dialect, Numbered};

/// Appends a record per step. The scenario's number is one more than that of the last record's.
pub(super) fn read(scenario: &Value, dialect: Dialect, captures: &mut Vec<Capture>) -> Result<()> {
    let before = captures.last().and_then(|last| last.run.parse::<usize>().ok());
    let run = before.map_or(0, |number| number + 1).to_string();
    for (index, step) in scenario["steps"].as_array().into_iter().flatten().enumerate() {
        let batch = frame(&step["frame"], dialect).with_context(|| format!("step {index}"))?;
        let order = batch.as_ref().map(|batch| batch.seq);
        let batches = batch.into_iter().collect();
        captures.push(Capture {
            name: format!("{run}/{index}"),
            run: run.clone(),
            group: String::new(),
            batches,
            order,
        });
    }
    Ok(())
}

fn frame(frame: &Value, dialect: Dialect) -> Result<Option<Numbered>> {
    if frame.is_null() {
        return Ok(None);
    }
    let part = |name: &str| frame[name].as_str().map(hex).with_context(|| format!("a frame has `{name}`"))?;
    let payload = part("payload_hex")?;
    Ok(Some(Numbered { seq: seq_of(part("seq_hex")?)?, batch: dialect.decode(&payload) }))
}

fn hex(text: &str) -> Result<Vec<u8>> {
    ensure!(text.len().is_multiple_of(2) && text.is_ascii(), "a part of a frame is no hex");
    let digits = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).context("a part of a frame is no hex");
    (0..text.len()).step_by(2).map(digits).collect()
}
