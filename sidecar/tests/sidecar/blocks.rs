//! The engine's cache reaches a balancer, and stays equal to it through losses and restarts.

use std::collections::HashSet;

use engine_sim::{Fault, Sim};
use fovea_kv::{BlockSize, RoutingView, SequenceHash, root};

use crate::balancer::{Balancer, Seen};
use crate::rig::{self, Sidecar, config, sim};

/// First token id, and the one after the last.
type Prompt = (u32, u32);

/// Sends one prompt of token ids; its full blocks are then cached.
async fn complete(sidecar: &Sidecar, prompt: Prompt) {
    let body =
        serde_json::json!({"model": "tiny-vl", "prompt": (prompt.0..prompt.1).collect::<Vec<_>>(), "max_tokens": 1});
    let answer = sidecar.post("/v1/completions", &[("content-type", "application/json")], body.to_string()).await;
    assert_eq!(answer.status(), 200, "{}", rig::text(answer).await);
    rig::text(answer).await;
}

fn hashes(prompts: &[Prompt]) -> HashSet<SequenceHash> {
    let mut out = Vec::new();
    for prompt in prompts {
        let mut view = RoutingView::default();
        (prompt.0..prompt.1).for_each(|token| view.push(token, 1));
        view.sequence_hashes(BlockSize::new(4).unwrap(), root("", ""), &mut out);
    }
    out.into_iter().collect()
}

async fn holds(balancer: &Balancer, sim: &Sim, prompts: &[Prompt]) -> Seen {
    let expected = hashes(prompts);
    let seen = balancer.until("blocks", |seen| seen.live && seen.gpu == expected).await;
    assert_eq!(sim.state().cached_blocks.len(), expected.len());
    seen
}

async fn trusted(balancer: &Balancer) -> Seen {
    let events = |seen: &Seen| seen.hello.as_ref().is_some_and(|hello| hello.workers[0].events);
    balancer.until("a live event stream", |seen| seen.live && events(seen)).await
}

#[tokio::test]
async fn what_the_engine_caches_reaches_the_balancer() {
    let (sim, balancer) = (sim(|_| {}).await, Balancer::start().await);
    let sidecar = rig::start(config(sim.http, &[balancer.address])).await;
    let hello = trusted(&balancer).await.hello.unwrap();
    assert_eq!(
        (hello.engine.engine_model.as_str(), hello.engine.served_names.as_slice()),
        ("./tiny-qwen3-vl", &["tiny-vl".to_owned()][..])
    );
    assert_eq!(hello.advertised_url, format!("http://{}", sidecar.http));
    assert_eq!((hello.workers[0].block_size, hello.draining), (4, false));
    complete(&sidecar, (1, 42)).await;
    holds(&balancer, &sim, &[(1, 42)]).await;
    complete(&sidecar, (100, 120)).await;
    holds(&balancer, &sim, &[(1, 42), (100, 120)]).await;
    let load = balancer.until("an idle load", |seen| seen.load.running + seen.load.waiting == 0).await.load;
    assert_eq!((load.prefill_tokens, load.decode_tokens), (0, 0));
}

#[tokio::test]
async fn a_balancer_that_comes_back_gets_a_snapshot() {
    let (sim, balancer) = (sim(|_| {}).await, Balancer::start().await);
    let sidecar = rig::start(config(sim.http, &[balancer.address])).await;
    trusted(&balancer).await;
    complete(&sidecar, (1, 42)).await;
    holds(&balancer, &sim, &[(1, 42)]).await;
    balancer.cut();
    balancer.until("a second connection", |seen| seen.connections == 2).await;
    let seen = holds(&balancer, &sim, &[(1, 42)]).await;
    assert_eq!(seen.snapshots, 1);
}

#[tokio::test]
async fn a_sidecar_that_comes_late_learns_the_past_by_replay() {
    let (sim, balancer) = (sim(|_| {}).await, Balancer::start().await);
    let first = rig::start(config(sim.http, &[])).await;
    complete(&first, (1, 42)).await;
    drop(first);
    let _second = rig::start(config(sim.http, &[balancer.address])).await;
    holds(&balancer, &sim, &[(1, 42)]).await;
}

#[tokio::test]
async fn a_dropped_batch_is_healed_by_replay() {
    let (sim, balancer) = (sim(|_| {}).await, Balancer::start().await);
    let sidecar = rig::start(config(sim.http, &[balancer.address])).await;
    let before = trusted(&balancer).await;
    sim.fault(Fault::Drop { count: 1 }).await;
    complete(&sidecar, (1, 42)).await;
    complete(&sidecar, (100, 120)).await;
    let after = holds(&balancer, &sim, &[(1, 42), (100, 120)]).await;
    assert_eq!(before.epoch, after.epoch);
    let (_, metrics) = sidecar.page("/metrics").await;
    assert!(metrics.contains("sidecar_event_anomalies_total{rank=\"0\",what=\"gap\"} 1"), "{metrics}");
}

