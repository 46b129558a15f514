//! Data-parallel ranks behind one HTTP port.

use crate::client::{completion, config, get, next_batch, next_payload, post, post_with, replay, subscribe_to};
use engine_sim::{Fault, Sim, SimConfig, State};
use serde_json::{Value, json};

async fn start(ranks: usize) -> Sim {
    Sim::start(SimConfig { data_parallel_size: ranks, ..config() }).await.unwrap()
}

async fn pinned(sim: &Sim, rank: &str, body: &Value) -> (u16, Value) {
    post_with(sim, "/v1/completions", &[("X-data-parallel-rank", rank)], body).await
}

fn by_rank(sim: &Sim, look: impl Fn(&State) -> u64) -> Vec<u64> {
    sim.state().ranks.iter().map(look).collect()
}

fn port(endpoint: &str) -> u16 {
    endpoint.rsplit(':').next().unwrap().parse().unwrap()
}

#[tokio::test]
async fn ports_are_those_of_rank_0_plus_the_rank() {
    let sim = start(8).await;
    for (rank, sources) in (0..).zip(&sim.sources) {
        assert_eq!(port(&sources.events), port(&sim.events) + rank);
        assert_eq!(port(&sources.replay), port(&sim.replay) + rank);
    }
    let told: Value = serde_json::from_str(&get(&sim, "/kv_event_sources").await).unwrap();
    assert_eq!(told.as_object().unwrap().len(), 8);
    for (rank, sources) in sim.sources.iter().enumerate() {
        let told = &told[rank.to_string()];
        assert_eq!(told["endpoint"], format!("tcp://*:{}", port(&sources.events)));
        assert_eq!((&told["replay_endpoint"], &told["topic"]), (&json!(sources.replay), &json!(sources.topic)));
        assert_eq!(sources.topic, sim.sources[0].topic);
    }
}

#[tokio::test]
async fn the_header_pins_a_rank_which_alone_caches_and_tells() {
    let sim = start(3).await;
    let mut sockets = Vec::new();
    for rank in 0..3 {
        sockets.push(subscribe_to(&sim, rank).await);
    }
    let body = completion(1, 40, 1);
    assert_eq!(pinned(&sim, "2", &body).await.0, 200);
    let (seq, batch) = next_payload(&mut sockets[2]).await;
    assert_eq!((seq, &batch[2]), (0, &json!(2)));
    assert_eq!(by_rank(&sim, |rank| rank.cached_blocks.len() as u64), [0, 0, 2]);
    // The same prompt on another rank is computed again and told by that rank.
    let (_, answer) = pinned(&sim, "1", &body).await;
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 0);
    let (seq, batch) = next_payload(&mut sockets[1]).await;
    assert_eq!((seq, &batch[2]), (0, &json!(1)));
    let (_, answer) = pinned(&sim, "2", &body).await;
    assert_eq!(answer["usage"]["prompt_tokens_details"]["cached_tokens"], 32);
    assert_eq!(by_rank(&sim, |rank| rank.counts.served), [0, 1, 2]);
    let state = sim.state();
    assert_eq!((state.counts.served, state.cached_blocks.len(), state.next_seq), (3, 4, 2));
}

#[tokio::test]
async fn a_rank_that_is_not_there_is_refused() {
    let sim = start(2).await;
    for rank in ["2", "-1", "99999999999"] {
        let (status, answer) = pinned(&sim, rank, &completion(1, 20, 1)).await;
        assert_eq!((status, &answer["error"]["type"]), (400, &json!("BadRequestError")));
        let message = format!("data_parallel_rank {rank} is out of range [0, 2).");
        assert_eq!(answer["error"]["message"], message);
    }
    assert_eq!(
        pinned(&sim, "one", &completion(1, 20, 1)).await.0,
        200,
        "a header that is no number counts for nothing"
    );
}

