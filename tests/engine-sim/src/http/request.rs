//! A generation request, checked and turned into prompts.

use super::error::ApiError;
use crate::blocks::{Lora, Sequence};
use crate::config::EngineKind;
use crate::engine::{Engine, lock};
use crate::prompt::{Attachment, Prompt, PromptError, Resolved, decode_data_url};
use crate::scheduler::{Job, Progress};
use bytes::Bytes;
use http::{HeaderMap, StatusCode};
use http_body_util::{BodyExt, Empty, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use serde_json::{Map, Value, json};
use std::time::Duration;
use tokio::sync::mpsc;

/// Which API.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    Chat,
    Text,
}

/// All that answering needs.
pub(super) struct Prepared {
    pub(super) kind: Kind,
    pub(super) id: String,
    pub(super) model: String,
    pub(super) prompts: Vec<Prompt>,
    /// Answers per prompt.
    pub(super) n: usize,
    /// Tokens per answer.
    pub(super) output_tokens: usize,
    /// The request named a limit, so an answer ends by length.
    pub(super) limited: bool,
    pub(super) stream: bool,
    pub(super) include_usage: bool,
    pub(super) return_token_ids: bool,
    template: Sequence,
    report_hits: bool,
}

/// Answers asked for in one request.
const ANSWERS_MAX: usize = 128;
/// Longest wait for a picture by URL.
const FETCH_MAX: Duration = Duration::from_secs(5);

pub(super) async fn prepare(
    engine: &Engine,
    kind: Kind,
    headers: &HeaderMap,
    body: Value,
) -> Result<Prepared, ApiError> {
    let Value::Object(body) = body else { return Err(ApiError::bad("the body must be a JSON object")) };
    let (model, lora) = find_model(engine, &body)?;
    let vllm = engine.config.engine_kind == EngineKind::Vllm;
    for field in ["mm_processor_kwargs", "media_io_kwargs"] {
        if vllm && body.get(field).is_some_and(|value| !value.is_null()) {
            let message = format!("Per-request {field} are disabled by default. (parameter={field})");
            return Err(ApiError::bad(message));
        }
    }
    let prompts = match kind {
        Kind::Chat => vec![chat_prompt(engine, &body).await?],
        Kind::Text => text_prompts(engine, &body)?,
    };
    let text = |field: &str| body.get(field).and_then(Value::as_str).map(str::to_owned);
    let flag = |value: &Value| value.as_bool().unwrap_or(false);
    let n = number(&body, "n")?.unwrap_or(1);
    if n == 0 || n.saturating_mul(prompts.len()) > ANSWERS_MAX {
        return Err(ApiError::bad(format!("n must be between 1 and {ANSWERS_MAX} answers in all")).with_param("n"));
    }
    let limit = match kind {
        Kind::Chat => number(&body, "max_completion_tokens")?.or(number(&body, "max_tokens")?),
        Kind::Text => Some(number(&body, "max_tokens")?.unwrap_or(16)),
    };
    let output_tokens = output_tokens(engine, &prompts, limit)?;
    let mut template = Sequence::new(lora, text("cache_salt"), text("session_id"));
    template.extra_key = text("extra_key");
    let object = |field: &str| body.get(field).cloned().unwrap_or(Value::Null);
    Ok(Prepared {
        kind,
        id: id(engine, kind, headers),
        model,
        prompts,
        n,
        output_tokens,
        limited: limit.is_some(),
        stream: flag(&object("stream")),
        include_usage: flag(&object("stream_options")["include_usage"]),
        return_token_ids: flag(&object("return_token_ids")),
        report_hits: object("vllm_xargs")["kv_cache_report_mode"] == "full",
        template,
    })
}

impl Prepared {
    /// The jobs, one per answer, prompts in order.
    pub(super) fn jobs(&self, output: &mpsc::Sender<Progress>) -> Vec<Job> {
        let indices = 0..self.prompts.len() * self.n;
        let job = |index: usize| {
            let prompt = &self.prompts[index / self.n];
            let mut sequence = self.template.clone();
            sequence.tokens.clone_from(&prompt.tokens);
            sequence.media.clone_from(&prompt.media);
            let seed = seed(&sequence, index % self.n);
            let (output_tokens, output) = (self.output_tokens, output.clone());
            Job { sequence, output_tokens, seed, report_hits: self.report_hits, index, output }
        };
        indices.map(job).collect()
    }

