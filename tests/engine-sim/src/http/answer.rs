//! Answers to generation requests, whole or as server-sent events.

use super::error::ApiError;
use super::request::{Kind, Prepared, prepare};
use super::{Body, Reply, json, read_json};
use crate::config::EngineKind;
use crate::engine::{Answers, Engine, submit};
use crate::fault::Fault;
use crate::scheduler::Progress;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Response, StatusCode, header};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use serde_json::{Value, json};
use std::convert::Infallible;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

pub(super) async fn generate(engine: Arc<Engine>, kind: Kind, headers: &HeaderMap, body: Incoming) -> Reply {
    let body = read_json(&engine, body).await?;
    let place = engine.place(pinned_rank(&engine, headers, &body))?;
    if let Some(status) = engine.take_error(&place) {
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        return Err(ApiError::new(status, "Internal server error"));
    }
    let dies_after = engine.dies_of(&body.to_string());
    if dies_after == Some(0) {
        engine.fault(Fault::Die, None).await?;
        return Err(ApiError::engine_dead());
    }
    let prepared = prepare(&engine, kind, headers, body).await?;
    let answers = submit(place, prepared.tokens_max(), |output| prepared.jobs(output))?;
    let choices = (0..prepared.prompts.len() * prepared.n).map(|_| Choice::default()).collect();
    let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs());
    let stream = prepared.stream;
    let mut answering = Answering { engine, prepared, answers, choices, created, dies_after, ended: false };
    if stream {
        return answering.into_stream().await;
    }
    while answering.open() > 0 {
        let progress = answering.answers.progress.recv().await.ok_or_else(ApiError::engine_dead)?;
        answering.note(progress);
    }
    Ok(json(&answering.whole()))
}

/// The rank that the client asks for: by header, with SGLang also in the body. A header that is no number is passed
/// over.
fn pinned_rank(engine: &Engine, headers: &HeaderMap, body: &Value) -> Option<i64> {
    let header = headers.get("x-data-parallel-rank").and_then(|value| value.to_str().ok()?.trim().parse().ok());
    let routed = || body["routed_dp_rank"].as_i64().filter(|_| engine.config.engine_kind == EngineKind::Sglang);
    header.or_else(routed)
}

#[derive(Clone, Default)]
struct Choice {
    tokens: Vec<u32>,
    cached_tokens: usize,
    ended: bool,
}

struct Answering {
    engine: Arc<Engine>,
    prepared: Prepared,
    answers: Answers,
    choices: Vec<Choice>,
    created: u64,
    /// The process ends after this many tokens.
    dies_after: Option<usize>,
    /// The last event is out.
    ended: bool,
}

impl Answering {
    fn open(&self) -> usize {
        self.choices.iter().filter(|choice| !choice.ended).count()
    }

    fn note(&mut self, progress: Progress) {
        let choice = &mut self.choices[progress.index];
        choice.tokens.push(progress.token);
        choice.cached_tokens = progress.cached_tokens;
        choice.ended |= progress.last;
    }

