//! Requests reach the worker that holds their blocks, and what was predicted is what the engine reused.

use std::collections::HashSet;

use bytes::Bytes;
use e2e::workload::{Shape, chat, four_pictures, image_part, picture, text_part, words};
use e2e::{Fleet, FleetConfig, Mode};
use serde_json::{Value, json};

const BLOCK: u64 = 32;

fn overlap(header: &str) -> (u64, u64) {
    let (held, all) = header.split_once('/').unwrap_or_else(|| panic!("x-fovea-overlap is {header:?}"));
    (held.parse().expect("a number"), all.parse().expect("a number"))
}

#[tokio::test]
async fn a_repeat_goes_to_the_worker_that_holds_it_and_reuses_what_was_predicted() {
    let fleet = Fleet::start(FleetConfig::tiny(3, Mode::Precise)).await.unwrap();
    let url = fleet.chat_url().unwrap();
    let mut workers = HashSet::new();
    for seed in 0..6 {
        let body = four_pictures(seed * 10);
        let first = fleet.client.stream(&url, body.clone()).await.unwrap();
        assert_eq!(first.status, 200, "{}", first.text);
        fleet.settled().await.unwrap();
        let second = fleet.client.stream(&url, body).await.unwrap();
        assert_eq!((second.header("x-fovea-view"), second.header("x-fovea-mode")), ("exact", "precise"));
        assert_eq!(first.header("x-fovea-worker"), second.header("x-fovea-worker"));
        let ((held, all), (prompt, cached)) = (overlap(second.header("x-fovea-overlap")), second.tokens());
        assert_eq!((held, all), (prompt / BLOCK, prompt.div_ceil(BLOCK)));
        assert_eq!(cached, held.min((prompt - 1) / BLOCK) * BLOCK);
        workers.insert(first.header("x-fovea-worker").to_owned());
    }
    assert!(workers.len() > 1, "every conversation went to one worker");
}

#[tokio::test]
async fn every_turn_of_every_chat_is_predicted_exactly() {
    let fleet = Fleet::start(FleetConfig::tiny(2, Mode::Precise)).await.unwrap();
    let url = fleet.chat_url().unwrap();
    for user in 0..3 {
        for request in Shape::SHORT.user(user) {
            let answer = fleet.client.stream(&url, request.body).await.unwrap();
            let ((held, _), (prompt, cached)) = (overlap(answer.header("x-fovea-overlap")), answer.tokens());
            assert_eq!(answer.header("x-fovea-view"), "exact");
            assert_eq!(cached, held.min((prompt - 1) / BLOCK) * BLOCK, "user {user}");
            fleet.settled().await.unwrap();
        }
    }
}

#[tokio::test]
async fn equal_tokens_of_another_picture_are_no_overlap() {
    let fleet = Fleet::start(FleetConfig::tiny(1, Mode::Precise)).await.unwrap();
    let url = fleet.chat_url().unwrap();
    let ask = |seed: u64| {
        chat(
            "u",
            &[json!({"role": "user", "content": [image_part(&picture(seed, 448, 320)), text_part("What is it?")]})],
            1,
        )
    };
    fleet.client.stream(&url, ask(1)).await.unwrap();
    fleet.settled().await.unwrap();
    let other = fleet.client.stream(&url, ask(2)).await.unwrap();
    assert_eq!(other.tokens().1, 0);
    assert_eq!(overlap(other.header("x-fovea-overlap")).0, 0);
}

#[tokio::test]
async fn a_client_s_uuid_never_becomes_the_engine_s_identity() {
    let fleet = Fleet::start(FleetConfig::tiny(1, Mode::Precise)).await.unwrap();
    let url = fleet.chat_url().unwrap();
    let ask = |seed: u64| {
        let mut part = image_part(&picture(seed, 448, 320));
        part["uuid"] = json!("0123456789abcdef");
        chat("u", &[json!({"role": "user", "content": [part, text_part("What is it?")]})], 1)
    };
    fleet.client.stream(&url, ask(1)).await.unwrap();
    fleet.settled().await.unwrap();
    // Under one uuid the engine would answer the second picture from the first one's blocks.
    assert_eq!(fleet.client.stream(&url, ask(2)).await.unwrap().tokens().1, 0);
    fleet.settled().await.unwrap();
    let again = fleet.client.stream(&url, ask(1)).await.unwrap();
    assert!(again.tokens().1 > 0);
    assert_eq!(again.tokens().1, overlap(again.header("x-fovea-overlap")).0 * BLOCK);
}