#[tokio::test]
async fn a_restart_of_the_engine_is_a_new_epoch() {
    let (sim, balancer) = (sim(|_| {}).await, Balancer::start().await);
    let mut config = config(sim.http, &[balancer.address]);
    config.blocks.audit_after = std::time::Duration::from_millis(200);
    let sidecar = rig::start(config).await;
    trusted(&balancer).await;
    complete(&sidecar, (1, 42)).await;
    let before = holds(&balancer, &sim, &[(1, 42)]).await;
    sim.fault(Fault::Restart).await;
    sim.wait_for(|state| state.restarts == 1).await;
    balancer.until("a new epoch", |seen| seen.live && seen.epoch > before.epoch && seen.gpu.is_empty()).await;
    sim.wait_for(|state| state.subscriptions > 0).await;
    trusted(&balancer).await;
    complete(&sidecar, (100, 120)).await;
    holds(&balancer, &sim, &[(100, 120)]).await;
}

#[tokio::test]
async fn a_cache_reset_that_passes_is_known_at_once() {
    let (sim, balancer) = (sim(|_| {}).await, Balancer::start().await);
    let mut config = config(sim.http, &[balancer.address]);
    config.allow_paths = vec!["/reset_prefix_cache".into()];
    let sidecar = rig::start(config).await;
    trusted(&balancer).await;
    complete(&sidecar, (1, 42)).await;
    let before = holds(&balancer, &sim, &[(1, 42)]).await;
    sim.wait_for(|state| state.counts.running == 0).await;
    let answer = sidecar.post("/reset_prefix_cache", &[], "").await;
    assert_eq!(rig::json(answer).await["success"], true);
    balancer.until("an empty cache", |seen| seen.live && seen.gpu.is_empty()).await;
    complete(&sidecar, (100, 120)).await;
    let after = holds(&balancer, &sim, &[(100, 120)]).await;
    assert_eq!(before.epoch, after.epoch);
}

#[tokio::test]
async fn evicted_blocks_are_withdrawn() {
    let small = |config: &mut engine_sim::SimConfig| (config.blocks, config.max_model_len) = (17, 64);
    let (sim, balancer) = (sim(small).await, Balancer::start().await);
    let sidecar = rig::start(config(sim.http, &[balancer.address])).await;
    trusted(&balancer).await;
    for start in [1, 100, 200, 300] {
        complete(&sidecar, (start, start + 41)).await;
    }
    let newest = hashes(&[(300, 341)]);
    let state = sim.wait_for(|state| state.counts.running == 0).await;
    let all = state.cached_blocks.len();
    balancer
        .until("the newest prompt, and no more than is cached", |seen| {
            newest.is_subset(&seen.gpu) && seen.gpu.len() <= all
        })
        .await;
}

#[tokio::test]
async fn an_engine_that_ends_is_told_of_and_one_that_was_never_there_too() {
    let (sim, balancer) = (sim(|_| {}).await, Balancer::start().await);
    let sidecar = rig::start(config(sim.http, &[balancer.address])).await;
    trusted(&balancer).await;
    assert_eq!(sidecar.page("/readyz").await.0, 200);
    sim.stop().await;
    balancer.until("a hello that drains", |seen| seen.hello.as_ref().is_some_and(|hello| hello.draining)).await;
    assert_eq!(sidecar.page("/readyz").await.0, 503);
    let answer = sidecar.post("/v1/completions", &[], r#"{"model":"m","prompt":"x"}"#).await;
    assert_eq!((answer.status().as_u16(), answer.headers()["retry-after"].as_bytes()), (503, &b"1"[..]));
    assert_eq!(rig::json(answer).await["error"]["type"], "engine_unreachable");
}

#[tokio::test]
async fn the_debug_page_shows_what_is_believed() {
    let (sim, balancer) = (sim(|_| {}).await, Balancer::start().await);
    let sidecar = rig::start(config(sim.http, &[balancer.address])).await;
    trusted(&balancer).await;
    complete(&sidecar, (1, 42)).await;
    let seen = holds(&balancer, &sim, &[(1, 42)]).await;
    let (_, page) = sidecar.page("/debug/state").await;
    let page: serde_json::Value = serde_json::from_str(&page).unwrap();
    let worker = &page["workers"][0];
    assert_eq!(
        (&worker["epoch"], &worker["live"], &worker["complete"]),
        (&seen.epoch.into(), &true.into(), &true.into())
    );
    assert_eq!(worker["blocks"]["published"][0], 10);
    assert_eq!(page["balancers"][0]["stream"]["connected"], true);
    assert_eq!(page["engine"]["engine_model"], "./tiny-qwen3-vl");
}
