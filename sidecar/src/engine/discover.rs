//! Finds out about a vLLM by its own HTTP pages: `/health`, `/version`, `/v1/models`, `/kv_event_sources`, `/metrics`
//! (names and shapes of vLLM 0.32; `/kv_event_sources` and `/version` may be absent).

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;
use fovea_gossip::message::{EngineFacts, EngineKind, HashScheme};
use http::{Request, StatusCode, Uri};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use serde::Deserialize;
use serde::de::DeserializeOwned;

use super::endpoint::{for_rank, reachable};
use super::metrics_text::samples;
use crate::body::{self, Body, BoxError, ReadError};
use crate::config::Config;

pub type EngineClient = Client<HttpConnector, Body>;

/// Longest page read from the engine, in bytes; a real metrics page is about 100 kB.
const PAGE_BYTES_MAX: usize = 8 << 20;
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
    /// Tokens per block and blocks of KV memory; 0 = not said.
    pub block_size: u32,
    pub capacity_blocks: u64,
    /// Share of the KV pool used by running requests, 0..=1000.
    pub kv_usage_permille: u16,
}

/// Where one rank's events come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Source {
    pub endpoint: String,
    pub replay: Option<String>,
    pub topic: String,
    /// Bind `endpoint`; the engine connects.
    pub bind: bool,
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
    /// The page is not there, in contrast to an engine that is ill.
    fn absent(&self) -> bool {
        matches!(self, Self::Status { status, .. } if *status == StatusCode::NOT_FOUND || *status == StatusCode::METHOD_NOT_ALLOWED)
    }

    /// Somebody is there, and may only be busy.
    pub fn is_slow(&self) -> bool {
        matches!(self, Self::TooSlow { .. } | Self::Read { source: ReadError::TooSlow { .. }, .. })
    }
}

#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
    #[serde(default)]
    root: Option<String>,
    #[serde(default)]
    parent: Option<String>,
    #[serde(default)]
    max_model_len: Option<u32>,
}

#[derive(Deserialize)]
struct Version {
    version: String,
}

#[derive(Deserialize)]
struct EventSource {
    #[serde(default)]
    enable_kv_cache_events: bool,
    #[serde(default)]
    endpoint: Option<String>,
    #[serde(default)]
    replay_endpoint: Option<String>,
    #[serde(default)]
    topic: Option<String>,
}

/// Looks at the engine once.
///
/// # Errors
/// When it cannot be reached, is not healthy, or names no model.
pub async fn discover(client: &EngineClient, config: &Config) -> Result<Discovered, DiscoverError> {
    let pages = Pages { client, base: &config.engine.url, limit: config.engine.check_timeout };
    pages.get("/health").await?;
    let models: Models = pages.json("/v1/models").await?;
    let version = optional(pages.json::<Version>("/version").await)?;
    let sources: BTreeMap<String, EventSource> = optional(pages.json("/kv_event_sources").await)?.unwrap_or_default();
    let page = optional(pages.get("/metrics").await)?.unwrap_or_default();
    let page = String::from_utf8_lossy(&page);
    Ok(Discovered {
        facts: facts(config, models, version.map(|v| v.version).unwrap_or_default())?,
        ranks: ranks(config, &sources, &page),
    })
}

fn optional<T>(page: Result<T, DiscoverError>) -> Result<Option<T>, DiscoverError> {
    match page {
        Ok(page) => Ok(Some(page)),
        Err(error) if error.absent() => Ok(None),
        Err(error) => Err(error),
    }
}

fn facts(config: &Config, models: Models, version: String) -> Result<EngineFacts, DiscoverError> {
    let set = &config.model;
    let (bases, adapters): (Vec<_>, Vec<_>) = models.data.into_iter().partition(|model| model.parent.is_none());
    let root = bases.iter().find_map(|model| model.root.clone()).unwrap_or_default();
    let longest = bases.iter().find_map(|model| model.max_model_len).unwrap_or(0);
    let served: Vec<String> = bases.into_iter().map(|model| model.id).collect();
    let facts = EngineFacts {
        kind: EngineKind::Vllm,
        version,
        engine_model: if set.engine_model.is_empty() { root } else { set.engine_model.clone() },
        served_names: if set.served_names.is_empty() { served } else { set.served_names.clone() },
        lora_names: adapters.into_iter().map(|model| model.id).collect(),
        max_model_len: if set.max_model_len == 0 { longest } else { set.max_model_len },
        exif: set.exif,
        hash_scheme: HashScheme::Fovea1,
        hybrid: set.hybrid,
    };
    if facts.engine_model.is_empty() || facts.served_names.is_empty() { Err(DiscoverError::NoModel) } else { Ok(facts) }
}

