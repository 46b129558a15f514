//! KV events, replay and clearing, seen by a subscriber.

use crate::client::{chat, completion, config, image_request, next_batch, post, replay, start, subscribe};
use engine_sim::hash::{Algorithm, BlockHasher, Digest, ExtraKey};
use engine_sim::{Fault, Sim, SimConfig};
use serde_json::{Value, json};

fn tokens(event: &Value) -> Vec<u32> {
    event["token_ids"].as_array().unwrap().iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect()
}

#[tokio::test]
async fn stored_blocks_carry_hashes_tokens_and_extra_keys() {
    let sim = start().await;
    let mut socket = subscribe(&sim).await;
    let mut request = image_request("big_448x320.jpg", "What is in this picture?");
    request["model"] = json!("lora1");
    request["cache_salt"] = json!("tenant-1");
    chat(&sim, &request).await;
    let (seq, events) = next_batch(&mut socket).await;
    assert_eq!((seq, events.len()), (0, 1));
    let event = &events[0];
    assert_eq!(
        (&event["type"], &event["lora_name"], &event["lora_id"]),
        (&json!("BlockStored"), &json!("lora1"), &json!(1))
    );
    let ids = tokens(event);
    let hasher = BlockHasher::new(Algorithm::Sha256Cbor);
    let start = ids.iter().position(|id| *id == 593).unwrap();
    let image = event["extra_keys"][0][1][0].as_str().unwrap();
    let mut parent: Option<Digest> = None;
    for (i, published) in event["block_hashes"].as_array().unwrap().iter().enumerate() {
        let mut extra = vec![ExtraKey::Lora { name: "lora1".to_owned(), path: "./tiny-qwen3-vl-lora".to_owned() }];
        let mut keys = json!(["lora1"]);
        if start + 140 > i * 16 {
            let offset = i64::try_from(start).unwrap() - i64::try_from(i * 16).unwrap();
            extra.push(ExtraKey::Media { id: image.to_owned(), offset });
            keys.as_array_mut().unwrap().push(json!([image, offset]));
        }
        if i == 0 {
            extra.push(ExtraKey::Salt("tenant-1".to_owned()));
            keys.as_array_mut().unwrap().push(json!("tenant-1"));
        }
        let digest = hasher.block(parent, &ids[i * 16..(i + 1) * 16], &extra);
        assert_eq!((published.as_u64(), &event["extra_keys"][i]), (Some(digest.low64()), &keys));
        parent = Some(digest);
    }
    let mut stored: Vec<_> = event["block_hashes"].as_array().unwrap().clone();
    stored.sort_by_key(ToString::to_string);
    assert_eq!(sim.state().cached_blocks, stored);
}

#[tokio::test]
async fn hashes_can_be_bytes() {
    let sim = Sim::start(SimConfig { hash_form: engine_sim::events::HashForm::Bytes, ..config() }).await.unwrap();
    let mut socket = subscribe(&sim).await;
    post(&sim, "/v1/completions", &completion(1, 20, 1)).await;
    let (_, events) = next_batch(&mut socket).await;
    assert_eq!(events[0]["block_hashes"][0].as_str().unwrap().len(), 64);
    assert_eq!(sim.state().cached_blocks, events[0]["block_hashes"].as_array().unwrap().clone());
}

#[tokio::test]
async fn a_clear_comes_with_the_next_batch() {
    let sim = start().await;
    let mut socket = subscribe(&sim).await;
    post(&sim, "/v1/completions", &completion(1, 20, 1)).await;
    next_batch(&mut socket).await;
    assert_eq!(post(&sim, "/reset_prefix_cache", &Value::Null).await.1, json!({"success": true}));
    assert_eq!(sim.state().cached_blocks, Vec::<Value>::new());
    post(&sim, "/v1/completions", &completion(2, 20, 1)).await;
    let (seq, events) = next_batch(&mut socket).await;
    assert_eq!((seq, &events[0]["type"], &events[1]["type"]), (1, &json!("AllBlocksCleared"), &json!("BlockStored")));
}

#[tokio::test]
async fn a_sleeping_engine_waits_for_wake_up() {
    let sim = start().await;
    post(&sim, "/sleep?level=1", &Value::Null).await;
    let body = completion(1, 20, 1);
    let (request, ()) = tokio::join!(post(&sim, "/v1/completions", &body), async {
        sim.wait_for(|state| state.counts.waiting == 1).await;
        post(&sim, "/wake_up", &Value::Null).await;
    });
    assert_eq!(request.0, 200);
}

#[tokio::test]
async fn a_dropped_batch_can_be_replayed() {
    let sim = start().await;
    let mut socket = subscribe(&sim).await;
    sim.fault(Fault::Drop { count: 1 }).await;
    for salt in 1..=3 {
        post(&sim, "/v1/completions", &completion(salt, 20, 1)).await;
    }
    let (first, second) = (next_batch(&mut socket).await, next_batch(&mut socket).await);
    assert_eq!((first.0, second.0), (1, 2));
    let replayed = replay(&sim, 0).await;
    assert_eq!(replayed.iter().map(|(seq, _)| *seq).collect::<Vec<_>>(), [0, 1, 2]);
    assert_eq!(replayed[1..], [first, second]);
    assert_eq!(replay(&sim, 100).await, []);
}

#[tokio::test]
async fn a_restart_begins_at_zero_with_the_same_hashes() {
    let sim = start().await;
    let mut socket = subscribe(&sim).await;
    post(&sim, "/v1/completions", &completion(1, 20, 1)).await;
    post(&sim, "/v1/completions", &completion(2, 20, 1)).await;
    let (_, before) = next_batch(&mut socket).await;
    sim.fault(Fault::Restart).await;
    let state = sim.wait_for(|state| state.restarts == 1).await;
    assert_eq!((state.next_seq, state.cached_blocks.len()), (0, 0));
    let mut socket = subscribe(&sim).await;
    post(&sim, "/v1/completions", &completion(1, 20, 1)).await;
    assert_eq!(next_batch(&mut socket).await, (0, before));
    assert_eq!(replay(&sim, 0).await.len(), 1);
}

#[tokio::test]
async fn garbage_goes_out_as_asked() {
    use zeromq::SocketRecv;
    let sim = start().await;
    let mut socket = subscribe(&sim).await;
    let (status, _) = post(&sim, "/sim/fault", &json!({"fault": "garbage"})).await;
    assert_eq!(status, 200);
    assert_eq!(socket.recv().await.unwrap().get(2).unwrap()[0], 0xc1);
}
