//! Engines of SGLang's and TensorRT-LLM's shape: what is predicted is what they reuse. Text is known from the first request on, a
//! picture from the first request that brings it.
#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::time::Duration;

use bytes::Bytes;
use e2e::client::Streamed;
use e2e::workload::{chat, image_part, picture, text_part, words};
use e2e::{Fleet, FleetConfig, Mode, eventually, tiny_model};
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(20);
const PAGE: u64 = 16;

fn fleet(engine: &[&str]) -> FleetConfig {
    let sizes = ["--page-size", "16", "--blocks", "4000", "--speed", "0"];
    let engine_args = engine.iter().chain(&sizes).map(|&arg| arg.to_owned()).collect();
    FleetConfig { engine_args, ..FleetConfig::tiny(2, Mode::Precise) }
}

fn sglang(version: &str) -> FleetConfig {
    fleet(&["--engine-kind", "sglang", "--engine-version", version])
}

/// TensorRT-LLM tells neither its model's path nor which token stands for a picture.
fn trtllm() -> FleetConfig {
    let dir = tiny_model();
    let sidecar_extra = format!("model: {{engine_model: ./tiny-qwen3-vl, dir: {}}}\n", dir.display());
    FleetConfig { sidecar_extra, ..fleet(&["--engine-kind", "trtllm"]) }
}

async fn ask(fleet: &Fleet, body: Bytes) -> Streamed {
    let answer = fleet.client.stream(&fleet.chat_url().unwrap(), body).await.unwrap();
    assert_eq!(answer.status, 200, "{}", answer.text);
    fleet.settled().await.unwrap();
    answer
}

/// Overlap in pages, after checking that the engine reused just that.
#[track_caller]
fn overlap(answer: &Streamed, what: &str) -> u64 {
    let (held, _) = answer.header("x-fovea-overlap").split_once('/').unwrap();
    let (held, (prompt, cached)) = (held.parse::<u64>().unwrap(), answer.tokens());
    assert_eq!(cached, held.min((prompt - 1) / PAGE) * PAGE, "{what}: {held} pages of {prompt} tokens");
    held
}

/// Chats in words: each must stay where it began, and be predicted from its second turn on.
async fn check_text(config: FleetConfig) {
    let fleet = Fleet::start(config).await.unwrap();
    for user in 0..3 {
        let mut messages: Vec<Value> = Vec::new();
        let mut place = None;
        for turn in 0..4 {
            messages.push(json!({"role": "user", "content": words(user << 16 | turn, 60)}));
            let answer = ask(&fleet, chat(&format!("user-{user}"), &messages, 4)).await;
            messages.push(json!({"role": "assistant", "content": words(user << 24 | turn, 12)}));
            let what = format!("user {user}, turn {turn}");
            assert_eq!(answer.header("x-fovea-view"), "exact", "{what}");
            assert_eq!(overlap(&answer, &what) > 0, turn > 0, "{what}");
            let worker = answer.header("x-fovea-worker").to_owned();
            assert_eq!(*place.get_or_insert(worker.clone()), worker, "{what}: moved");
        }
    }
}

/// Pictures: a second question about one is predicted.
async fn check_pictures(config: FleetConfig) {
    let fleet = Fleet::start(config).await.unwrap();
    let question = |seed: u64, text: u64| {
        let parts = [image_part(&picture(seed, 448, 320)), text_part(&words(text, 40))];
        chat("u", &[json!({"role": "user", "content": parts})], 1)
    };
    for seed in 0..3 {
        assert_eq!(overlap(&ask(&fleet, question(seed, seed)).await, "first sight"), 0);
        let known = eventually("the picture is known", SOON, || async {
            let answer = ask(&fleet, question(seed, seed)).await;
            Ok(answer.header("x-fovea-view").starts_with("exact").then_some(answer))
        });
        let known = known.await.unwrap();
        let (prompt, _) = known.tokens();
        assert_eq!(overlap(&known, "the same again"), prompt / PAGE);
        // Another question: the picture's own pages are there, and what follows is not.
        let other = ask(&fleet, question(seed, seed + 100)).await;
        assert!(overlap(&other, "another question") >= 140 / PAGE - 1);
        assert_eq!(other.header("x-fovea-worker"), known.header("x-fovea-worker"));
    }
}

#[tokio::test]
async fn sglang_text_is_predicted_from_maps_of_many_pages() {
    check_text(sglang("0.5.23")).await;
}

#[tokio::test]
async fn sglang_text_is_predicted_from_arrays_of_one_page() {
    check_text(sglang("0.5.16")).await;
}

#[tokio::test]
async fn sglang_pictures_are_learnt_by_session() {
    check_pictures(sglang("0.5.23")).await;
}

#[tokio::test]
async fn sglang_pictures_are_learnt_without_sessions() {
    check_pictures(sglang("0.5.19")).await;
}

#[tokio::test]
async fn trtllm_text_is_predicted_from_polled_events() {
    check_text(trtllm()).await;
}

#[tokio::test]
async fn trtllm_pictures_are_learnt_from_their_keys() {
    check_pictures(trtllm()).await;
}