/// Ranks that any page names; rank 0 always.
fn ranks(config: &Config, sources: &BTreeMap<String, EventSource>, page: &str) -> Vec<Rank> {
    let mut ranks = BTreeMap::from([(0, Rank::default())]);
    let host = config.engine.url.parse::<Uri>().ok().and_then(|uri| uri.host().map(str::to_owned)).unwrap_or_default();
    for (name, source) in sources {
        let Ok(rank) = name.parse::<u32>() else { continue };
        let entry = ranks.entry(rank).or_default();
        if let (true, Some(endpoint)) = (source.enable_kv_cache_events, &source.endpoint) {
            entry.source = Some(Source {
                endpoint: reachable(endpoint, &host),
                replay: source.replay_endpoint.as_deref().map(|replay| reachable(replay, &host)),
                topic: source.topic.clone().unwrap_or_default(),
                bind: false,
            });
        }
    }
    for info in samples(page, "vllm:cache_config_info") {
        let number = |name| info.label(name).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
        let entry = ranks.entry(info.rank()).or_default();
        entry.block_size = u32::try_from(number("block_size")).unwrap_or(0);
        entry.capacity_blocks = number("num_gpu_blocks");
    }
    for sample in samples(page, "vllm:kv_cache_usage_perc") {
        let share = (sample.value.clamp(0.0, 1.0) * 1000.0).round() as u16;
        ranks.entry(sample.rank()).or_default().kv_usage_permille = share;
    }
    ranks.into_iter().take(RANKS_MAX).map(|(rank, found)| overruled(config, rank, found)).collect()
}

fn overruled(config: &Config, rank: u32, mut found: Rank) -> Rank {
    let (events, model) = (&config.events, &config.model);
    found.rank = rank;
    if !events.endpoint.is_empty() {
        let replay = found.source.take().and_then(|source| source.replay);
        let endpoint = for_rank(&events.endpoint, rank);
        found.source = Some(Source { endpoint, replay, topic: String::new(), bind: events.bind });
    }
    if let Some(source) = &mut found.source {
        if !events.replay_endpoint.is_empty() {
            source.replay = Some(for_rank(&events.replay_endpoint, rank));
        }
        if !events.topic.is_empty() {
            source.topic.clone_from(&events.topic);
        }
    }
    if model.block_size > 0 {
        found.block_size = model.block_size;
    }
    if model.capacity_blocks > 0 {
        found.capacity_blocks = model.capacity_blocks;
    }
    found
}

struct Pages<'a> {
    client: &'a EngineClient,
    base: &'a str,
    limit: Duration,
}

impl Pages<'_> {
    async fn get(&self, path: &'static str) -> Result<Bytes, DiscoverError> {
        let unreachable = |source: BoxError| DiscoverError::Unreachable { path, source };
        let uri = format!("{}{path}", self.base.trim_end_matches('/'));
        let request = Request::get(uri).body(body::empty()).map_err(|error| unreachable(error.into()))?;
        let answer = tokio::time::timeout(self.limit, self.client.request(request)).await;
        let answer = answer.map_err(|_| DiscoverError::TooSlow { path, limit: self.limit })?;
        let answer = answer.map_err(|error| unreachable(error.into()))?;
        if !answer.status().is_success() {
            return Err(DiscoverError::Status { path, status: answer.status() });
        }
        let page = body::read(body::boxed(answer.into_body()), PAGE_BYTES_MAX, self.limit).await;
        page.map_err(|source| DiscoverError::Read { path, source })
    }

    async fn json<T: DeserializeOwned>(&self, path: &'static str) -> Result<T, DiscoverError> {
        let page = self.get(path).await?;
        serde_json::from_slice(&page).map_err(|source| DiscoverError::Shape { path, source })
    }
}

#[cfg(test)]
mod tests;
