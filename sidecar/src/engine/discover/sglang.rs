//! SGLang 0.5.9 to 0.5.23: `/server_info` (`/get_server_info` before), `/v1/loads`. Field names as read in its source; no server of
//! it was asked.

use serde::Deserialize;
use serde_json::Value;

use super::{DiscoverError, Pages, Rank, Source, Told, Wire, ZmqLink, host, permille};
use crate::engine::endpoint::reachable;

#[derive(Default, Deserialize)]
#[serde(default)]
pub(super) struct ServerInfo {
    version: String,
    model_path: String,
    context_length: Option<u32>,
    page_size: Option<u32>,
    max_total_num_tokens: Option<u64>,
    dp_size: Option<u32>,
    kv_events: Option<KvEvents>,
    /// The same as a JSON text, as the command line had it: all that older versions tell of events.
    kv_events_config: Option<String>,
    /// Addresses really bound on this host; the best source.
    local_kv_event_sources: Vec<LocalSource>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct KvEvents {
    publisher: String,
    /// `*` = the engine's own host.
    endpoint_host: String,
    endpoint_port_base: Option<u16>,
    replay_endpoint_port_base: Option<u16>,
    topic: Option<String>,
    block_size: Option<u32>,
    dp_size: Option<u32>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct LocalSource {
    dp_rank: u32,
    endpoint: String,
    topic: Option<String>,
    block_size: Option<u32>,
    replay_endpoint: Option<String>,
}

#[derive(Default, Deserialize)]
#[serde(default)]
struct CommandLine {
    publisher: String,
    endpoint: String,
    replay_endpoint: Option<String>,
    topic: String,
}

pub(super) async fn ask(pages: &Pages<'_>) -> Result<Told, DiscoverError> {
    let info = match pages.optional::<ServerInfo>("/server_info").await? {
        Some(info) => Some(info),
        None => pages.optional("/get_server_info").await?,
    };
    let info = info.unwrap_or_default();
    let loads = pages.optional::<Value>("/v1/loads").await?.unwrap_or(Value::Null);
    let mut ranks = ranks(&host(pages.base), &info);
    loaded(&mut ranks, &loads);
    Ok(Told {
        version: info.version,
        engine_model: info.model_path,
        max_model_len: info.context_length.unwrap_or(0),
        ranks,
    })
}

/// One per data-parallel rank; the ports of rank r are those of rank 0 plus r.
pub(super) fn ranks(host: &str, info: &ServerInfo) -> Vec<Rank> {
    let (events, local) = (info.kv_events.as_ref(), &info.local_kv_event_sources);
    let count = events.and_then(|events| events.dp_size).or(info.dp_size).unwrap_or(1).max(1);
    let count = local.iter().map(|source| source.dp_rank.saturating_add(1)).max().unwrap_or(count);
    let size = events.and_then(|events| events.block_size).or(info.page_size).unwrap_or(0);
    let line = info.kv_events_config.as_deref().and_then(|text| serde_json::from_str::<CommandLine>(text).ok());
    let rank = |rank: u32| {
        let here = local.iter().find(|source| source.dp_rank == rank && is_local(host));
        let link = here.map(|source| bound(host, source)).or_else(|| advertised(host, events?, rank));
        let link = link.or_else(|| commanded(host, line.as_ref()?, rank));
        Rank {
            rank,
            source: link.map(Source::Zmq),
            block_size: here.and_then(|source| source.block_size).unwrap_or(size),
            capacity_tokens: info.max_total_num_tokens.unwrap_or(0),
            kv_usage_permille: 0,
        }
    };
    (0..count.min(super::RANKS_MAX as u32)).map(rank).collect()
}

fn is_local(host: &str) -> bool {
    host == "localhost" || host.trim_matches(['[', ']']).parse().is_ok_and(|ip: std::net::IpAddr| ip.is_loopback())
}

fn bound(host: &str, source: &LocalSource) -> ZmqLink {
    ZmqLink {
        endpoint: reachable(&source.endpoint, host),
        replay: source.replay_endpoint.as_deref().map(|replay| reachable(replay, host)),
        topic: source.topic.clone().unwrap_or_default(),
        bind: false,
        wire: Wire::Sglang,
    }
}

fn advertised(host: &str, events: &KvEvents, rank: u32) -> Option<ZmqLink> {
    let base = events.endpoint_port_base.filter(|_| events.publisher == "zmq")?;
    let at = |base: u16| Some(format!("tcp://{}:{}", events.endpoint_host, u32::from(base).checked_add(rank)?));
    Some(ZmqLink {
        endpoint: reachable(&at(base)?, host),
        replay: events.replay_endpoint_port_base.and_then(at).map(|replay| reachable(&replay, host)),
        topic: events.topic.clone().unwrap_or_default(),
        bind: false,
        wire: Wire::Sglang,
    })
}

/// From the engine's command line. Unlike vLLM it binds only with a wildcard in the address, or `ipc://`: else it connects, and nobody
/// is there to be asked.
fn commanded(host: &str, line: &CommandLine, rank: u32) -> Option<ZmqLink> {
    let binds =
        ["*", "::", "0.0.0.0"].iter().any(|any| line.endpoint.contains(any)) || line.endpoint.starts_with("ipc");
    let endpoint = (line.publisher == "zmq" && binds).then_some(line.endpoint.as_str())?;
    let of_rank = |endpoint: &str| reachable(&crate::engine::endpoint::for_rank(endpoint, rank), host);
    Some(ZmqLink {
        endpoint: of_rank(endpoint),
        replay: line.replay_endpoint.as_deref().map(of_rank),
        topic: line.topic.clone(),
        bind: false,
        wire: Wire::Sglang,
    })
}

/// `{"loads": [{"dp_rank", "num_used_tokens", "max_total_num_tokens", "token_usage"}]}`; a bare list is taken too.
pub(super) fn loaded(ranks: &mut [Rank], page: &Value) {
    let list = page.get("loads").unwrap_or(page).as_array().map(Vec::as_slice).unwrap_or_default();
    for load in list {
        let rank = load.get("dp_rank").and_then(Value::as_u64).unwrap_or(0);
        let Some(rank) = ranks.iter_mut().find(|known| u64::from(known.rank) == rank) else { continue };
        if let Some(most) = load.get("max_total_num_tokens").and_then(Value::as_u64).filter(|&most| most > 0) {
            rank.capacity_tokens = most;
        }
        if let Some(usage) = load.get("token_usage").and_then(Value::as_f64) {
            rank.kv_usage_permille = permille(usage);
        }
    }
}
