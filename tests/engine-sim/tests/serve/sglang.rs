//! The SGLang form: pages, events, replay and answers, seen from outside.

use crate::client::{
    chat, completion, config, get, image_request, next_batch, next_payload, post, post_with, replay, replay_of, send,
    subscribe, subscribe_to, text,
};
use engine_sim::{EngineKind, Fault, Sim, SimConfig};
use serde_json::{Value, json};

const PAD_SHIFT: u64 = 1_000_000;

fn settings(version: &str) -> SimConfig {
    SimConfig { engine_kind: EngineKind::Sglang, engine_version: Some(version.into()), loras: vec![], ..config() }
}

async fn start(version: &str) -> Sim {
    Sim::start(settings(version)).await.unwrap()
}

fn numbers(list: &Value) -> Vec<u64> {
    list.as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect()
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

async fn page(sim: &Sim, path: &str) -> Value {
    serde_json::from_str(&get(sim, path).await).unwrap()
}

/// The pads in the first batch that an image request causes, and how many tokens they fill.
async fn pads(sim: &Sim, request: &Value) -> (Vec<u64>, usize) {
    let mut socket = subscribe(sim).await;
    chat(sim, request).await;
    let (_, events) = next_batch(&mut socket).await;
    let tokens = numbers(&events[0]["token_ids"]);
    let run: Vec<u64> = tokens.into_iter().filter(|token| *token >= PAD_SHIFT).collect();
    let mut pads = Vec::new();
    run.iter().for_each(|pad| {
        if !pads.contains(pad) {
            pads.push(*pad)
        }
    });
    assert!(run.iter().zip(pads.iter().cycle()).all(|(a, b)| a == b), "pads repeat in turn");
    (pads, run.len())
}

#[tokio::test]
async fn the_first_batch_says_that_the_cache_is_empty() {
    let sim = start("0.5.23").await;
    sim.wait_for(|state| state.next_seq == 1).await;
    let first = (0, vec![json!({"type": "AllBlocksCleared"})]);
    assert_eq!(replay(&sim, 0).await, std::slice::from_ref(&first));
    sim.fault(Fault::Restart).await;
    sim.wait_for(|state| state.restarts == 1 && state.next_seq == 1).await;
    assert_eq!(replay(&sim, 0).await, [first]);
}

#[tokio::test]
async fn replay_has_the_frames_of_the_release() {
    for (version, frames) in [("0.5.21", 3), ("0.5.22", 4)] {
        let sim = start(version).await;
        post(&sim, "/v1/completions", &completion(1, 20, 1)).await;
        sim.wait_for(|state| state.next_seq == 2).await;
        assert_eq!(replay_of(&sim, 0, frames).await.len(), 2, "{version}");
    }
}

#[tokio::test]
async fn a_repeat_is_cached_and_says_nothing() {
    let sim = start("0.5.23").await;
    let mut socket = subscribe(&sim).await;
    let mut request = image_request("big_448x320.jpg", "What is in this picture?");
    request["session_id"] = json!("fv-1");
    request["cache_salt"] = json!("tenant-1");
    let prompt = chat(&sim, &request).await["usage"]["prompt_tokens"].as_u64().unwrap();
    let (_, events) = next_batch(&mut socket).await;
    assert_eq!(events.len(), 1);
    let event = &events[0];
    assert_eq!((&event["session_id"], &event["cache_salt"]), (&json!("fv-1"), &json!("tenant-1")));
    assert_eq!((&event["medium"], &event["lora_id"]), (&json!("GPU"), &Value::Null));
    assert_eq!(numbers(&event["token_ids"]).len() as u64, prompt / 16 * 16);
    let again = chat(&sim, &request).await;
    assert_eq!(cached(&again), (prompt - 1) / 16 * 16);
    request["cache_salt"] = json!("tenant-2");
    assert_eq!(cached(&chat(&sim, &request).await), 0, "another tenant shares nothing");
    let (_, events) = next_batch(&mut socket).await;
    assert_eq!(events[0]["cache_salt"], "tenant-2", "the repeat sent no batch");
    let state = sim.state();
    assert_eq!(state.cached_blocks.len() as u64, 2 * (prompt / 16));
    assert!(event["block_hashes"].as_array().unwrap().iter().all(|hash| state.cached_blocks.contains(hash)));
}

#[tokio::test]
async fn output_pages_come_at_the_end_after_the_prompt_s() {
    let sim = start("0.5.23").await;
    let mut socket = subscribe(&sim).await;
    post(&sim, "/v1/completions", &completion(1, 20, 30)).await;
    let (_, prompt) = next_batch(&mut socket).await;
    let (_, output) = next_batch(&mut socket).await;
    assert_eq!(prompt[0]["block_hashes"].as_array().unwrap().len(), 1);
    // 20 prompt tokens and 29 of the 30 of the answer have their KV: 3 pages, 2 of them new.
    assert_eq!(output[0]["block_hashes"].as_array().unwrap().len(), 2);
    assert_eq!(output[0]["parent_block_hash"], prompt[0]["block_hashes"][0]);
}

#[tokio::test]
async fn older_releases_send_arrays_of_one_page() {
    let sim = start("0.5.16").await;
    let mut socket = subscribe(&sim).await;
    post(&sim, "/v1/completions", &completion(1, 40, 1)).await;
    let (_, batch) = next_payload(&mut socket).await;
    let events = batch[1].as_array().unwrap();
    assert_eq!(events.len(), 2);
    for event in events {
        assert_eq!((&event[0], &event[4], &event[6]), (&json!("BlockStored"), &json!(16), &json!("GPU")));
        assert_eq!((event[1].as_array().unwrap().len(), numbers(&event[3]).len()), (1, 16));
    }
    assert_eq!(events[1][2], events[0][1][0]);
}

#[tokio::test]
async fn equal_images_have_equal_pads_on_engines_of_equal_processors() {
    let request = image_request("big_448x320.jpg", "What is it?");
    let (known, length) = pads(&start("0.5.23").await, &request).await;
    assert_eq!(known.len(), 4);
    assert!(length > 100, "{length} of 140");
    assert_eq!(pads(&start("0.5.23").await, &request).await, (known.clone(), length));
    let (narrow, _) = pads(&start("0.5.22").await, &request).await;
    assert!(narrow.len() == 1 && narrow[0] < PAD_SHIFT + (1 << 30));
    let other = SimConfig { processor_fingerprint: "b".to_owned(), ..settings("0.5.23") };
    assert_ne!(pads(&Sim::start(other).await.unwrap(), &request).await.0, known);
    let mut low = request.clone();
    low["messages"][0]["content"][0]["image_url"]["detail"] = json!("low");
    assert_ne!(pads(&start("0.5.23").await, &low).await.0, known, "detail is part of the identity");
    let random = Sim::start(SimConfig { random_media_hash: true, ..settings("0.5.23") }).await.unwrap();
    let first = pads(&random, &request).await.0;
    assert_ne!(pads(&random, &request).await.0, first);
}

#[tokio::test]
async fn a_wrong_content_hash_is_refused_in_sglang_s_words() {
    let sim = start("0.5.23").await;
    let mut request = image_request("big_448x320.jpg", "What is it?");
    request["messages"][0]["content"][0]["image_url"]["content_hash"] = json!("sha256:00");
    let (status, answer) = post(&sim, "/v1/chat/completions", &request).await;
    assert_eq!((status, &answer["object"], &answer["code"]), (400, &json!("error"), &json!(400)));
    // A uuid is vLLM's; here the bytes alone count.
    let mut named = image_request("big_448x320.jpg", "What is it?");
    named["messages"][0]["content"][0]["uuid"] = json!("x");
    chat(&sim, &named).await;
    assert!(cached(&chat(&sim, &image_request("big_448x320.jpg", "What is it?")).await) > 0);
}

#[tokio::test]
async fn pages_may_have_one_token() {
    let sim = Sim::start(SimConfig { block_size: 1, blocks: 4097, ..settings("0.5.23") }).await.unwrap();
    let mut socket = subscribe(&sim).await;
    post(&sim, "/v1/completions", &completion(1, 20, 1)).await;
    let (_, events) = next_batch(&mut socket).await;
    assert_eq!((events.len(), &events[0]["block_size"]), (1, &json!(1)));
    assert_eq!(events[0]["block_hashes"].as_array().unwrap().len(), 20);
    let (_, again) = post(&sim, "/v1/completions", &completion(1, 20, 1)).await;
    assert_eq!(cached(&again), 19, "one token is always computed");
}

#[tokio::test]
async fn a_flush_is_told_at_once() {
    let sim = start("0.5.23").await;
    let mut socket = subscribe(&sim).await;
    post(&sim, "/v1/completions", &completion(1, 20, 1)).await;
    next_batch(&mut socket).await;
    assert!(text(send(&sim, "POST", "/flush_cache", String::new()).await.unwrap()).await.starts_with("Cache flushed"));
    assert_eq!(next_batch(&mut socket).await.1, [json!({"type": "AllBlocksCleared"})]);
    assert_eq!(sim.state().cached_blocks, Vec::<Value>::new());
    sim.fault(Fault::Slow { factor: 1.0 }).await;
}

#[tokio::test]
async fn a_full_pool_evicts_whole_nodes_of_the_oldest() {
    let small = SimConfig { blocks: 9, max_model_len: 120, ..settings("0.5.23") };
    let sim = Sim::start(small).await.unwrap();
    let mut socket = subscribe(&sim).await;
    for salt in 1..=3 {
        post(&sim, "/v1/completions", &completion(salt, 48, 1)).await;
    }
    let (_, first) = next_batch(&mut socket).await;
    next_batch(&mut socket).await;
    let (_, last) = next_batch(&mut socket).await;
    assert_eq!(last.len(), 2);
    assert_eq!((&last[0]["type"], &last[0]["block_hashes"]), (&json!("BlockRemoved"), &first[0]["block_hashes"]));
    let bodies: Vec<_> = (4..8).map(|salt| completion(salt, 40, 60)).collect();
    let answers = futures_util::future::join_all(bodies.iter().map(|body| post(&sim, "/v1/completions", body))).await;
    assert!(answers.iter().all(|(status, answer)| *status == 200 && answer["usage"]["completion_tokens"] == 60));
    assert!(sim.state().counts.preemptions > 0);
}

#[tokio::test]
async fn ranks_are_pinned_and_told_of() {
    let sim = Sim::start(SimConfig { data_parallel_size: 2, ..settings("0.5.23") }).await.unwrap();
    let mut socket = subscribe_to(&sim, 1).await;
    let pin = [("X-Data-Parallel-Rank", "1")];
    post_with(&sim, "/v1/completions", &pin, &completion(1, 20, 1)).await;
    let (_, batch) = next_payload(&mut socket).await;
    assert_eq!(batch[2], 1);
    let mut routed = completion(1, 20, 1);
    routed["routed_dp_rank"] = json!(1);
    assert_eq!(cached(&post(&sim, "/v1/completions", &routed).await.1), 16);
    let info = page(&sim, "/server_info").await;
    let port = |endpoint: &str| endpoint.rsplit(':').next().unwrap().parse::<u64>().unwrap();
    let events = &info["kv_events"];
    assert_eq!(
        (&events["dp_size"], &events["block_size"], &events["endpoint_host"]),
        (&json!(2), &json!(16), &json!("*"))
    );
    assert_eq!(events["endpoint_port_base"], port(&sim.sources[0].events));
    assert_eq!(events["replay_endpoint_port_base"].as_u64().unwrap() + 1, port(&sim.sources[1].replay));
}

#[tokio::test]
async fn the_engine_describes_itself() {
    let sim = start("0.5.21").await;
    let info = page(&sim, "/server_info").await;
    assert_eq!(info, page(&sim, "/get_server_info").await);
    assert_eq!((&info["version"], &info["model_path"]), (&json!("0.5.21"), &json!("./tiny-qwen3-vl")));
    assert_eq!((&info["page_size"], &info["max_total_num_tokens"]), (&json!(16), &json!(1023 * 16)));
    assert_eq!((&info["kv_events"]["publisher"], &info["kv_events"]["topic"]), (&json!("zmq"), &json!("")));
    let model = page(&sim, "/model_info").await;
    assert_eq!((&model["model_type"], &model["served_model_name"]), (&json!("qwen3_vl"), &json!("tiny-vl")));
    let models = page(&sim, "/v1/models").await;
    assert_eq!((&models["data"][0]["root"], &models["data"][0]["max_model_len"]), (&json!("tiny-vl"), &json!(4096)));
    post(&sim, "/v1/completions", &completion(1, 40, 1)).await;
    let loads = page(&sim, "/v1/loads").await;
    assert_eq!((&loads["loads"][0]["dp_rank"], &loads["loads"][0]["max_total_num_tokens"]), (&json!(0), &json!(16368)));
    let metrics = get(&sim, "/metrics").await;
    assert!(
        metrics.contains("sglang:prompt_tokens_total{dp_rank=\"0\",engine_type=\"unified\",model_name=\"tiny-vl\"")
    );
    for absent in ["/kv_event_sources", "/version"] {
        assert_eq!(send(&sim, "GET", absent, String::new()).await.unwrap().status(), 404, "{absent}");
    }
    assert_eq!(send(&sim, "POST", "/reset_prefix_cache", String::new()).await.unwrap().status(), 404);
    assert_eq!(send(&sim, "GET", "/health", String::new()).await.unwrap().status(), 200);
}

#[test]
fn settings_of_the_family_are_checked() {
    assert!(settings("0.5.23").validate().is_ok());
    assert!(settings("main").validate().is_err());
    assert!(SimConfig { cpu_blocks: 5, ..settings("0.5.23") }.validate().is_err());
    assert!(SimConfig { loras: config().loras, ..settings("0.5.23") }.validate().is_err());
}
