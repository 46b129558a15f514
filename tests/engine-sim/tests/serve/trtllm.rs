//! The TensorRT-LLM form: events that a poll takes, and its pages.

use crate::client::{chat, completion, config, get, image_request, post, post_with, send};
use engine_sim::{EngineKind, Fault, Sim, SimConfig};
use serde_json::{Value, json};

fn settings() -> SimConfig {
    SimConfig { engine_kind: EngineKind::Trtllm, loras: vec![], ..config() }
}

async fn start() -> Sim {
    Sim::start(settings()).await.unwrap()
}

/// Takes all events, once `ids` have been given out.
async fn poll(sim: &Sim, ids: u64) -> Vec<Value> {
    sim.wait_for(|state| state.next_seq >= ids).await;
    let (status, events) = post(sim, "/kv_cache_events", &Value::Null).await;
    assert_eq!(status, 200);
    events.as_array().unwrap().clone()
}

fn blocks(event: &Value) -> &[Value] {
    assert_eq!(event["data"]["type"], "stored", "{event}");
    event["data"]["blocks"].as_array().unwrap()
}

fn sizes(event: &Value) -> Vec<usize> {
    blocks(event).iter().map(|block| block["tokens"].as_array().unwrap().len()).collect()
}

#[tokio::test]
async fn a_poll_takes_all_and_the_next_gets_none() {
    let sim = start().await;
    let events = poll(&sim, 1).await;
    let created = json!({"event_id": 0, "data": {"type": "created", "num_blocks_per_cache_level": [1023, 0]},
        "window_size": 4096});
    assert_eq!(events, [created]);
    post(&sim, "/v1/completions", &completion(1, 40, 1)).await;
    let events = poll(&sim, 3).await;
    assert_eq!(events.iter().map(|event| event["event_id"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(
        (sizes(&events[0]), sizes(&events[1])),
        (vec![16, 16], vec![8]),
        "the last block is told though partial"
    );
    assert_eq!(events[0]["data"]["parent_hash"], Value::Null);
    assert_eq!(events[1]["data"]["parent_hash"], blocks(&events[0])[1]["block_hash"]);
    assert_eq!(poll(&sim, 3).await, Vec::<Value>::new());
    let (_, again) = post(&sim, "/v1/completions", &completion(1, 40, 1)).await;
    assert_eq!(again["usage"]["prompt_tokens_details"]["cached_tokens"], 32);
    assert_eq!(poll(&sim, 3).await, Vec::<Value>::new(), "a repeat says nothing");
    assert_eq!(sim.state().cached_blocks.len(), 2, "a partial block is no hit");
}

#[tokio::test]
async fn blocks_of_an_image_carry_its_key() {
    let sim = start().await;
    poll(&sim, 1).await;
    let mut request = image_request("big_448x320.jpg", "What is it?");
    request["cache_salt"] = json!("tenant-1");
    chat(&sim, &request).await;
    let events = poll(&sim, 3).await;
    let all: Vec<&Value> = events.iter().flat_map(blocks).collect();
    let keyed: Vec<&Value> = all.iter().filter_map(|block| block["mm_keys"].get(0)).collect();
    assert!(keyed.len() >= 9, "140 tokens lie in {} blocks", keyed.len());
    assert!(keyed.iter().all(|key| key["hash"] == keyed[0]["hash"] && key["type"] == "mm_key"));
    assert_eq!(keyed[0]["hash"].as_str().unwrap().len(), 64);
    let offsets: Vec<u64> = keyed.iter().map(|key| key["start_offset"].as_u64().unwrap()).collect();
    assert_eq!(offsets[0], 0);
    assert!(offsets[2..].windows(2).all(|pair| pair[1] == pair[0] + 16), "{offsets:?}");
    assert!(all.iter().all(|block| block["cache_salt"] == "tenant-1" && block["cache_level"] == 0));
    let other = image_request("big_448x320.jpg", "What is it?");
    assert_eq!(chat(&sim, &other).await["usage"]["prompt_tokens_details"]["cached_tokens"], 0, "another salt");
    assert!(chat(&sim, &other).await["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap() > 100);
}

#[tokio::test]
async fn a_full_pool_removes_block_by_block() {
    let sim = Sim::start(SimConfig { blocks: 9, max_model_len: 120, ..settings() }).await.unwrap();
    for salt in 1..=3 {
        post(&sim, "/v1/completions", &completion(salt, 50, 1)).await;
    }
    let events = poll(&sim, 7).await;
    let removed: Vec<&Value> =
        events.iter().filter(|event| event["data"]["type"] == "removed").map(|event| &event["data"]).collect();
    assert!(removed.len() >= 4, "{} of the 12 blocks had to go", removed.len());
    assert!(removed.iter().all(|data| data["block_hashes"].as_array().unwrap().len() == 1));
    let gone = |hash: &Value| removed.iter().any(|data| data["block_hashes"][0] == *hash);
    let stored = events.iter().filter(|event| event["data"]["type"] == "stored").flat_map(blocks);
    let full = stored.filter(|block| block["tokens"].as_array().unwrap().len() == 16);
    let mut left: Vec<Value> = full.map(|block| block["block_hash"].clone()).filter(|hash| !gone(hash)).collect();
    left.sort_by_key(ToString::to_string);
    assert_eq!(sim.state().cached_blocks, left);
}

#[tokio::test]
async fn ranks_number_their_events_by_themselves() {
    let sim = Sim::start(SimConfig { data_parallel_size: 2, ..settings() }).await.unwrap();
    for rank in ["0", "1"] {
        post_with(&sim, "/v1/completions", &[("X-data-parallel-rank", rank)], &completion(1, 20, 1)).await;
    }
    let of = |events: &[Value], rank: u64| {
        let own = events.iter().filter(|event| event["attention_dp_rank"] == rank);
        own.map(|event| event["event_id"].as_u64().unwrap()).collect::<Vec<_>>()
    };
    let events = poll(&sim, 6).await;
    assert_eq!((of(&events, 0), of(&events, 1)), (vec![0, 1, 2], vec![0, 1, 2]));
    sim.fault_in(1, Fault::Restart).await.unwrap();
    sim.wait_for(|state| state.restarts == 1 && state.ranks[1].next_seq == 1).await;
    let events = poll(&sim, 0).await;
    assert_eq!((of(&events, 0), of(&events, 1)), (vec![], vec![0]));
}

#[tokio::test]
async fn a_lost_event_shows_as_a_jump() {
    let sim = start().await;
    poll(&sim, 1).await;
    sim.fault(Fault::Drop { count: 1 }).await;
    post(&sim, "/v1/completions", &completion(1, 40, 1)).await;
    let events = poll(&sim, 3).await;
    assert_eq!(events.iter().map(|event| event["event_id"].as_u64().unwrap()).collect::<Vec<_>>(), [2]);
}

#[tokio::test]
async fn the_engine_describes_itself() {
    let sim = start().await;
    let page = |text: String| serde_json::from_str::<Value>(&text).unwrap();
    assert_eq!(page(get(&sim, "/version").await), json!({"version": "1.3.0"}));
    assert_eq!(page(get(&sim, "/v1/models").await)["data"][0]["id"], "tiny-vl");
    post(&sim, "/v1/completions", &completion(1, 40, 2)).await;
    sim.wait_for(|state| state.counts.served == 1 && state.counts.running == 0).await;
    let stats = page(get(&sim, "/metrics").await);
    assert_eq!((stats.as_array().unwrap().len(), &stats[0]["kvCacheStats"]["tokensPerBlock"]), (2, &json!(16)));
    assert_eq!(page(get(&sim, "/metrics").await), json!([]), "a poll takes all");
    let text = get(&sim, "/prometheus/metrics").await;
    assert!(text.contains("trtllm_kv_cache_max_blocks{model_name=\"tiny-vl\"} 1023.0"), "{text}");
    for absent in ["/kv_event_sources", "/model_info"] {
        assert_eq!(send(&sim, "GET", absent, String::new()).await.unwrap().status(), 404, "{absent}");
    }
}
