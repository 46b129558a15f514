//! Everything that is not generation: models, event sources, health, development paths, `/sim/state`.

use super::error::ApiError;
use super::{Reply, full, json, metrics, with_type};
use crate::engine::{Engine, State, lock};
use http::{Method, Response, StatusCode};
use serde_json::{Value, json};
use std::time::Duration;

/// The engine version that we mirror.
const VERSION: &str = "0.32.0";
/// Longest wait of `/sim/state`.
const STATE_WAIT_MAX: Duration = Duration::from_secs(30);

pub(super) fn route(engine: &Engine, method: &Method, path: &str, query: &str) -> Reply {
    let get = method == Method::GET;
    let reply = match (get, path) {
        (_, "/health" | "/ping") => return Ok(Response::new(full(""))),
        (true, "/version") => json(&json!({"version": VERSION})),
        (true, "/v1/models") => json(&models(engine)),
        (true, "/kv_event_sources") => json(&event_sources(engine)),
        (true, "/metrics") => with_type("text/plain; version=0.0.4; charset=utf-8", metrics::render(engine)),
        (true, "/is_sleeping") => json(&json!({"is_sleeping": engine.inspect(|scheduler| scheduler.is_asleep())})),
        (false, "/reset_prefix_cache") => json(&json!({"success": engine.reset_prefix_cache()})),
        (false, "/reset_mm_cache") => {
            lock(&engine.media).clear();
            return Ok(Response::new(full("")));
        }
        (false, "/sleep") => {
            engine.set_asleep(true);
            let level = parameter(query, "level").unwrap_or(1);
            json(&json!({"status": "sleeping", "level": level}))
        }
        (false, "/wake_up") => {
            engine.set_asleep(false);
            json(&json!({"status": "awake", "tags": null}))
        }
        _ => return Err(ApiError::new(StatusCode::NOT_FOUND, "Not Found")),
    };
    Ok(reply)
}

fn models(engine: &Engine) -> Value {
    let config = &engine.config;
    let card = |id: &str, root: &str, parent: Option<&str>, max_model_len: Option<usize>| {
        json!({"id": id, "object": "model", "created": 0, "owned_by": "vllm", "root": root, "parent": parent,
            "max_model_len": max_model_len})
    };
    let mut data = vec![card(&config.model_name, &config.engine_model, None, Some(config.max_model_len))];
    data.extend(config.loras.iter().map(|(name, path)| card(name, path, Some(&config.model_name), None)));
    json!({"object": "list", "data": data})
}

/// Ports are those really bound; the host of `endpoint` is a star, as with vLLM's default.
fn event_sources(engine: &Engine) -> Value {
    let sources = &engine.sources;
    let port = sources.events.rsplit(':').next().unwrap_or_default();
    json!({"0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": format!("tcp://*:{port}"),
        "replay_endpoint": sources.replay, "buffer_steps": engine.config.buffer_steps, "hwm": 100_000,
        "max_queue_size": 100_000, "topic": sources.topic}})
}

fn parameter(query: &str, name: &str) -> Option<u64> {
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs.filter(|(key, _)| *key == name).find_map(|(_, value)| value.parse().ok())
}

/// The state; with `?served=3&aborted=1…` once all these have been reached.
pub(super) async fn state(engine: &Engine, query: &str) -> Reply {
    let reached = |state: &State| {
        let counts = &state.counts;
        let small = |n: usize| n as u64;
        let values = [
            ("served", counts.served),
            ("aborted", counts.aborted),
            ("running", small(counts.running)),
            ("waiting", small(counts.waiting)),
            ("images_encoded", counts.images_encoded),
            ("generated_tokens", counts.generated_tokens),
            ("subscriptions", state.subscriptions),
            ("restarts", state.restarts),
            ("next_seq", state.next_seq),
        ];
        values.iter().all(|(name, value)| parameter(query, name).is_none_or(|least| *value >= least))
    };
    let state = tokio::time::timeout(STATE_WAIT_MAX, engine.wait_for(reached)).await;
    let state = state.map_err(|_| ApiError::new(StatusCode::REQUEST_TIMEOUT, format!("not reached: {query}")))?;
    Ok(json(&serde_json::to_value(state).map_err(|error| ApiError::bad(error.to_string()))?))
}