    /// Tokens of all answers.
    pub(super) fn tokens_max(&self) -> usize {
        self.prompts.len() * self.n * self.output_tokens
    }

    /// `/v1/chat/completions/render` with `"mm_payload": "none"`.
    pub(super) fn rendered(&self) -> Value {
        let media = &self.prompts[0].media;
        let ids: Value = media.iter().map(|span| span.id.as_str()).collect();
        let places: Value = media.iter().map(|span| json!({"offset": span.start, "length": span.tokens})).collect();
        let features = json!({"mm_hashes": {"image": ids}, "mm_placeholders": {"image": places}});
        json!({"token_ids": self.prompts[0].tokens, "features": features, "model": self.model,
            "cache_salt": self.template.salt})
    }
}

/// Equal prompts give equal text.
fn seed(sequence: &Sequence, answer: usize) -> u64 {
    let mut hasher = blake3::Hasher::new();
    for token in &sequence.tokens {
        hasher.update(&token.to_le_bytes());
    }
    for span in &sequence.media {
        hasher.update(span.id.as_bytes());
    }
    if let Some(lora) = &sequence.lora {
        hasher.update(lora.name.as_bytes());
    }
    hasher.update(&answer.to_le_bytes());
    let [a, b, c, d, e, f, g, h, ..] = *hasher.finalize().as_bytes();
    u64::from_le_bytes([a, b, c, d, e, f, g, h])
}

fn id(engine: &Engine, kind: Kind, headers: &HeaderMap) -> String {
    let prefix = if kind == Kind::Chat { "chatcmpl" } else { "cmpl" };
    match headers.get("x-request-id").and_then(|value| value.to_str().ok()) {
        Some(id) => format!("{prefix}-{id}"),
        None => format!("{prefix}-{:016x}", engine.next_request()),
    }
}

fn find_model(engine: &Engine, body: &Map<String, Value>) -> Result<(String, Option<Lora>), ApiError> {
    let config = &engine.config;
    let asked = body.get("model").and_then(Value::as_str).unwrap_or(&config.model_name);
    if asked == config.model_name {
        return Ok((asked.to_owned(), None));
    }
    let lora = (1..).zip(&config.loras).find(|(_, (name, _))| name == asked);
    match lora {
        Some((id, (name, path))) => Ok((name.clone(), Some(Lora { id, name: name.clone(), path: path.clone() }))),
        None => {
            let message = format!("The model `{asked}` does not exist. Valid aliases: {}.", config.model_name);
            Err(ApiError::new(StatusCode::NOT_FOUND, message).with_param("model"))
        }
    }
}

fn number(body: &Map<String, Value>, field: &'static str) -> Result<Option<usize>, ApiError> {
    match body.get(field) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => {
            let number = value.as_u64().and_then(|n| usize::try_from(n).ok());
            let wrong = || ApiError::bad(format!("{field} must be a whole number")).with_param(field);
            number.map(Some).ok_or_else(wrong)
        }
    }
}

fn output_tokens(engine: &Engine, prompts: &[Prompt], limit: Option<usize>) -> Result<usize, ApiError> {
    let most = engine.config.max_model_len;
    let longest = prompts.iter().map(|prompt| prompt.tokens.len()).max().unwrap_or(0);
    if longest >= most {
        let message = format!(
            "This model's maximum context length is {most} tokens. However, your prompt contains at least {longest} \
             input tokens, which exceeds this limit even without any output tokens. Please reduce the length of the \
             input prompt. (parameter=input_tokens, value={longest})"
        );
        return Err(ApiError::bad(message).with_param("input_tokens"));
    }
    let room = most - longest;
    match limit {
        None => Ok(engine.config.default_output.min(room)),
        Some(0) => Err(ApiError::bad("max_tokens must be at least 1, got 0.").with_param("max_tokens")),
        Some(limit) if limit <= room => Ok(limit),
        Some(limit) => {
            let message = format!(
                "This model's maximum context length is {most} tokens. However, you requested {limit} output tokens \
                 and your prompt contains {longest} input tokens, for a total of {} tokens.",
                limit.saturating_add(longest)
            );
            Err(ApiError::bad(message).with_param("max_tokens"))
        }
    }
}

