//! vLLM 0.32: `/version`, `/kv_event_sources` (both may be absent), `/metrics`.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::{DiscoverError, Pages, Rank, Source, Told, Wire, ZmqLink, host, permille};
use crate::engine::endpoint::reachable;
use crate::engine::metrics_text::samples;

#[derive(Deserialize)]
struct Version {
    version: String,
}

/// One rank of `/kv_event_sources`.
#[derive(Deserialize)]
pub(super) struct EventSource {
    #[serde(default)]
    enable_kv_cache_events: bool,
    #[serde(default)]
    endpoint: Option<String>,
    #[serde(default)]
    replay_endpoint: Option<String>,
    #[serde(default)]
    topic: Option<String>,
}

pub(super) async fn ask(pages: &Pages<'_>) -> Result<Told, DiscoverError> {
    let version = pages.optional::<Version>("/version").await?;
    let sources = pages.optional("/kv_event_sources").await?.unwrap_or_default();
    let page = pages.text("/metrics").await?;
    let ranks = ranks(&host(pages.base), &sources, &page);
    Ok(Told { version: version.map(|told| told.version).unwrap_or_default(), ranks, ..Told::default() })
}

/// Ranks that any page names; rank 0 always.
pub(super) fn ranks(host: &str, sources: &BTreeMap<String, EventSource>, page: &str) -> Vec<Rank> {
    let mut ranks = BTreeMap::from([(0, Rank::default())]);
    for (name, source) in sources {
        let Ok(rank) = name.parse::<u32>() else { continue };
        let entry = ranks.entry(rank).or_default();
        if let (true, Some(endpoint)) = (source.enable_kv_cache_events, &source.endpoint) {
            entry.source = Some(Source::Zmq(ZmqLink {
                endpoint: reachable(endpoint, host),
                replay: source.replay_endpoint.as_deref().map(|replay| reachable(replay, host)),
                topic: source.topic.clone().unwrap_or_default(),
                bind: false,
                wire: Wire::Vllm,
            }));
        }
    }
    for info in samples(page, "vllm:cache_config_info") {
        let number = |name| info.label(name).and_then(|text| text.parse::<u64>().ok()).unwrap_or(0);
        let entry = ranks.entry(info.rank()).or_default();
        entry.block_size = u32::try_from(number("block_size")).unwrap_or(0);
        entry.capacity_tokens = number("num_gpu_blocks").saturating_mul(entry.block_size.into());
    }
    for sample in samples(page, "vllm:kv_cache_usage_perc") {
        ranks.entry(sample.rank()).or_default().kv_usage_permille = permille(sample.value);
    }
    ranks.into_iter().map(|(rank, found)| Rank { rank, ..found }).collect()
}
