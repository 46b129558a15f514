//! SGLang's pages besides generation. Names and shapes as read in its source (0.5.9 to 0.5.23); no server of it was asked.

use super::error::ApiError;
use super::metrics::{Figures, figures, float};
use super::{Reply, full, json, with_type};
use crate::engine::Engine;
use http::{Method, Response, StatusCode};
use serde_json::{Value, json};
use std::fmt::Write;

pub(super) fn route(engine: &Engine, method: &Method, path: &str) -> Reply {
    let get = method == Method::GET;
    let reply = match (get, path) {
        (_, "/health" | "/health_generate" | "/ready") => return Ok(Response::new(full(""))),
        (true, "/server_info" | "/get_server_info") => json(&server_info(engine)),
        (true, "/model_info" | "/get_model_info") => json(&model_info(engine)),
        (true, "/v1/models") => json(&models(engine)),
        (true, "/v1/loads") => json(&loads(engine)),
        (true, "/metrics") => with_type("text/plain; version=0.0.4; charset=utf-8", metrics(engine)),
        (_, "/flush_cache") => return flush(engine),
        _ => return Err(ApiError::new(StatusCode::NOT_FOUND, "Not Found")),
    };
    Ok(reply)
}

fn flush(engine: &Engine) -> Reply {
    let text = "Cache flushed.\nPlease check backend logs for more details. (When there are running or waiting \
                requests, the operation will not be performed.)\n";
    let mut response = with_type("text/plain; charset=utf-8", text.to_owned());
    if !engine.reset_prefix_cache() {
        *response.status_mut() = StatusCode::BAD_REQUEST;
    }
    Ok(response)
}

/// Port of `tcp://host:port`.
fn port(endpoint: &str) -> u16 {
    endpoint.rsplit(':').next().and_then(|port| port.parse().ok()).unwrap_or(0)
}

/// Resolved arguments, and where the events of all ranks are.
fn server_info(engine: &Engine) -> Value {
    let (config, sources) = (&engine.config, &engine.ranks[0].sources);
    let (events, replay) = (port(&sources.events), port(&sources.replay));
    let line = json!({"publisher": "zmq", "endpoint": format!("tcp://*:{events}"),
        "replay_endpoint": format!("tcp://*:{replay}"), "topic": sources.topic, "buffer_steps": config.buffer_steps});
    let states: Vec<_> = figures(engine)
        .iter()
        .map(|rank| {
            json!({"last_gen_throughput": 0.0, "effective_max_running_requests_per_dp": config.max_running,
            "max_total_num_tokens": rank.usable * config.block_size})
        })
        .collect();
    json!({
        "model_path": config.engine_model,
        "tokenizer_path": config.engine_model,
        "served_model_name": config.model_name,
        "context_length": config.max_model_len,
        "page_size": config.block_size,
        "dp_size": engine.ranks.len(),
        "max_running_requests": config.max_running,
        "chunked_prefill_size": config.step_tokens,
        "enable_cache_report": true,
        "enable_metrics": true,
        "kv_events_config": line.to_string(),
        "max_total_num_tokens": config.blocks.saturating_sub(1) * config.block_size,
        "internal_states": states,
        "version": config.version(),
        "kv_events": {
            "publisher": "zmq",
            "endpoint_host": "*",
            "endpoint_port_base": events,
            "replay_endpoint_port_base": replay,
            "topic": sources.topic,
            "block_size": config.block_size,
            "dp_size": engine.ranks.len(),
        },
    })
}

fn model_info(engine: &Engine) -> Value {
    let config = &engine.config;
    json!({
        "model_path": config.engine_model,
        "served_model_name": config.model_name,
        "tokenizer_path": config.engine_model,
        "is_generation": true,
        "preferred_sampling_params": null,
        "weight_version": "default",
        "model_type": engine.model.model_type,
        "architectures": engine.model.architectures,
        "has_image_understanding": true,
        "has_audio_understanding": false,
        "disaggregation_mode": "null",
        "reasoning_parser": null,
        "tool_call_parser": null,
    })
}

/// `root` is the served name, not the path.
fn models(engine: &Engine) -> Value {
    let config = &engine.config;
    json!({"object": "list", "data": [{"id": config.model_name, "object": "model", "created": 0,
        "owned_by": "sglang", "root": config.model_name, "parent": null, "max_model_len": config.max_model_len}]})
}

/// Share of the KV memory that running requests use.
fn usage(rank: &Figures) -> f64 {
    float(rank.in_use as u64) / float(rank.usable as u64)
}

fn loads(engine: &Engine) -> Value {
    let page = engine.config.block_size;
    let load = |(rank, f): (usize, &Figures)| {
        json!({"dp_rank": rank, "num_running_reqs": f.counts.running, "num_waiting_reqs": f.counts.waiting,
            "num_used_tokens": f.in_use * page, "max_total_num_tokens": f.usable * page, "token_usage": usage(f),
            "cache_hit_rate": hit_rate(f), "max_running_requests": engine.config.max_running})
    };
    let loads: Vec<_> = figures(engine).iter().enumerate().map(load).collect();
    json!({"version": engine.config.version(), "dp_rank_count": loads.len(), "loads": loads})
}

/// Of all requests since start; SGLang's is of the last batch.
fn hit_rate(rank: &Figures) -> f64 {
    float(rank.counts.cached_tokens) / float(rank.counts.prompt_tokens.max(1))
}

fn metrics(engine: &Engine) -> String {
    let (figures, model) = (figures(engine), &engine.config.model_name);
    let page = engine.config.block_size;
    let tokens = |pages: usize| float((pages * page) as u64);
    let mut out = String::new();
    let mut family = |name: &str, kind: &str, value: &dyn Fn(&Figures) -> f64| {
        // Writing to a String cannot fail.
        let _ = writeln!(out, "# HELP sglang:{name} SGLang's {name}.\n# TYPE sglang:{name} {kind}");
        for (rank, figures) in figures.iter().enumerate() {
            let value = value(figures);
            let _ = writeln!(
                out,
                "sglang:{name}{{dp_rank=\"{rank}\",engine_type=\"unified\",model_name=\"{model}\",pp_rank=\"0\",\
                 tp_rank=\"0\"}} {value:?}"
            );
        }
    };
    family("num_running_reqs", "gauge", &|f| float(f.counts.running as u64));
    family("num_queue_reqs", "gauge", &|f| float(f.counts.waiting as u64));
    family("token_usage", "gauge", &usage);
    family("num_used_tokens", "gauge", &|f| tokens(f.in_use));
    family("max_total_num_tokens", "gauge", &|f| tokens(f.usable));
    family("page_size", "gauge", &|_| tokens(1));
    family("cache_hit_rate", "gauge", &hit_rate);
    family("num_requests_total", "counter", &|f| float(f.counts.served));
    family("num_retracted_reqs_total", "counter", &|f| float(f.counts.preemptions));
    family("prompt_tokens_total", "counter", &|f| float(f.counts.prompt_tokens));
    family("cached_tokens_total", "counter", &|f| float(f.counts.cached_tokens));
    family("generation_tokens_total", "counter", &|f| float(f.counts.generated_tokens));
    out
}
