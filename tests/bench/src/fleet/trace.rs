//! Public request traces (Mooncake's JSON lines): text, with the identity of every block of 512 tokens. Not part of this repository.

use std::collections::HashMap;
use std::path::Path;

use anyhow::Context as _;
use serde::Deserialize;

use super::random::Random;
use super::workload::{Prompt, Workload};

/// Tokens behind one hash id of the trace.
const TRACE_BLOCK: u32 = 512;
/// Tokens per KV block of the simulated engines.
const BLOCK: u32 = 128;
/// Longer prompts are cut here: one that fills an engine for ten seconds says nothing of routing.
const PROMPT_MAX: u32 = 32_768;
const OUTPUT_MAX: u32 = 96;
/// The traces' time stamps go in steps of this; requests are spread evenly over their step.
const STEP_MS: f64 = 3000.0;

#[derive(Debug, Deserialize)]
pub struct Line {
    /// Milliseconds since the start.
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    hash_ids: Vec<u64>,
}

/// # Errors
/// When the file cannot be read or a line is not of that form.
pub fn read(path: &Path) -> anyhow::Result<Vec<Line>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let lines = (1..).zip(text.lines()).map(|(number, line)| {
        serde_json::from_str(line).with_context(|| format!("{} line {number} is no trace line", path.display()))
    });
    lines.collect()
}

/// `count` requests in a row from a place that the seed picks; the trace's own gaps, so its bursts too.
///
/// The trace names no users: a request belongs to the session that first brought the second or a later one of its blocks (the
/// first is a prompt that all share).
pub fn sample(name: &'static str, lines: &[Line], count: usize, seed: u64) -> Workload {
    let count = count.min(lines.len());
    let first = Random::new(seed).below(lines.len() - count + 1);
    let lines = &lines[first..first + count];
    let span = lines.last().map_or(0.0, |last| last.timestamp) - lines.first().map_or(0.0, |first| first.timestamp);
    let gap = (span / count as f64).max(1e-3);
    let mut random = Random::new(seed ^ 0x7261_6365);
    let (mut sessions, mut requests) = (HashMap::new(), Vec::new());
    for (number, line) in (0_u64..).zip(lines) {
        let tokens = line.input_length.min(PROMPT_MAX);
        let mut prompt = Prompt::default();
        let mut rest = tokens;
        for id in &line.hash_ids {
            for part in 0..TRACE_BLOCK / BLOCK {
                let take = rest.min(BLOCK);
                prompt.run((id << 8) | u64::from(part), take);
                rest -= take;
            }
        }
        let own = line.hash_ids.get(1..).unwrap_or_default();
        let session = own.iter().rev().find_map(|id| sessions.get(id).copied()).unwrap_or(number);
        own.iter().for_each(|id| {
            sessions.entry(*id).or_insert(session);
        });
        let mut request = prompt.request(BLOCK, session, line.output_length.clamp(1, OUTPUT_MAX));
        request.at = (line.timestamp - lines[0].timestamp + random.unit() * STEP_MS) / gap;
        requests.push(request);
    }
    requests.sort_by(|a, b| a.at.total_cmp(&b.at));
    Workload { name, block_tokens: BLOCK, requests }
}