    fn finish_reason(&self) -> &'static str {
        if self.prepared.limited { "length" } else { "stop" }
    }

    fn usage(&self) -> Value {
        let prompts = &self.prepared.prompts;
        let prompt: usize = prompts.iter().map(|prompt| prompt.tokens.len()).sum();
        let completion: usize = self.choices.iter().map(|choice| choice.tokens.len()).sum();
        // With several answers per prompt vLLM shows the hit of the last.
        let cached: usize =
            self.choices.iter().skip(self.prepared.n - 1).step_by(self.prepared.n).map(|c| c.cached_tokens).sum();
        let images: usize = prompts.iter().flat_map(|prompt| &prompt.media).map(|span| span.tokens).sum();
        if self.engine.config.engine_kind != EngineKind::Vllm {
            return json!({"prompt_tokens": prompt, "total_tokens": prompt + completion,
                "completion_tokens": completion, "prompt_tokens_details": {"cached_tokens": cached},
                "reasoning_tokens": 0});
        }
        let details = match self.prepared.kind {
            Kind::Chat => {
                let size = self.engine.config.block_size;
                let created = (prompt / size * size).saturating_sub(cached);
                let images = (images > 0).then(|| json!({"image": images}));
                json!({"cached_tokens": cached, "created_cache_tokens": created, "multimodal_tokens": images})
            }
            Kind::Text => json!({"cached_tokens": cached, "created_cache_tokens": null, "multimodal_tokens": null}),
        };
        json!({"prompt_tokens": prompt, "total_tokens": prompt + completion, "completion_tokens": completion,
            "prompt_tokens_details": details, "completion_tokens_details": null})
    }

    fn envelope(&self, object: &str, choices: Vec<Value>) -> Value {
        let prepared = &self.prepared;
        json!({"id": prepared.id, "object": object, "created": self.created, "model": prepared.model,
            "choices": choices})
    }

    fn whole(&self) -> Value {
        let ids = self.prepared.return_token_ids;
        let reason = self.finish_reason();
        let choice = |(index, choice): (usize, &Choice)| {
            let text: String = choice.tokens.iter().map(|token| self.engine.model.text_of(*token)).collect();
            let tokens = ids.then(|| choice.tokens.clone());
            let rest = json!({"index": index, "logprobs": null, "finish_reason": reason, "stop_reason": null,
                "token_ids": tokens});
            let mut out = rest;
            match self.prepared.kind {
                Kind::Chat => out["message"] = json!({"role": "assistant", "content": text, "refusal": null}),
                Kind::Text => {
                    out["text"] = text.into();
                    let prompt = &self.prepared.prompts[index / self.prepared.n];
                    out["prompt_token_ids"] = json!(ids.then_some(&prompt.tokens));
                }
            }
            out
        };
        let choices = self.choices.iter().enumerate().map(choice).collect();
        let object = if self.prepared.kind == Kind::Chat { "chat.completion" } else { "text_completion" };
        let mut out = self.envelope(object, choices);
        if self.prepared.kind == Kind::Chat {
            out["prompt_token_ids"] = json!(ids.then_some(&self.prepared.prompts[0].tokens));
        }
        out["usage"] = self.usage();
        out
    }

    /// Headers go out with the first token, so that an engine's failure before it has a status.
    async fn into_stream(mut self) -> Reply {
        let first = self.next_events().await.ok_or_else(ApiError::engine_dead)?;
        let rest = futures_util::stream::unfold((Some(first), self), |(first, mut answering)| async move {
            let events = match first {
                Some(events) => events,
                None => answering.next_events().await?,
            };
            Some((Ok::<_, Infallible>(Frame::data(events)), (None, answering)))
        });
        let body: Body = StreamBody::new(rest).boxed_unsync();
        let mut response = Response::new(body);
        let kind = HeaderValue::from_static("text/event-stream; charset=utf-8");
        response.headers_mut().insert(header::CONTENT_TYPE, kind);
        Ok(response)
    }

    /// Events for the next token; `None` when the stream is over (or, at its start, the engine is dead).
    async fn next_events(&mut self) -> Option<Bytes> {
        if self.ended {
            return None;
        }
        let Some(progress) = self.answers.progress.recv().await else {
            self.ended = true;
            let started = self.choices.iter().any(|choice| !choice.tokens.is_empty());
            let error =
                format!("data: {}\n\ndata: [DONE]\n\n", ApiError::engine_dead().body(self.engine.config.engine_kind));
            return started.then(|| error.into());
        };
        let mut out = String::new();
        let starts = self.choices[progress.index].tokens.is_empty();
        self.note(progress);
        if self.dies_after.is_some_and(|after| self.choices[0].tokens.len() > after) {
            self.engine.fault(Fault::Die, None).await.ok()?;
        }
        if starts && self.prepared.kind == Kind::Chat {
            push(&mut out, &self.role_event(progress.index));
        }
        push(&mut out, &self.token_event(progress, starts));
        if self.open() == 0 {
            self.ended = true;
            if self.prepared.include_usage {
                let mut event = self.envelope(self.chunk_object(), Vec::new());
                event["usage"] = self.usage();
                push(&mut out, &event);
            }
            out.push_str("data: [DONE]\n\n");
        }
        Some(out.into())
    }

    fn chunk_object(&self) -> &'static str {
        if self.prepared.kind == Kind::Chat { "chat.completion.chunk" } else { "text_completion" }
    }

    fn role_event(&self, index: usize) -> Value {
        let delta = json!({"role": "assistant", "content": ""});
        let choice = json!({"index": index, "delta": delta, "logprobs": null, "finish_reason": null});
        let mut event = self.envelope(self.chunk_object(), vec![choice]);
        let ids = self.prepared.return_token_ids.then_some(&self.prepared.prompts[0].tokens);
        event["prompt_token_ids"] = json!(ids);
        event
    }

    fn token_event(&self, progress: Progress, starts: bool) -> Value {
        let text = self.engine.model.text_of(progress.token);
        let reason = progress.last.then(|| self.finish_reason());
        let ids = self.prepared.return_token_ids;
        let mut choice = json!({"index": progress.index, "logprobs": null, "finish_reason": reason,
            "token_ids": ids.then_some([progress.token])});
        match self.prepared.kind {
            Kind::Chat => choice["delta"] = json!({"content": text}),
            Kind::Text => {
                choice["text"] = text.into();
                let prompt = &self.prepared.prompts[progress.index / self.prepared.n];
                choice["prompt_token_ids"] = json!((ids && starts).then_some(&prompt.tokens));
            }
        }
        self.envelope(self.chunk_object(), vec![choice])
    }
}

fn push(out: &mut String, event: &Value) {
    out.push_str("data: ");
    out.push_str(&event.to_string());
    out.push_str("\n\n");
}
