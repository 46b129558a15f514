//! Finds out about the engine by its own HTTP pages: which family it is, what it serves, where its KV events come from.
//!
//! One file per engine family; what all share is here. A page that an engine lacks is no error: configuration stands in.

mod pages;
mod sglang;
mod trtllm;
mod vllm;

use std::time::Duration;

use fovea_gossip::message::{EngineFacts, EngineKind, HashScheme};
use fovea_kv::event::{Batch, DecodeError};
use fovea_kv::trtllm::Media;
use http::{StatusCode, Uri};
use serde::Deserialize;

pub use pages::{EngineClient, Pages};

use super::endpoint::for_rank;
use crate::body::{BoxError, ReadError};
use crate::config::Config;

/// Data-parallel ranks of one engine.
pub const RANKS_MAX: usize = 256;

/// What one look at the engine found.
#[derive(Clone, Debug, PartialEq)]
pub struct Discovered {
    pub facts: EngineFacts,
    /// By rank, ascending, at least one.
    pub ranks: Vec<Rank>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rank {
    pub rank: u32,
    /// `None` = this engine publishes no events.
    pub source: Option<Source>,
    /// Tokens per KV block of the engine; 0 = not said.
    pub block_size: u32,
    /// KV memory in tokens; 0 = not said.
    pub capacity_tokens: u64,
    /// Share of the KV pool used by running requests, 0..=1000.
    pub kv_usage_permille: u16,
}

/// Where one rank's events come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    Zmq(ZmqLink),
    /// `POST /kv_cache_events` of a TensorRT-LLM drains its queue: nobody else may ask.
    Pull(Media),
}

/// Sockets of a publisher.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ZmqLink {
    pub endpoint: String,
    pub replay: Option<String>,
    pub topic: String,
    /// Bind `endpoint`; the engine connects.
    pub bind: bool,
    pub wire: Wire,
}

/// How a publisher writes events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wire {
    Vllm,
    Sglang,
    TrtLlm(Media),
}

