//! vLLM: 0.32.0 was run, 0.33.0 read.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;

use super::ask::Ask;
use super::family::{Danger, Family, There, Told, Trap, Traps};
use crate::engine::metrics_text::samples;
use crate::engine::version::Version;

/// Limit of one page.
const PAGE: Duration = Duration::from_secs(3);
/// Messages that the replay socket of 0.32 holds for a slow reader; the rest is dropped without a word.
const REPLAY_MESSAGES: u64 = 1000;

pub const FAMILY: Family = Family {
    name: "vLLM",
    known: |version| match (version.0, version.1) {
        (0, 32) => Ok("0.32.0 was run"),
        (0, 33) => Ok("0.33.0 was read, not run"),
        _ => Err("0.32.0 was run and 0.33.0 read"),
    },
    traps,
    events_on: "start vllm serve with --kv-events-config '{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\",\"replay_endpoint\":\"tcp://*:5558\"}'",
    replay_on: "add \"replay_endpoint\":\"tcp://*:5558\" to --kv-events-config",
    bind_on: "write \"endpoint\":\"tcp://*:5557\" in --kv-events-config, or set events.endpoint and events.bind in sidecar.yaml",
    caching_on: "start vllm serve with --enable-prefix-caching and without --no-enable-prefix-caching",
    usage_on: "start vllm serve with --enable-prompt-tokens-details",
    block_size: "leave /metrics on (no --disable-log-stats), or set model.block_size in sidecar.yaml to --block-size",
    hashes: "not told; any works, events carry tokens and keys",
    dangers: &[
        Danger { path: "/is_sleeping", there: There::ByGet, what: DEVELOPMENT },
        Danger { path: "/is_paused", there: There::ByGet, what: DEVELOPMENT },
        Danger { path: "/server_info", there: There::ByGet, what: DEVELOPMENT },
        Danger {
            path: "/inference/v1/generate",
            there: There::ByOptions,
            // OPTIONS is answered without the flag, too.
            what: "/inference/v1/generate: if --enable-scale-out is set, one request of a wrong shape ends the engine",
        },
    ],
    forbidden: &["/collective_rpc", "/inference/v1/generate"],
};

const DEVELOPMENT: &str =
    "VLLM_SERVER_DEV_MODE=1: /reset_prefix_cache, /sleep, /pause, /collective_rpc (runs code) are open";

fn traps(at: &Traps<'_>) -> Vec<Trap> {
    let mut traps = Vec::new();
    let Some(version) = at.version else { return traps };
    if version < Version(0, 26, 0) {
        traps.push(Trap::note("before 0.26 events may be arrays: read all the same"));
        traps.push(Trap::note("old releases leave image keys or their offsets out of events: see identity_honoured"));
    }
    if version < Version(0, 33, 0)
        && let Some(steps) = at.told.buffer_steps.filter(|&steps| steps > REPLAY_MESSAGES)
    {
        let what = format!(
            "up to 0.32 a replay of more than {REPLAY_MESSAGES} batches (buffer_steps {steps}) may break off: it is asked for again from there"
        );
        traps.push(Trap::note(what));
    }
    if version >= Version(0, 33, 0) {
        traps.push(Trap::note(
            "from 0.33 on with EAGLE or MTP, hashes look past the block: blocks next to an image may be predicted wrongly",
        ));
    }
    if at.config.trust.client_embeddings {
        traps.push(Trap::fault(
            "image_embeds or prompt_embeds of wrong sides end the engine (seen with 0.32.0), and trust.client_embeddings lets clients send them",
            "set trust.client_embeddings: false in sidecar.yaml",
        ));
    }
    traps
}

pub async fn told(ask: &Ask, version: Option<Version>) -> Told {
    let pages = ask.pages(PAGE);
    let sources = pages.optional::<BTreeMap<String, Value>>("/kv_event_sources").await.ok().flatten();
    let metrics = pages.text("/metrics").await.unwrap_or_default();
    of_pages(sources.as_ref(), &metrics, version)
}

fn of_pages(sources: Option<&BTreeMap<String, Value>>, metrics: &str, version: Option<Version>) -> Told {
    let on = |source: &&Value| source.get("enable_kv_cache_events").and_then(Value::as_bool) == Some(true);
    let published = || {
        let all = sources.into_iter().flatten();
        all.filter(|(_, source)| on(source))
    };
    let endpoint =
        |(rank, source): (&String, &Value)| Some((rank.parse().ok()?, source.get("endpoint")?.as_str()?.to_owned()));
    let info = samples(metrics, "vllm:cache_config_info").next();
    let label = |name| info.as_ref().and_then(|info| info.label(name));
    Told {
        tells_events: sources.is_some(),
        endpoints: published().filter_map(endpoint).collect(),
        buffer_steps: published().find_map(|(_, source)| source.get("buffer_steps")?.as_u64()),
        prefix_caching: label("enable_prefix_caching").and_then(|text| match text.as_str() {
            "True" => Some(true),
            "False" => Some(false),
            _ => None,
        }),
        hashes: label("prefix_caching_hash_algo").map(|algorithm| hashes(&algorithm)),
        sessions: version.is_some_and(|version| version >= Version(0, 32, 0)),
        ..Told::default()
    }
}

fn hashes(algorithm: &str) -> String {
    let seed = "a random seed per process unless PYTHONHASHSEED is set; fine, events carry tokens and engine hashes are compared with no other engine's";
    match algorithm {
        "xxhash" | "xxhash_cbor" => format!("{algorithm}: {seed}"),
        _ => format!("{}: fine, events carry tokens and keys", super::check::shown(algorithm)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    const METRICS: &str = "vllm:cache_config_info{block_size=\"16\",enable_prefix_caching=\"False\",engine=\"0\",prefix_caching_hash_algo=\"xxhash\"} 1.0\n";

    #[test]
    fn pages_are_read_and_may_be_missing() {
        let page = r#"{"0":{"enable_kv_cache_events":true,"endpoint":"tcp://127.0.0.1:5557","buffer_steps":10000},
            "1":{"enable_kv_cache_events":false,"endpoint":"tcp://*:5558"}}"#;
        let told = of_pages(serde_json::from_str(page).ok().as_ref(), METRICS, Some(Version(0, 32, 0)));
        assert_eq!(told.endpoints, [(0, "tcp://127.0.0.1:5557".to_owned())]);
        assert_eq!((told.buffer_steps, told.prefix_caching, told.sessions), (Some(10_000), Some(false), true));
        assert!(told.hashes.unwrap().contains("random seed"));
        assert_eq!(of_pages(None, "", None), Told::default());
    }

    #[test]
    fn traps_follow_version_and_settings() {
        let mut config = Config::default();
        let told = Told { buffer_steps: Some(10_000), ..Told::default() };
        let texts = |version, config: &Config| {
            let traps = traps(&Traps { version: Some(version), told: &told, config });
            traps.into_iter().map(|trap| (trap.what, trap.remedy.is_some())).collect::<Vec<_>>()
        };
        let has = |texts: &[(String, bool)], part: &str| texts.iter().any(|(text, _)| text.contains(part));
        assert!(has(&texts(Version(0, 25, 1), &config), "arrays"));
        assert!(has(&texts(Version(0, 32, 0), &config), "break off"));
        assert!(!has(&texts(Version(0, 33, 0), &config), "break off"));
        config.trust.client_embeddings = true;
        assert!(texts(Version(0, 32, 0), &config).iter().any(|(_, fault)| *fault));
    }
}