async fn chat_prompt(engine: &Engine, body: &Map<String, Value>) -> Result<Prompt, ApiError> {
    let (text, parts) = engine.model.render(body)?;
    let most = engine.config.max_images;
    if parts.len() > most {
        let message = format!("At most {most} image(s) may be provided in one prompt. (parameter=image)");
        return Err(ApiError::bad(message).with_param("image"));
    }
    let mut images = Vec::with_capacity(parts.len());
    for (index, part) in parts.iter().enumerate() {
        images.push(image(engine, index, part).await?);
    }
    let tokens = engine.model.encode(&text, false)?;
    Ok(engine.model.expand(&tokens, &images)?)
}

async fn image(engine: &Engine, index: usize, part: &Attachment) -> Result<Resolved, ApiError> {
    let bytes = match part.url.as_deref() {
        None => None,
        Some(url) if url.starts_with("http://") || url.starts_with("https://") => Some(fetch(engine, url).await?),
        Some(url) => Some(Bytes::from(decode_data_url(url)?)),
    };
    if engine.config.engine_kind != EngineKind::Vllm {
        return Ok(engine.model.resolve_hashed(part, bytes.as_deref(), &engine.config)?);
    }
    let mut cache = lock(&engine.media);
    let model = &engine.config.engine_model;
    Ok(engine.model.resolve(index, part.uuid.as_deref(), bytes.as_deref(), model, &mut cache)?)
}

/// A picture by plain http, as the engine itself fetches it.
async fn fetch(engine: &Engine, url: &str) -> Result<Bytes, PromptError> {
    let failed = |what: String| PromptError::Unprocessable {
        message: format!("Failed to fetch media from URL: {what} (parameter=image_url, value={url})"),
        param: Some("image_url"),
    };
    let uri: http::Uri = url.parse().map_err(|error: http::uri::InvalidUri| failed(error.to_string()))?;
    let client = Client::builder(TokioExecutor::new()).build_http::<Empty<Bytes>>();
    let limit = engine.config.body_bytes_max;
    let work = async {
        let response = client.get(uri).await.map_err(|error| failed(error.to_string()))?;
        if !response.status().is_success() {
            return Err(failed(format!("HTTP {} error", response.status().as_u16())));
        }
        let body = Limited::new(response.into_body(), limit).collect().await;
        Ok(body.map_err(|error| failed(error.to_string()))?.to_bytes())
    };
    tokio::time::timeout(FETCH_MAX, work).await.map_err(|_| failed("timed out".to_owned()))?
}

fn text_prompts(engine: &Engine, body: &Map<String, Value>) -> Result<Vec<Prompt>, ApiError> {
    let wrong =
        || ApiError::bad("prompt must be a string, a list of strings, or lists of token ids").with_param("prompt");
    let one = |value: &Value| -> Result<Prompt, ApiError> {
        let tokens = match value {
            Value::String(text) => engine.model.encode(text, true)?,
            Value::Array(ids) => {
                let ids = ids.iter().map(|id| id.as_u64().and_then(|id| u32::try_from(id).ok()));
                ids.collect::<Option<Vec<u32>>>().ok_or_else(wrong)?
            }
            _ => return Err(wrong()),
        };
        Ok(Prompt { tokens, media: Vec::new() })
    };
    let prompts = match body.get("prompt") {
        Some(Value::Array(list)) if list.iter().any(|item| !item.is_number()) => {
            list.iter().map(one).collect::<Result<Vec<_>, _>>()?
        }
        Some(value) => vec![one(value)?],
        None => return Err(wrong()),
    };
    if prompts.iter().any(|prompt| prompt.tokens.is_empty()) {
        return Err(ApiError::bad("The decoder prompt cannot be empty").with_param("prompt"));
    }
    Ok(prompts)
}
