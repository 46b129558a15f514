//! Checks of a vLLM-shaped engine.

use std::time::Duration;

use engine_sim::Fault;
use fovea_sidecar::doctor::examine;
use serde_json::{Value, json};

use super::front::{Front, behind, expect, find, options, sim};

const NAMES: [&str; 16] = [
    "reachable",
    "engine",
    "version_traps",
    "models",
    "events_on",
    "events_reachable",
    "replay_on",
    "prefix_caching_on",
    "block_size",
    "hash_options",
    "usage_details",
    "identity_honoured",
    "media_repeatable",
    "dangerous_endpoints",
    "clock",
    "limits",
];

#[tokio::test]
async fn a_sound_engine_passes_every_check() {
    let sim = sim(|_| {}).await;
    let report = examine(&options(sim.http)).await;
    assert_eq!(report.checks.iter().map(|check| check.name).collect::<Vec<_>>(), NAMES);
    for check in &report.checks {
        assert_eq!(check.ok, Some(true), "{check:?}");
    }
    assert_eq!((report.ok, report.status()), (true, 0));
}

#[tokio::test]
async fn ranks_and_large_blocks_are_looked_at_too() {
    let sim = sim(|config| {
        config.data_parallel_size = 2;
        config.block_size = 128;
    })
    .await;
    let report = examine(&options(sim.http)).await;
    assert_eq!(report.status(), 0, "{report:?}");
    expect(&report, "events_on", Some(true), "ranks 0, 1", "");
    expect(&report, "identity_honoured", Some(true), "uuid", "");
}

#[tokio::test]
async fn nothing_with_an_effect_is_called() {
    let sim = sim(|_| {}).await;
    let front = Front::plain(sim.http).await;
    examine(&options(front.address)).await;
    let seen = front.seen.lock().unwrap().clone();
    let posts: Vec<_> = seen.iter().filter(|line| line.starts_with("POST")).collect();
    assert_eq!(posts, ["POST /v1/chat/completions"; 2]);
    let allowed = ["GET /health", "GET /v1/models", "GET /version", "GET /kv_event_sources", "GET /metrics"];
    let harmless = ["GET /is_sleeping", "GET /is_paused", "GET /server_info", "OPTIONS /inference/v1/generate"];
    for line in seen.iter().filter(|line| !line.starts_with("POST")) {
        assert!(allowed.contains(&line.as_str()) || harmless.contains(&line.as_str()), "{line}");
    }
    front.seen.lock().unwrap().clear();
    let report = examine(&fovea_sidecar::doctor::Options { probe: false, ..options(front.address) }).await;
    assert!(!front.seen.lock().unwrap().iter().any(|line| line.starts_with("POST")));
    expect(&report, "identity_honoured", None, "--no-probe", "");
    assert_eq!(report.status(), 0);
}

/// Sets a field of `/kv_event_sources` of rank 0.
fn source(field: &'static str, value: Value) -> Box<super::front::After> {
    Box::new(move |path, answer| {
        if path == "/kv_event_sources" {
            answer["0"][field] = value.clone();
        }
    })
}

#[tokio::test]
async fn events_that_are_off_are_switched_on_by_a_flag() {
    let sim = sim(|_| {}).await;
    let report = behind(&sim, Box::new(|_, _| None), source("enable_kv_cache_events", false.into())).await;
    expect(&report, "events_on", Some(false), "rank 0", "--kv-events-config");
    expect(&report, "events_reachable", None, "", "");
    expect(&report, "identity_honoured", None, "events_reachable", "");
    assert_eq!(report.status(), 1);
}

#[tokio::test]
async fn an_engine_without_the_page_of_sources_leaves_events_untold() {
    let sim = sim(|_| {}).await;
    let gone: Box<super::front::Before> = Box::new(|path, _| (path == "/kv_event_sources").then(|| (404, "{}".into())));
    let report = behind(&sim, gone, Box::new(|_, _| {})).await;
    expect(&report, "events_on", None, "no page", "events.endpoint");
    assert_eq!(report.status(), 0, "{report:?}");
}