#[tokio::test]
async fn an_image_left_to_the_engine_ends_the_exact_view_there() {
    let media = "media: {enabled: false}\n".to_owned();
    let config = FleetConfig { balancer_extra: media, ..FleetConfig::tiny(1, Mode::Precise) };
    let fleet = Fleet::start(config).await.unwrap();
    let system = json!({"role": "system", "content": words(1, 200)});
    // Nothing listens there: the engine itself answers 422, untouched.
    let user = json!({"role": "user", "content": [image_part("http://127.0.0.1:9/a.png"), text_part("What is it?")]});
    let answer = fleet.client.post(&fleet.chat_url().unwrap(), chat("u", &[system, user], 1)).await.unwrap();
    assert!(answer.header("x-fovea-view").starts_with("prefix;reason="), "{:?}", answer.headers);
    assert_eq!(answer.status, 422);
    assert!(answer.json().unwrap()["error"]["message"].is_string());
}

#[tokio::test]
async fn completions_by_text_and_by_token_ids_share_one_prefix() {
    let fleet = Fleet::start(FleetConfig::tiny(2, Mode::Precise)).await.unwrap();
    let url = format!("{}/v1/completions", fleet.url().unwrap());
    let tokens: Vec<u32> = (0..200).map(|i| i % 500).collect();
    let body = |prompt: Value| Bytes::from(json!({"model": "tiny-vl", "prompt": prompt, "max_tokens": 1}).to_string());
    let first = fleet.client.post(&url, body(json!(tokens))).await.unwrap();
    assert_eq!(first.status, 200, "{:?}", first.body);
    fleet.settled().await.unwrap();
    let second = fleet.client.post(&url, body(json!(tokens[..190]))).await.unwrap();
    assert_eq!(second.json().unwrap()["usage"]["prompt_tokens_details"]["cached_tokens"], 160);
    assert_eq!(overlap(second.header("x-fovea-overlap")), (5, 6));
    assert_eq!(first.header("x-fovea-worker"), second.header("x-fovea-worker"));
}

#[tokio::test]
async fn other_policies_route_too() {
    for mode in [Mode::RoundRobin, Mode::Session] {
        let fleet = Fleet::start(FleetConfig::tiny(2, mode)).await.unwrap();
        let mut workers = HashSet::new();
        for seed in 0..4 {
            let answer = fleet
                .client
                .stream(
                    &fleet.chat_url().unwrap(),
                    chat("one user", &[json!({"role": "user", "content": words(seed, 50)})], 1),
                )
                .await
                .unwrap();
            assert_eq!(answer.header("x-fovea-mode"), mode.config());
            workers.insert(answer.header("x-fovea-worker").to_owned());
        }
        assert_eq!(workers.len(), if mode == Mode::RoundRobin { 2 } else { 1 }, "{mode:?}");
    }
}

#[tokio::test]
async fn a_prefix_continues_from_the_cpu_tier() {
    let mut config = FleetConfig::tiny(1, Mode::Precise);
    let engine =
        ["--speed", "0", "--block-size", "32", "--blocks", "140", "--cpu-blocks", "400", "--max-model-len", "4096"];
    config.engine_args = engine.map(str::to_owned).to_vec();
    let fleet = Fleet::start(config).await.unwrap();
    let url = fleet.chat_url().unwrap();
    let ask = |seed: u64| chat("u", &[json!({"role": "user", "content": words(seed, 1000)})], 1);
    // Three prompts of about 60 blocks push the first out of a pool of 139.
    for seed in 0..4 {
        fleet.client.stream(&url, ask(seed)).await.unwrap();
        fleet.settled().await.unwrap();
    }
    let state = &fleet.engine_states().await.unwrap()[0];
    assert!(!state["cpu_blocks"].as_array().unwrap().is_empty(), "nothing was evicted");
    let again = fleet.client.stream(&url, ask(0)).await.unwrap();
    let (prompt, cached) = again.tokens();
    assert_eq!(cached, (prompt - 1) / BLOCK * BLOCK, "the engine reuses what lies in the CPU tier");
    assert_eq!(overlap(again.header("x-fovea-overlap")).0, prompt / BLOCK);
}
