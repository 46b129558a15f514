//! Captured SGLang event streams teach the pads of every image in them, and nothing else. So do TensorRT-LLM's samples its digests.

#![expect(clippy::unwrap_used, reason = "a test: a vector that cannot be read is a failure")]

mod rank;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use fovea_gossip::message::LearntValue;
use fovea_gossip::preamble::Slot;
use fovea_kv::event::KvEvent;
use fovea_kv::{BlockSize, MediaId, MediaKey, RoutingView, root, sglang, trtllm};
use fovea_sidecar_core::verify::{Cause, Expected, FlightId, Found, Outcome, Reason, Shown, Verdict};
use rank::Rank;
use serde_json::Value;

const VECTORS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/sglang");
const VERSIONS: [&str; 5] = ["0.5.16", "0.5.19", "0.5.21", "0.5.22", "0.5.23"];

fn number(value: &Value) -> u32 {
    u32::try_from(value.as_u64().unwrap()).unwrap()
}

fn payload(frame: &Value) -> Vec<u8> {
    let hex = frame["payload_hex"].as_str().unwrap();
    (0..hex.len()).step_by(2).map(|at| u8::from_str_radix(&hex[at..at + 2], 16).unwrap()).collect()
}

/// What we would call the image; the capture's own hash serves.
fn key(image: &Value) -> MediaKey {
    let mut key = [0; 32];
    let hash = image["hash_hex"].as_str().unwrap().as_bytes();
    key[..hash.len()].copy_from_slice(hash);
    MediaKey(key)
}

/// What a balancer predicts that knows no pads yet.
fn expected(capture: &Value, request: &Value) -> Expected {
    let mut view = RoutingView::default();
    let tokens = request["placeholder_ids"].as_array().unwrap();
    tokens.iter().for_each(|token| view.push(number(token), 1));
    let slot = |image: &Value| {
        let (start, last) = (number(&image["offset"][0]), number(&image["offset"][1]));
        Slot { start, len: last + 1 - start, key: key(image), known: false }
    };
    Expected {
        prompt_tokens: view.len(),
        view,
        slots: request["images"].as_array().into_iter().flatten().map(slot).collect(),
        root: root("", request["cache_salt"].as_str().unwrap_or("")),
        block_size: BlockSize::new(number(&capture["page_size"])).unwrap(),
        exact: false,
        reused_tokens: 0,
        session: request["session_id"].as_str().map(Arc::from),
        shown: Shown::Pads,
    }
}

/// Plays a capture, one request after another or all of them in flight from the start; gives the true pads too.
fn play(path: &str, together: bool) -> (Rank, Vec<Verdict>, BTreeMap<MediaKey, Vec<u32>>) {
    let capture: Value =
        serde_json::from_str(&std::fs::read_to_string(PathBuf::from(VECTORS).join(path)).unwrap()).unwrap();
    let (mut rank, mut truth, mut verdicts) = (Rank::new(), BTreeMap::new(), Vec::new());
    let steps: Vec<_> = (0..).map(FlightId).zip(capture["steps"].as_array().unwrap()).collect();
    for (id, step) in steps.iter().filter(|(_, step)| step["request"].is_object() && together) {
        rank.begin(*id, expected(&capture, &step["request"]));
    }
    for (id, step) in &steps {
        let request = &step["request"];
        if request.is_object() && !together {
            rank.begin(*id, expected(&capture, request));
        }
        for image in request["images"].as_array().into_iter().flatten() {
            let pads = image["pads"].as_array().unwrap().iter().map(|pad| sglang::token(pad.as_u64().unwrap()));
            truth.insert(key(image), pads.collect());
        }
        if step["frame"].is_object() {
            rank.apply(&sglang::decode(&payload(&step["frame"])).unwrap().events);
        }
        if request.is_object() && !together {
            verdicts.extend(rank.end(*id, Outcome::default()));
        }
    }
    if together {
        steps.iter().for_each(|(id, _)| verdicts.extend(rank.end(*id, Outcome::default())));
    }
    (rank, verdicts, truth)
}