#[tokio::test]
async fn a_missing_replay_endpoint_is_named() {
    let sim = sim(|_| {}).await;
    let report = behind(&sim, Box::new(|_, _| None), source("replay_endpoint", Value::Null)).await;
    expect(&report, "replay_on", Some(false), "rank 0", "\"replay_endpoint\"");
    expect(&report, "events_reachable", Some(true), "", "");
    assert_eq!(report.status(), 1);
}

#[tokio::test]
async fn a_replay_endpoint_where_nobody_listens_is_found() {
    let sim = sim(|_| {}).await;
    let report = behind(&sim, Box::new(|_, _| None), source("replay_endpoint", json!("tcp://127.0.0.1:9"))).await;
    expect(&report, "replay_on", Some(false), "tcp://127.0.0.1:9", "events.replay_endpoint");
}

#[tokio::test]
async fn a_history_that_has_been_forgotten_is_told() {
    let sim = sim(|_| {}).await;
    examine(&options(sim.http)).await;
    sim.fault(Fault::Forget).await;
    // Fills the buffer anew, from where the first run ended.
    examine(&options(sim.http)).await;
    let report = examine(&options(sim.http)).await;
    expect(&report, "replay_on", Some(true), "from batch", "");
    assert!(!find(&report, "replay_on").found.contains("batch 0"));
}

#[tokio::test]
async fn an_event_port_that_does_not_answer_is_found() {
    let sim = sim(|_| {}).await;
    let report = behind(&sim, Box::new(|_, _| None), source("endpoint", json!("tcp://*:9"))).await;
    expect(&report, "events_reachable", Some(false), "cannot connect to tcp://127.0.0.1:9", "open that port");
}

#[tokio::test]
async fn an_endpoint_with_a_concrete_host_connects_and_is_told_apart() {
    let sim = sim(|_| {}).await;
    let report = behind(&sim, Box::new(|_, _| None), source("endpoint", json!("tcp://127.0.0.1:9"))).await;
    expect(&report, "events_reachable", Some(false), "connects to it instead of binding", "\"tcp://*:5557\"");
}

#[tokio::test]
async fn a_topic_that_matches_nothing_is_found_by_the_probe() {
    let sim = sim(|_| {}).await;
    let mut options = options(sim.http);
    options.config.events.topic = "no-such-topic".into();
    let report = examine(&options).await;
    expect(&report, "events_reachable", Some(false), "caused no event", "events.topic");
}

#[tokio::test]
async fn answers_without_cached_tokens_ask_for_a_flag() {
    let sim = sim(|_| {}).await;
    let after: Box<super::front::After> = Box::new(|path, answer| {
        if path == "/v1/chat/completions" {
            answer["usage"]["prompt_tokens_details"] = Value::Null;
        }
    });
    let report = behind(&sim, Box::new(|_, _| None), after).await;
    expect(&report, "usage_details", Some(false), "cached_tokens", "--enable-prompt-tokens-details");
    expect(&report, "identity_honoured", Some(true), "uuid", "");
    expect(&report, "prefix_caching_on", Some(true), "on", "");
}

#[tokio::test]
async fn an_identity_that_is_not_taken_is_found() {
    let sim = sim(|_| {}).await;
    let before: Box<super::front::Before> = Box::new(|path, body| {
        if path == "/v1/chat/completions" {
            body["messages"][0]["content"][1].as_object_mut().unwrap().remove("uuid");
        }
        None
    });
    let report = behind(&sim, before, Box::new(|_, _| {})).await;
    expect(&report, "identity_honoured", Some(false), "not the uuid", "--media-io-kwargs");
    expect(&report, "media_repeatable", Some(true), "one identity", "");
}

