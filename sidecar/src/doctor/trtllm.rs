//! TensorRT-LLM: main of 2026 (1.3.0rc to 1.4.0rc) as read in its source. No server was run.
//!
//! Its pages say little, and `/metrics` is drained by reading; what is found comes from the probe.

use super::family::{Danger, Family, There, Told, Trap, Traps};
use crate::engine::version::Version;

pub const FAMILY: Family = Family {
    name: "TensorRT-LLM",
    known: |version| match (version.0, version.1) {
        (1, 3 | 4) => Ok("its source was read, no server of it was run"),
        _ => Err("1.3 and 1.4 were read, none was run"),
    },
    traps,
    events_on: "in the file of --extra_llm_api_options (newer: --config) write kv_cache_config: {enable_block_reuse: true, event_buffer_max_size: 65536}, and let nobody else read /kv_cache_events",
    replay_on: "",
    bind_on: "write endpoint: \"tcp://*:5557\" in kv_cache_config.kv_events_config",
    caching_on: "in the file of --extra_llm_api_options write kv_cache_config: {enable_block_reuse: true}",
    usage_on: "no option of it is known",
    block_size: "set model.block_size in sidecar.yaml to kv_cache_config.tokens_per_block (32 by default), or return_perf_metrics: true at the engine",
    hashes: "opaque names: events carry tokens and media keys",
    dangers: &[
        Danger {
            path: "/kv_cache_events",
            there: There::Always,
            what: "/kv_cache_events is emptied by reading: a second reader takes the sidecar's events",
        },
        Danger { path: "/metrics", there: There::Always, what: "/metrics is emptied by reading" },
    ],
    forbidden: &["/kv_cache_events"],
};

fn traps(at: &Traps<'_>) -> Vec<Trap> {
    let mut traps = vec![
        Trap::note(
            "the event thread may end while requests go on (NVIDIA/TensorRT-LLM#4666): then only a restart helps",
        ),
        Trap::note("reuse may break a second request with images (#14125, Phi-4-MM)"),
    ];
    if at.version.is_some_and(|version| version < Version(1, 3, 0)) {
        traps.push(Trap::note("older servers hold an idle poll for events for 2 s"));
    }
    traps
}

pub fn told() -> Told {
    Told::default()
}