/// All images of the capture are learnt, equal to the engine's pads, and nothing contradicts anything.
#[track_caller]
fn check(path: &str, together: bool) -> Vec<Found> {
    let (mut rank, verdicts, truth) = play(path, together);
    assert!(!truth.is_empty(), "{path} has images");
    for (key, pads) in &truth {
        let value = rank.verifier.learnt(key).map(|(_, value)| value);
        assert_eq!(value, Some(LearntValue::Pads(pads.clone())), "{path} {key}: {:?}", rank.verifier.counters());
    }
    let counters = rank.verifier.counters();
    assert_eq!((counters.conflicts, counters.irregular, counters.token_count), (0, 0, 0), "{path}");
    let mut told: Vec<_> = rank.verifier.drain_learnt().into_iter().map(|fact| fact.key).collect();
    told.sort_unstable();
    assert!(told.iter().eq(truth.keys()), "{path}");
    assert_eq!((rank.verifier.divergences().count(), rank.verifier.media_trusted()), (0, true), "{path}");
    verdicts.into_iter().map(|verdict| verdict.found).collect()
}

#[test]
fn every_version_teaches_the_pads_of_its_images() {
    for version in VERSIONS {
        let found = check(&format!("{version}/mm_text_image.json"), false);
        // Two new images; the first again, without an event; both in one prompt, where they have fewer tokens than was learnt.
        let new = Found::Unchecked(Reason::Inexact);
        assert_eq!(found, [new, new, Found::Exact, new], "{version}");
    }
}

#[test]
fn sessions_tell_requests_of_one_text_apart() {
    // Image A fills 21, 10 and 7 positions in turn here, which no real image does: never as many as were seen last.
    let found = check("0.5.23/mm_sessions_unified_rust.json", false);
    assert_eq!(found, [Found::Unchecked(Reason::Inexact); 5]);
    check("0.5.23/mm_sessions_unified_rust.json", true);
}

#[test]
fn without_sessions_nothing_false_is_learnt_of_requests_in_flight_together() {
    for version in VERSIONS {
        let (rank, _, truth) = play(&format!("{version}/mm_text_image.json"), true);
        for (key, pads) in truth {
            let learnt = rank.verifier.learnt(&key).map(|(_, value)| value);
            assert!(learnt.is_none_or(|value| value == LearntValue::Pads(pads)), "{version} {key}");
        }
        assert!(rank.verifier.counters().ambiguous > 0, "{version}");
    }
}

#[test]
fn digests_of_tensorrt_llm_are_learnt() {
    let path = PathBuf::from(VECTORS).with_file_name("trtllm").join("events.json");
    let samples: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let media = trtllm::Media { placeholder: Some(151_655), vocab_size: Some(152_000) };
    let key = MediaKey([1; 32]);
    let expected = |len: u32| {
        let mut view = RoutingView::default();
        [(1, 1), (2, 1), (151_655, len), (7, 1), (9, 1), (10, 1)]
            .into_iter()
            .for_each(|(token, count)| view.push(token, count));
        Expected {
            prompt_tokens: view.len(),
            view,
            slots: vec![Slot { start: 2, len, key, known: false }],
            root: root("", ""),
            block_size: BlockSize::new(4).unwrap(),
            exact: false,
            reused_tokens: 0,
            session: None,
            shown: Shown::Spans,
        }
    };
    for manager in ["buffered_events_v1_manager", "buffered_events_v2_manager"] {
        let events = trtllm::pull(samples[manager].to_string().as_bytes(), media).unwrap();
        let events: Vec<_> = events.into_iter().filter_map(|pulled| pulled.event.ok()).collect();
        let shows_media = |event: &KvEvent| matches!(event, KvEvent::Stored(stored) if stored.extra.iter().any(|e| !e.media.is_empty()));
        let image = events.iter().position(shows_media).unwrap();
        for len in [4, 3] {
            let mut rank = Rank::new();
            rank.apply(&events[..image]);
            rank.begin(FlightId(1), expected(len));
            rank.apply(&events[image..=image]);
            let found = rank.end(FlightId(1), Outcome::default())[0].found;
            assert_eq!(
                matches!(found, Found::Diverged { cause: Cause::MediaCount, .. }),
                len == 3,
                "{manager}: {found:?}"
            );
            let digest = std::array::from_fn(|index| u8::try_from(index).unwrap());
            assert_eq!(rank.verifier.learnt(&key), Some((4, LearntValue::Id(MediaId(digest)))), "{manager}");
        }
    }
}
