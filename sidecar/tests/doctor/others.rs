//! Checks of an SGLang-shaped and a TensorRT-LLM-shaped engine.

use engine_sim::SimConfig;
use engine_sim::config::EngineKind;
use fovea_sidecar::doctor::examine;
use serde_json::json;

use super::front::{After, Front, behind, expect, options, sim};

fn sglang(version: &'static str, page_size: usize) -> impl FnOnce(&mut SimConfig) {
    move |config| {
        config.engine_kind = EngineKind::Sglang;
        config.engine_version = Some(version.into());
        config.block_size = page_size;
        config.blocks = 8192;
    }
}

#[tokio::test]
async fn sound_sglang_engines_of_all_event_forms_pass() {
    for (version, page_size) in [("0.5.16", 16), ("0.5.19", 1), ("0.5.21", 64), ("0.5.22", 1), ("0.5.23", 16)] {
        let sim = sim(sglang(version, page_size)).await;
        let report = examine(&options(sim.http)).await;
        assert_eq!(report.status(), 0, "{version}: {report:?}");
        for name in ["events_on", "events_reachable", "replay_on", "block_size", "usage_details", "media_repeatable"] {
            expect(&report, name, Some(true), "", "");
        }
        expect(&report, "engine", Some(true), version, "");
        expect(&report, "identity_honoured", Some(true), "same pads", "");
    }
}

#[tokio::test]
async fn random_image_hashes_of_sglang_are_found() {
    let sim = sim(|config| {
        sglang("0.5.23", 16)(config);
        config.random_media_hash = true;
    })
    .await;
    let report = examine(&options(sim.http)).await;
    expect(&report, "media_repeatable", Some(false), "other pads", "SGLANG_MM_SKIP_COMPUTE_HASH");
    assert_eq!(report.status(), 1);
}

#[tokio::test]
async fn an_sglang_engine_without_events_gets_its_own_flag() {
    let sim = sim(sglang("0.5.23", 16)).await;
    let after: Box<After> = Box::new(|path, answer| {
        if path == "/server_info" {
            answer["kv_events"] = json!(null);
            answer["kv_events_config"] = json!(null);
            answer["disable_radix_cache"] = json!(true);
        }
    });
    let report = behind(&sim, Box::new(|_, _| None), after).await;
    expect(&report, "events_on", Some(false), "no events", "--kv-events-config '{\"publisher\":\"zmq\"");
    expect(&report, "prefix_caching_on", Some(false), "off", "--disable-radix-cache");
}

#[tokio::test]
async fn an_sglang_publisher_with_a_concrete_host_connects() {
    let sim = sim(sglang("0.5.21", 16)).await;
    let after: Box<After> = Box::new(|path, answer| {
        if path == "/server_info" {
            answer["kv_events"] = json!(null);
            answer["kv_events_config"] = r#"{"publisher":"zmq","endpoint":"tcp://127.0.0.1:5557"}"#.into();
        }
    });
    let report = behind(&sim, Box::new(|_, _| None), after).await;
    expect(&report, "events_on", Some(true), "sent to tcp://127.0.0.1:5557", "");
    expect(&report, "events_reachable", Some(false), "instead of binding", "\"tcp://*:5557\"");
}

#[tokio::test]
async fn a_queue_of_events_is_read_by_the_probe_only() {
    let sim = sim(|config| {
        config.engine_kind = EngineKind::Trtllm;
        config.block_size = 32;
    })
    .await;
    let front = Front::plain(sim.http).await;
    let mut options = options(front.address);
    options.probe = false;
    let report = examine(&options).await;
    let seen = std::mem::take(&mut *front.seen.lock().unwrap());
    assert!(!seen.iter().any(|line| line.ends_with("/kv_cache_events")), "{seen:?}");
    expect(&report, "events_on", None, "only the probe", "event_buffer_max_size");
    options.probe = true;
    options.config.model.engine_model = "/models/tiny".into();
    let report = examine(&options).await;
    assert_eq!(report.status(), 0, "{report:?}");
    expect(&report, "events_on", Some(true), "queue", "");
    expect(&report, "identity_honoured", Some(true), "same mm_keys", "");
    expect(&report, "media_repeatable", Some(true), "one identity", "");
}
