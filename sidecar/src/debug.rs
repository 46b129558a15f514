//! `/debug/state`: what the sidecar believes at this moment, for people and tests. The shape may change between versions.

use serde_json::{Value, json};

use crate::encode::Encoding;
use crate::state::State;
use crate::worker::{Worker, lock};

pub fn state(state: &State, encoding: Option<&Encoding>) -> Value {
    let engine = state.facts().map(|facts| {
        json!({
            "version": facts.version,
            "engine_model": facts.engine_model,
            "served_names": facts.served_names,
            "lora_names": facts.lora_names,
            "max_model_len": facts.max_model_len,
        })
    });
    let streams = lock(&state.streams);
    let balancers: Vec<Value> =
        streams.iter().map(|(address, info)| json!({"address": address.to_string(), "stream": info})).collect();
    drop(streams);
    json!({
        "engine_up": state.is_up(),
        "draining": state.is_draining(),
        "engine": engine,
        "workers": state.workers().iter().map(|worker| shown(worker)).collect::<Vec<_>>(),
        "balancers": balancers,
        "encoder": encoding.map(Encoding::debug),
    })
}

fn shown(worker: &Worker) -> Value {
    let ((gauges, counters), stream, facts) = (worker.figures(), worker.stream(), worker.facts());
    let ((epoch, seq), load) = (worker.sent(), worker.load.message(worker.index));
    json!({
        "rank": worker.rank,
        "epoch": epoch,
        "watermark": stream.watermark,
        "live": stream.live,
        "complete": stream.complete,
        "block_size": facts.block_size,
        "capacity_blocks": facts.capacity_blocks,
        "published_seq": seq,
        "blocks": {
            "known": gauges.known,
            "held": gauges.held,
            "published": gauges.published,
            "orphaned": gauges.orphans,
            "opaque": gauges.opaque,
            "duplicate_stores": counters.duplicate_stores,
            "unknown_removals": counters.unknown_removals,
            "over_limit": counters.over_limit,
        },
        "load": {
            "running": load.running,
            "waiting": load.waiting,
            "prefill_tokens": load.prefill_tokens,
            "decode_tokens": load.decode_tokens,
            "kv_usage_permille": load.kv_usage_permille,
        },
    })
}
