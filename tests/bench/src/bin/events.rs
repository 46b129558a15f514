//! What one engine's events cost a sidecar: decode, publish and delta of the steps that make most of them, on one thread.
//! `tests/bench.sh events` builds everything and starts this.
//!
//! Decoding stores a block per request now and then, and a full cache gives one up for each: so a step is one store of one block and
//! one removal of the oldest, in vLLM's map form, in batches of 8 events. Deltas are taken every 10 ms of a stream of 20 000 events/s.

use std::time::Instant;

use anyhow::{Context, ensure};
use fovea_kv::vllm;
use fovea_sidecar_core::publish::{Config, Publisher};
use serde_json::json;

/// Events in all, and in one batch.
const EVENTS: u64 = 1_000_000;
const BATCH: u64 = 8;
/// Blocks that the engine holds, and tokens in one.
const HELD: u64 = 50_000;
const BLOCK: u64 = 16;
/// Blocks of one request, one after another.
const CHAIN: u64 = 64;
const RATE: u64 = 20_000;
/// Batches in 10 ms of that stream.
const DELTA_BATCHES: usize = (RATE / 100 / BATCH) as usize;

fn main() -> anyhow::Result<()> {
    let payloads: Vec<Vec<u8>> = (0..EVENTS / BATCH).map(batch).collect::<anyhow::Result<_>>()?;
    let mut publisher = Publisher::new(Config::default());
    let mut sent = 0;
    let began = Instant::now();
    for (number, payload) in (1_usize..).zip(&payloads) {
        let batch = vllm::decode(payload)?;
        batch.events.iter().for_each(|event| publisher.apply(event));
        if number.is_multiple_of(DELTA_BATCHES) {
            let delta = publisher.take_delta();
            sent += delta.levels.iter().map(|level| level.stored.len() + level.removed.len()).sum::<usize>();
        }
    }
    let seconds = began.elapsed().as_secs_f64();
    ensure!(publisher.gauges().published[0] as u64 <= HELD, "more is published than held");
    ensure!(sent > 0, "nothing was published");
    let per_second = EVENTS as f64 / seconds;
    let rounded = |value: f64, digits: f64| (value * digits).round() / digits;
    println!(
        "{}",
        json!({
            "events_per_s": per_second.round(),
            "ns_per_event": (1e9 / per_second).round(),
            "core_share_at_20k": rounded(RATE as f64 / per_second, 1000.0),
            "resident_mb": resident_mb()?,
        })
    );
    Ok(())
}

/// Batch `number`: stores of the next blocks, each followed by the removal of the block stored `HELD` before it.
fn batch(number: u64) -> anyhow::Result<Vec<u8>> {
    let mut out = Vec::new();
    rmp::encode::write_array_len(&mut out, 3)?;
    rmp::encode::write_f64(&mut out, 1.7e9)?;
    rmp::encode::write_array_len(&mut out, u32::try_from(BATCH)?)?;
    for block in number * BATCH / 2..(number + 1) * BATCH / 2 {
        stored(&mut out, block)?;
        removed(&mut out, block.wrapping_sub(HELD))?;
    }
    rmp::encode::write_uint(&mut out, 0)?;
    Ok(out)
}

fn stored(out: &mut Vec<u8>, block: u64) -> anyhow::Result<()> {
    rmp::encode::write_map_len(out, 8)?;
    text(out, "type", "BlockStored")?;
    hashes(out, block)?;
    rmp::encode::write_str(out, "parent_block_hash")?;
    if block.is_multiple_of(CHAIN) {
        rmp::encode::write_nil(out)?
    } else {
        _ = rmp::encode::write_uint(out, hash(block - 1))?
    }
    rmp::encode::write_str(out, "token_ids")?;
    rmp::encode::write_array_len(out, u32::try_from(BLOCK)?)?;
    for token in 0..BLOCK {
        rmp::encode::write_uint(out, (block * BLOCK + token) % 150_000)?;
    }
    rmp::encode::write_str(out, "block_size")?;
    rmp::encode::write_uint(out, BLOCK)?;
    rmp::encode::write_str(out, "lora_id")?;
    rmp::encode::write_nil(out)?;
    text(out, "medium", "GPU")?;
    rmp::encode::write_str(out, "lora_name")?;
    Ok(rmp::encode::write_nil(out)?)
}

fn removed(out: &mut Vec<u8>, block: u64) -> anyhow::Result<()> {
    rmp::encode::write_map_len(out, 3)?;
    text(out, "type", "BlockRemoved")?;
    hashes(out, block)?;
    text(out, "medium", "GPU")
}

fn text(out: &mut Vec<u8>, key: &str, value: &str) -> anyhow::Result<()> {
    rmp::encode::write_str(out, key)?;
    Ok(rmp::encode::write_str(out, value)?)
}

fn hashes(out: &mut Vec<u8>, block: u64) -> anyhow::Result<()> {
    rmp::encode::write_str(out, "block_hashes")?;
    rmp::encode::write_array_len(out, 1)?;
    rmp::encode::write_uint(out, hash(block))?;
    Ok(())
}

/// Spread like a digest's low bits.
fn hash(block: u64) -> u64 {
    block.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn resident_mb() -> anyhow::Result<u64> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("status has VmRSS")?;
    Ok(line.trim().trim_end_matches("kB").trim().parse::<u64>()?.div_ceil(1024))
}
