//! TensorRT-LLM 1.3 / 1.4: `/version`, `/prometheus/metrics` where it is switched on. Its `/metrics` is drained by reading, so it is
//! left alone. Names as read in its source; no server of it was asked.

use std::path::Path;

use fovea_kv::trtllm::Media;
use serde::Deserialize;
use serde_json::Value;

use super::{DiscoverError, Pages, Rank, Source, Told, permille};
use crate::config::Config;
use crate::engine::metrics_text::samples;

/// Longest config.json read, in bytes.
const CONFIG_BYTES_MAX: u64 = 1 << 20;

#[derive(Deserialize)]
struct Version {
    version: String,
}

pub(super) async fn ask(pages: &Pages<'_>, config: &Config) -> Result<Told, DiscoverError> {
    let version = pages.optional::<Version>("/version").await?.map(|told| told.version).unwrap_or_default();
    let page = pages.text("/prometheus/metrics").await?;
    Ok(Told { version, ranks: vec![rank(media(config).await, &page)], ..Told::default() })
}

/// The pull form has one queue for all ranks, so there is one worker.
pub(super) fn rank(media: Media, page: &str) -> Rank {
    let figure = |name| samples(page, name).next().map(|sample| sample.value).filter(|value| value.is_finite());
    let whole = |name| figure(name).map_or(0, |value| value.max(0.0) as u64);
    let block_size = u32::try_from(whole("trtllm_kv_cache_tokens_per_block")).unwrap_or(0);
    Rank {
        rank: 0,
        source: Some(Source::Pull(media)),
        block_size,
        capacity_tokens: whole("trtllm_kv_cache_max_blocks").saturating_mul(block_size.into()),
        kv_usage_permille: permille(figure("trtllm_kv_cache_utilization").unwrap_or(0.0)),
    }
}

/// What tells media positions from text: the placeholder token and the vocabulary's size, out of the model's config.json. Without
/// them blocks with media are not published.
async fn media(config: &Config) -> Media {
    let own = Path::new(&config.model.engine_model);
    let dir = config.model.dir.as_deref().or_else(|| own.is_absolute().then_some(own));
    let Some(file) = dir.map(|dir| dir.join("config.json")) else { return Media::default() };
    let short = tokio::fs::metadata(&file).await.is_ok_and(|about| about.len() <= CONFIG_BYTES_MAX);
    let text = if short { tokio::fs::read(&file).await.unwrap_or_default() } else { Vec::new() };
    serde_json::from_slice(&text).map_or(Media::default(), |value: Value| Media::of_config(&value))
}