#[tokio::test]
async fn without_a_header_requests_go_to_the_least_loaded_rank() {
    let sim = start(3).await;
    for salt in 0..6 {
        post(&sim, "/v1/completions", &completion(salt, 20, 1)).await;
    }
    assert_eq!(by_rank(&sim, |rank| rank.counts.served), [2, 2, 2]);
    sim.fault_in(1, Fault::Stall).await.unwrap();
    let (held, body) = (completion(7, 20, 1), completion(8, 20, 1));
    let (held, ()) = tokio::join!(pinned(&sim, "1", &held), async {
        sim.wait_for(|state| state.ranks[1].counts.waiting == 1).await;
        for _ in 0..4 {
            assert_eq!(post(&sim, "/v1/completions", &body).await.0, 200);
        }
        sim.fault_in(1, Fault::Resume).await.unwrap();
    });
    assert_eq!(held.0, 200);
    assert_eq!(by_rank(&sim, |rank| rank.counts.served)[1], 3);
}

#[tokio::test]
async fn metrics_have_a_series_per_rank() {
    let sim = start(2).await;
    pinned(&sim, "1", &completion(1, 40, 1)).await;
    let page = get(&sim, "/metrics").await;
    for line in [
        "vllm:prefix_cache_queries_total{engine=\"0\",model_name=\"tiny-vl\"} 0.0",
        "vllm:prefix_cache_queries_total{engine=\"1\",model_name=\"tiny-vl\"} 40.0",
        "enable_prefix_caching=\"True\",engine=\"1\"",
    ] {
        assert!(page.contains(line), "{line} is not in {page}");
    }
    assert_eq!(page.matches("# TYPE vllm:kv_cache_usage_perc gauge").count(), 1);
}

#[tokio::test]
async fn a_restart_of_one_rank_leaves_the_others_alone() {
    let sim = start(3).await;
    for rank in ["0", "1", "2"] {
        pinned(&sim, rank, &completion(1, 40, 1)).await;
    }
    let mut other = subscribe_to(&sim, 2).await;
    let (status, _) = post(&sim, "/sim/fault", &json!({"fault": "restart", "rank": 1})).await;
    assert_eq!(status, 200);
    let state = sim.wait_for(|state| state.restarts == 1).await;
    let of = |look: fn(&State) -> u64| state.ranks.iter().map(look).collect::<Vec<_>>();
    assert_eq!(of(|rank| rank.restarts), [0, 1, 0]);
    assert_eq!(of(|rank| rank.next_seq), [1, 0, 1]);
    assert_eq!(of(|rank| rank.cached_blocks.len() as u64), [2, 0, 2]);
    pinned(&sim, "2", &completion(2, 20, 1)).await;
    assert_eq!(next_batch(&mut other).await.0, 1, "the connection to rank 2 still stands");
    assert_eq!(replay(&sim, 0).await.len(), 1, "rank 0 still replays");
}

#[tokio::test]
async fn faults_name_a_rank_or_mean_all() {
    let sim = start(2).await;
    let at = &sim;
    let ask = |fault: Value| async move { post(at, "/sim/fault", &fault).await.0 };
    assert_eq!(ask(json!({"fault": "error", "count": 1, "rank": 1})).await, 200);
    assert_eq!(pinned(&sim, "0", &completion(1, 20, 1)).await.0, 200);
    assert_eq!(pinned(&sim, "1", &completion(1, 20, 1)).await.0, 500);
    assert_eq!(pinned(&sim, "1", &completion(1, 20, 1)).await.0, 200);
    assert_eq!(ask(json!({"fault": "stall", "rank": 2})).await, 400);
    assert_eq!(ask(json!({"fault": "stall", "rank": "x"})).await, 400);
    assert_eq!(ask(json!({"fault": "forget"})).await, 200);
    pinned(&sim, "0", &completion(2, 20, 1)).await;
    assert_eq!(replay(&sim, 0).await.len(), 1);
    sim.fault_in(1, Fault::Die).await.unwrap();
    assert!(sim.ended().await, "one dead rank ends all");
}

#[tokio::test]
async fn settings_of_ranks_are_checked() {
    for (ranks, events, replay) in [(0, 0, 0), (9, 0, 0), (4, 5000, 5003)] {
        let config =
            SimConfig { data_parallel_size: ranks, events_port: events, replay_port: replay, ..SimConfig::default() };
        assert!(config.validate().is_err(), "{ranks} {events} {replay}");
    }
}
