//! vLLM's pages besides generation: models, event sources, health, development paths.

use super::error::ApiError;
use super::request::{self, Kind};
use super::sim::parameter;
use super::{Reply, full, json, metrics, with_type};
use crate::config::EngineKind;
use crate::engine::{Engine, Rank, lock};
use http::{Method, Response, StatusCode, request::Parts};
use serde_json::{Value, json};
use std::sync::Arc;

/// Pages that show the expanded prompt of a request.
const RENDER: &str = "/v1/chat/completions/render";
const TOKENIZE: &str = "/tokenize";

pub(super) fn shows_prompts(engine: &Engine, path: &str) -> bool {
    engine.config.engine_kind == EngineKind::Vllm && [RENDER, TOKENIZE].contains(&path)
}

/// Tokens of a chat, images expanded. `/tokenize` tells a plain prompt's too, and no places.
pub(super) async fn show_prompt(engine: &Engine, head: &Parts, body: Value) -> Reply {
    let path = head.uri.path();
    if engine.config.closed_paths.iter().any(|closed| closed == path) {
        return Err(ApiError::new(StatusCode::FORBIDDEN, "This page needs --enable-scale-out"));
    }
    let kind = if body.get("messages").is_some() { Kind::Chat } else { Kind::Text };
    let prepared = request::prepare(engine, kind, &head.headers, body).await?;
    if path == RENDER {
        return Ok(json(&prepared.rendered()));
    }
    let tokens = &prepared.prompts[0].tokens;
    let max_model_len = engine.config.max_model_len;
    Ok(json(&json!({"count": tokens.len(), "max_model_len": max_model_len, "tokens": tokens, "token_strs": null})))
}

pub(super) fn route(engine: &Engine, method: &Method, path: &str, query: &str) -> Reply {
    let get = method == Method::GET;
    let reply = match (get, path) {
        (_, "/health" | "/ping") => return Ok(Response::new(full(""))),
        (true, "/version") => json(&json!({"version": engine.config.version()})),
        (true, "/v1/models") => json(&models(engine)),
        (true, "/kv_event_sources") => json(&event_sources(engine)),
        (true, "/metrics") => with_type("text/plain; version=0.0.4; charset=utf-8", metrics::render(engine)),
        (true, "/is_sleeping") => json(
            &json!({"is_sleeping": engine.ranks.iter().all(|rank| rank.inspect(|scheduler| scheduler.is_asleep()))}),
        ),
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

/// By rank. Ports are those really bound; the host of `endpoint` is a star, as with vLLM's default.
fn event_sources(engine: &Engine) -> Value {
    let source = |rank: &Arc<Rank>| {
        let sources = &rank.sources;
        let port = sources.events.rsplit(':').next().unwrap_or_default();
        let source = json!({"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": format!("tcp://*:{port}"),
            "replay_endpoint": sources.replay, "buffer_steps": engine.config.buffer_steps, "hwm": 100_000,
            "max_queue_size": 100_000, "topic": sources.topic});
        (rank.index.to_string(), source)
    };
    Value::Object(engine.ranks.iter().map(source).collect())
}
