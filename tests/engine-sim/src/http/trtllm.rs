//! TensorRT-LLM's pages besides generation. Names and shapes as read in its source (1.3); no server of it was asked.

use super::error::ApiError;
use super::metrics::{Figures, figures, float};
use super::{Reply, full, json, with_type};
use crate::engine::Engine;
use http::{Method, Response, StatusCode};
use serde_json::{Value, json};
use std::fmt::Write;
use std::sync::atomic::Ordering;

/// Iterations that `/metrics` keeps for the next poll.
const ITERATIONS_MAX: u64 = 1000;

pub(super) fn route(engine: &Engine, method: &Method, path: &str) -> Reply {
    let get = method == Method::GET;
    let reply = match (get, path) {
        (true, "/health" | "/health_generate") => return Ok(Response::new(full(""))),
        (true, "/version") => json(&json!({"version": engine.config.version()})),
        (true, "/v1/models") => json(&models(engine)),
        (true, "/server_info") => json(&json!({"disaggregated_params": null})),
        (false, "/kv_cache_events") => json(&engine.pull.drain().into()),
        (true, "/metrics") => json(&iterations(engine)),
        (true, "/prometheus/metrics") => with_type("text/plain; version=0.0.4; charset=utf-8", prometheus(engine)),
        _ => return Err(ApiError::new(StatusCode::NOT_FOUND, "Not Found")),
    };
    Ok(reply)
}

fn models(engine: &Engine) -> Value {
    json!({"object": "list", "data": [{"id": engine.config.model_name, "object": "model", "created": 0,
        "owned_by": "tensorrt_llm"}]})
}

/// All ranks as one.
fn sum(engine: &Engine) -> Figures {
    let mut ranks = figures(engine).into_iter();
    let mut sum = ranks.next().unwrap_or_default();
    for rank in ranks {
        sum.counts.add(&rank.counts);
        sum.in_use += rank.in_use;
        sum.usable += rank.usable;
    }
    sum
}

fn hit_rate(rank: &Figures) -> f64 {
    float(rank.counts.cached_tokens) / float(rank.counts.prompt_tokens.max(1))
}

/// One item per iteration since the last poll, all with the figures of this moment; they are gone then.
fn iterations(engine: &Engine) -> Value {
    let (sum, config) = (sum(engine), &engine.config);
    let last = engine.polled_steps.swap(sum.counts.steps, Ordering::Relaxed);
    let first = last.max(sum.counts.steps.saturating_sub(ITERATIONS_MAX));
    let kv = json!({"cacheHitRate": hit_rate(&sum), "freeNumBlocks": sum.usable - sum.in_use,
        "maxNumBlocks": sum.usable, "tokensPerBlock": config.block_size, "usedNumBlocks": sum.in_use});
    let item = |iter: u64| {
        json!({"iter": iter + 1, "numActiveRequests": sum.counts.running, "numQueuedRequests": sum.counts.waiting,
            "maxNumActiveRequests": config.max_running, "kvCacheStats": kv})
    };
    (first..sum.counts.steps).map(item).collect()
}

fn prometheus(engine: &Engine) -> String {
    let (sum, config) = (sum(engine), &engine.config);
    let blocks = |n: usize| float(n as u64);
    let rows = [
        ("num_requests_running", blocks(sum.counts.running)),
        ("num_requests_waiting", blocks(sum.counts.waiting)),
        ("kv_cache_utilization", blocks(sum.in_use) / blocks(sum.usable)),
        ("kv_cache_hit_rate", hit_rate(&sum)),
        ("kv_cache_used_blocks", blocks(sum.in_use)),
        ("kv_cache_max_blocks", blocks(sum.usable)),
        ("kv_cache_tokens_per_block", blocks(config.block_size)),
    ];
    let mut out = String::new();
    for (name, value) in rows {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "# HELP trtllm_{name} {name}\n# TYPE trtllm_{name} gauge");
        let _ = writeln!(out, "trtllm_{name}{{model_name=\"{}\"}} {value:?}", config.model_name);
    }
    out
}