impl Wire {
    /// # Errors
    /// The payload as a whole cannot be read.
    pub fn decode(self, payload: &[u8]) -> Result<Batch, DecodeError> {
        match self {
            Self::Vllm => fovea_kv::vllm::decode(payload),
            Self::Sglang => fovea_kv::sglang::decode(payload),
            Self::TrtLlm(media) => fovea_kv::trtllm::push(payload, media),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum DiscoverError {
    #[error("engine {path}: cannot connect or no answer; is it up, and is engine.url right?")]
    Unreachable {
        path: &'static str,
        #[source]
        source: BoxError,
    },
    #[error("engine {path}: no answer within {limit:?}; raise engine.check_timeout if it is only slow")]
    TooSlow { path: &'static str, limit: Duration },
    #[error("engine {path}: answered {status}")]
    Status { path: &'static str, status: StatusCode },
    #[error("engine {path}: cannot read the answer")]
    Read {
        path: &'static str,
        #[source]
        source: ReadError,
    },
    #[error("engine {path}: not the expected json; set model.* and events.* by hand")]
    Shape {
        path: &'static str,
        #[source]
        source: serde_json::Error,
    },
    #[error("engine /v1/models: names no base model; set model.engine_model and model.served_names")]
    NoModel,
}

impl DiscoverError {
    /// Somebody is there, and may only be busy.
    pub fn is_slow(&self) -> bool {
        matches!(self, Self::TooSlow { .. } | Self::Read { source: ReadError::TooSlow { .. }, .. })
    }
}

#[derive(Default, Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
    #[serde(default)]
    owned_by: Option<String>,
    #[serde(default)]
    root: Option<String>,
    #[serde(default)]
    parent: Option<String>,
    #[serde(default)]
    max_model_len: Option<u32>,
}

impl Models {
    /// The family that names itself as owner of its models, as each does by default; vLLM when none does.
    fn kind(&self) -> EngineKind {
        let owner = self.data.iter().find_map(|model| model.owned_by.as_deref()).unwrap_or_default();
        match owner.to_ascii_lowercase().replace(['-', '_'], "").as_str() {
            "sglang" => EngineKind::Sglang,
            "tensorrtllm" | "trtllm" | "nvidia" => EngineKind::TrtLlm,
            _ => EngineKind::Vllm,
        }
    }
}

/// What an engine says of itself beside `/v1/models`. Empty or 0 = nothing.
#[derive(Clone, Debug, Default, PartialEq)]
struct Told {
    version: String,
    engine_model: String,
    max_model_len: u32,
    ranks: Vec<Rank>,
}

/// Looks at the engine once.
///
/// # Errors
/// When it cannot be reached, is not healthy, or names no model.
pub async fn discover(client: &EngineClient, config: &Config) -> Result<Discovered, DiscoverError> {
    let pages = Pages { client, base: &config.engine.url, limit: config.engine.check_timeout };
    pages.get("/health").await?;
    let models: Models = pages.json("/v1/models").await?;
    let kind = config.engine.kind.known().unwrap_or_else(|| models.kind());
    let told = match kind {
        EngineKind::Vllm => vllm::ask(&pages).await?,
        EngineKind::Sglang => sglang::ask(&pages).await?,
        EngineKind::TrtLlm => trtllm::ask(&pages, config).await?,
    };
    let ranks = told.ranks.iter().take(RANKS_MAX).map(|rank| overruled(config, kind, rank.clone())).collect();
    Ok(Discovered { facts: facts(config, kind, models, told)?, ranks })
}

fn facts(config: &Config, kind: EngineKind, models: Models, told: Told) -> Result<EngineFacts, DiscoverError> {
    let set = &config.model;
    let (bases, adapters): (Vec<_>, Vec<_>) = models.data.into_iter().partition(|model| model.parent.is_none());
    let root = bases.iter().find_map(|model| model.root.clone()).unwrap_or_default();
    let longest = bases.iter().find_map(|model| model.max_model_len).unwrap_or(told.max_model_len);
    let served: Vec<String> = bases.into_iter().map(|model| model.id).collect();
    // Only vLLM's enters identities; for the others any name of the model does.
    let name = if kind == EngineKind::Vllm { "" } else { served.first().map(String::as_str).unwrap_or_default() };
    let own = [told.engine_model, root, name.to_owned()].into_iter().find(|name| !name.is_empty()).unwrap_or_default();
    let facts = EngineFacts {
        kind,
        version: told.version,
        engine_model: if set.engine_model.is_empty() { own } else { set.engine_model.clone() },
        served_names: if set.served_names.is_empty() { served } else { set.served_names.clone() },
        lora_names: adapters.into_iter().map(|model| model.id).collect(),
        max_model_len: if set.max_model_len == 0 { longest } else { set.max_model_len },
        exif: set.exif.unwrap_or(kind == EngineKind::Vllm),
        hash_scheme: HashScheme::Fovea1,
        hybrid: set.hybrid,
    };
    if facts.engine_model.is_empty() || facts.served_names.is_empty() { Err(DiscoverError::NoModel) } else { Ok(facts) }
}

/// What configuration says goes before what the engine says.
fn overruled(config: &Config, kind: EngineKind, mut found: Rank) -> Rank {
    let (events, model) = (&config.events, &config.model);
    if !events.endpoint.is_empty() {
        let (replay, media) = match found.source.take() {
            Some(Source::Zmq(link)) => (link.replay, Media::default()),
            Some(Source::Pull(media)) => (None, media),
            None => (None, Media::default()),
        };
        let wire = match kind {
            EngineKind::Vllm => Wire::Vllm,
            EngineKind::Sglang => Wire::Sglang,
            EngineKind::TrtLlm => Wire::TrtLlm(media),
        };
        let endpoint = for_rank(&events.endpoint, found.rank);
        found.source = Some(Source::Zmq(ZmqLink { endpoint, replay, topic: String::new(), bind: events.bind, wire }));
    }
    if let Some(Source::Zmq(link)) = &mut found.source {
        if !events.replay_endpoint.is_empty() {
            link.replay = Some(for_rank(&events.replay_endpoint, found.rank));
        }
        if !events.topic.is_empty() {
            link.topic.clone_from(&events.topic);
        }
    }
    if model.block_size > 0 {
        found.block_size = model.block_size;
    }
    if model.capacity_blocks > 0 {
        found.capacity_tokens = model.capacity_blocks.saturating_mul(found.block_size.into());
    }
    found
}

/// Host by which the engine is reached.
fn host(base: &str) -> String {
    base.parse::<Uri>().ok().and_then(|uri| uri.host().map(str::to_owned)).unwrap_or_default()
}

/// A share of 1 as permille.
fn permille(share: f64) -> u16 {
    (share.clamp(0.0, 1.0) * 1000.0).round() as u16
}

#[cfg(test)]
mod tests;