#[tokio::test]
async fn a_model_without_images_is_no_fault() {
    let sim = sim(|_| {}).await;
    let before: Box<super::front::Before> = Box::new(|path, body| {
        let pictured = path == "/v1/chat/completions" && body.to_string().contains("image_url");
        pictured.then(|| (400, r#"{"error":{"message":"tiny is not a multimodal model","code":400}}"#.into()))
    });
    let report = behind(&sim, before, Box::new(|_, _| {})).await;
    expect(&report, "identity_honoured", None, "not a multimodal model", "");
    expect(&report, "media_repeatable", None, "", "");
    expect(&report, "usage_details", Some(true), "", "");
    assert_eq!(report.status(), 0, "{report:?}");
}

#[tokio::test]
async fn a_picture_that_breaks_the_engine_is_a_fault() {
    let sim = sim(|_| {}).await;
    sim.fault(Fault::Error { count: 1, status: 500 }).await;
    let report = examine(&options(sim.http)).await;
    expect(&report, "identity_honoured", Some(false), "answered 500", "log");
    expect(&report, "media_repeatable", None, "identity_honoured", "");
}

#[tokio::test]
async fn an_engine_that_serves_nobody_is_a_fault() {
    let sim = sim(|_| {}).await;
    sim.fault(Fault::Error { count: 2, status: 500 }).await;
    let report = examine(&options(sim.http)).await;
    expect(&report, "models", Some(false), "answered 500", "log");
    sim.fault(Fault::Stall).await;
    let mut options = options(sim.http);
    options.timeout = Duration::from_secs(2);
    let report = examine(&options).await;
    expect(&report, "models", Some(false), "no answer within 1.", "--timeout");
    expect(&report, "usage_details", None, "the probe failed", "");
    assert_eq!(report.status(), 1);
}

#[tokio::test]
async fn a_cache_that_is_off_is_switched_on_by_a_flag() {
    let sim = sim(|_| {}).await;
    let before: Box<super::front::Before> = Box::new(|path, _| {
        let page = "vllm:cache_config_info{block_size=\"16\",enable_prefix_caching=\"False\",engine=\"0\",num_gpu_blocks=\"600\"} 1.0\n";
        (path == "/metrics").then(|| (200, page.into()))
    });
    let report = behind(&sim, before, Box::new(|_, _| {})).await;
    expect(&report, "prefix_caching_on", Some(false), "off", "--enable-prefix-caching");
}

#[tokio::test]
async fn a_block_size_that_events_contradict_is_found() {
    let sim = sim(|_| {}).await;
    let mut options = options(sim.http);
    options.config.model.block_size = 32;
    let report = examine(&options).await;
    expect(&report, "block_size", Some(false), "32 tokens by its pages, [16] by its events", "model.block_size: 16");
}

#[tokio::test]
async fn a_clock_that_is_wrong_is_found() {
    let sim = sim(|_| {}).await;
    let date = Some("Sun, 06 Nov 1994 08:49:37 GMT");
    let front = Front::start(sim.http, Box::new(|_, _| None), Box::new(|_, _| {}), date).await;
    let report = examine(&options(front.address)).await;
    expect(&report, "clock", Some(false), "behind ours", "time server");
}

#[tokio::test]
async fn settings_of_the_sidecar_are_checked_too() {
    let sim = sim(|_| {}).await;
    let mut options = options(sim.http);
    options.model = Some("other".into());
    options.config.allow_paths = vec!["/collective_rpc".into()];
    options.config.trust.client_embeddings = true;
    options.config.blocks.blocks_max = 10;
    let report = examine(&options).await;
    expect(&report, "models", Some(false), "no other among tiny-vl", "--model");
    expect(&report, "dangerous_endpoints", Some(false), "/collective_rpc", "allow_paths");
    expect(&report, "version_traps", Some(false), "embeds", "trust.client_embeddings");
    expect(&report, "limits", Some(false), "blocks of 16 tokens", "blocks.blocks_max");
}

#[tokio::test]
async fn an_engine_that_wants_a_key_is_not_guessed_at() {
    let sim = sim(|_| {}).await;
    let before: Box<super::front::Before> = Box::new(|path, _| path.starts_with("/v1/").then(|| (401, "{}".into())));
    let report = behind(&sim, before, Box::new(|_, _| {})).await;
    expect(&report, "engine", Some(false), "401", "--api-key");
    assert!(report.checks[2..].iter().all(|check| check.ok.is_none()));
    assert_eq!(report.status(), 1);
}

#[tokio::test]
async fn an_engine_that_is_not_ready_is_reached_but_wrong() {
    let sim = sim(|_| {}).await;
    let before: Box<super::front::Before> = Box::new(|path, _| (path == "/health").then(|| (503, "".into())));
    let report = behind(&sim, before, Box::new(|_, _| {})).await;
    expect(&report, "reachable", Some(false), "503", "started");
    assert_eq!(report.status(), 1);
}
