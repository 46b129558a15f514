use std::time::Duration;

use fovea_gossip::message::EngineKind;
use fovea_gossip::preamble::Identity;
use fovea_kv::{BlockSize, MediaId};
use fovea_service::config::ByteSize;
use fovea_sidecar_core::verify::{FlightId, Shown};

use super::*;
use crate::engine::version::Version;

fn bodies(body_max: u64) -> Bodies {
    let limits = Limits { body_max: ByteSize(body_max), ..Limits::default() };
    Bodies {
        budget: Budget::new(1 << 20, Duration::from_secs(1)),
        limits,
        timeouts: Timeouts::default(),
        client_embeddings: false,
    }
}

fn request(body: impl Into<Bytes>) -> Request<Body> {
    Request::post("/v1/chat/completions").body(body::full(body)).unwrap()
}

async fn sent(request: Request<Body>) -> (Option<String>, String) {
    let length = request.headers().get(header::CONTENT_LENGTH).map(|value| value.to_str().unwrap().to_owned());
    let bytes = request.into_body().collect().await.unwrap().to_bytes();
    (length, String::from_utf8(bytes.to_vec()).unwrap())
}

const CHAT: &str = concat!(
    r#"{"model":"m","messages":[{"role":"user","content":["#,
    r#"{"type":"image_url","image_url":{"url":"data:,x"},"uuid":"mine"},{"type":"text","text":"é"}]}],"#,
    r#""vllm_xargs":{"kv_cache_report_mode":"full","a":1}}"#
);

#[tokio::test]
async fn what_a_client_must_not_set_is_cut_out() {
    let mut request = request(CHAT);
    let weight = bodies(1 << 16).plain(&mut request, true).await.unwrap();
    let (length, body) = sent(request).await;
    assert_eq!(length.unwrap(), body.len().to_string());
    let value: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(value["vllm_xargs"], serde_json::json!({"a": 1}));
    let part = &value["messages"][0]["content"][0];
    assert!(part["uuid"].is_null() && part["image_url"]["url"] == "data:,x", "{part}");
    assert!(weight.dp_rank.is_none() && weight.prefill_tokens > 0);
}

#[tokio::test]
async fn other_bodies_pass_as_they_are() {
    for (body, scan) in [(r#"{"uuid": "#, false), ("", true), (r#"{"model":"m","messages":[]}"#, true)] {
        let mut request = request(body);
        bodies(1 << 16).plain(&mut request, scan).await.unwrap();
        assert_eq!(sent(request).await.1, body);
    }
}

#[tokio::test]
async fn json_that_cannot_be_scanned_is_refused() {
    for body in [&b"{"[..], b"\xff\xfe{\0}\0", br#"{"model":NaN,"messages":[]}"#] {
        let mut request = request(body);
        assert!(matches!(bodies(1 << 16).plain(&mut request, true).await, Err(Refusal::BadJson { .. })), "{body:?}");
    }
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused_before_it_is_read() {
    let mut long = request(vec![b' '; 101]);
    assert!(matches!(bodies(100).plain(&mut long, false).await, Err(Refusal::BodyTooLong { limit: 100 })));
    let chunks = futures_util::stream::iter(
        (0..50).map(|_| Ok::<_, std::io::Error>(http_body::Frame::data(Bytes::from("abc")))),
    );
    let mut chunked = Request::post("/").body(body::boxed(http_body_util::StreamBody::new(chunks))).unwrap();
    assert!(matches!(bodies(100).plain(&mut chunked, false).await, Err(Refusal::BodyTooLong { limit: 100 })));
}

const VLLM: Speaking =
    Speaking { kind: EngineKind::Vllm, version: None, flight: FlightId(1), block_size: None, pairs: false };

fn preamble() -> Preamble {
    let part = CHAT.find(r#""type":"image_url""#).unwrap() as u64;
    let uuid = CHAT.find(r#","uuid":"mine""#).unwrap() as u64;
    Preamble {
        dp_rank: 3,
        prompt_tokens: 100,
        reused_tokens: 64,
        identities: vec![Identity { insert_at: part, id: MediaId([0xab; 32]), tokens: 4 }],
        cuts: vec![(uuid, r#","uuid":"mine""#.len() as u64)],
        ..Preamble::default()
    }
}

#[tokio::test]
async fn a_preamble_sets_identities_and_weight() {
    let record = preamble::encode(&preamble());
    let mut request = request([&record[..], CHAT.as_bytes()].concat());
    let (weight, predicted) = bodies(1 << 16).with_preamble(&mut request, record.len(), &VLLM).await.unwrap();
    assert!(predicted.is_none(), "the record has no view");
    assert_eq!(weight, Weight { dp_rank: Some(3), prompt_tokens: 100, prefill_tokens: 36 });
    let (length, body) = sent(request).await;
    assert_eq!(length.unwrap(), body.len().to_string());
    let value: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!(value["messages"][0]["content"][0]["uuid"], "ab".repeat(32));
    assert_eq!(body.matches("uuid").count(), 1);
}

#[tokio::test]
async fn an_sglang_request_is_named_and_compared() {
    let record = Preamble { body_at: 1, runs: vec![(7, 40)], root: 9, exact: true, ..preamble() };
    let record = preamble::encode(&record);
    let mut request = request([&record[..], CHAT.as_bytes()].concat());
    let version = Version::parse("0.5.23");
    let sglang = Speaking { kind: EngineKind::Sglang, version, block_size: BlockSize::new(16), ..VLLM };
    let (_, predicted) = bodies(1 << 16).with_preamble(&mut request, record.len(), &sglang).await.unwrap();
    let Predicted(expected) = predicted.unwrap();
    assert_eq!((expected.view.len(), expected.session.as_deref(), expected.shown), (40, Some("fv-1"), Shown::Pads));
    let (length, body) = sent(request).await;
    assert_eq!(length.unwrap(), body.len().to_string());
    let value: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!((value["session_id"].as_str(), body.matches("uuid").count()), (Some("fv-1"), 0));
}

#[tokio::test]
async fn a_bad_preamble_is_refused() {
    let record = preamble::encode(&preamble());
    let whole = || Bytes::from([&record[..], CHAT.as_bytes()].concat());
    let cut = Bytes::copy_from_slice(&record[..record.len() - 1]);
    for (body, length) in
        [(cut, record.len()), (whole(), record.len() - 1), (whole(), 1 << 30), (Bytes::new(), 1), (whole(), 0)]
    {
        let answer = bodies(1 << 16).with_preamble(&mut request(body), length, &VLLM).await;
        assert!(matches!(answer, Err(Refusal::BadPreamble { .. })), "{length}: {answer:?}");
    }
}

#[tokio::test]
async fn the_limit_holds_for_the_body_behind_a_preamble() {
    let record = preamble::encode(&Preamble::default());
    let mut long = request([&record[..], &[b' '; 101]].concat());
    let answer = bodies(100).with_preamble(&mut long, record.len(), &VLLM).await;
    assert!(matches!(answer, Err(Refusal::BodyTooLong { limit: 100 })), "{answer:?}");
}

fn chunked(bytes: Vec<u8>) -> Request<Body> {
    let frame = Ok::<_, std::io::Error>(http_body::Frame::data(Bytes::from(bytes)));
    let body = http_body_util::StreamBody::new(futures_util::stream::iter([frame]));
    Request::post("/v1/chat/completions").body(body::boxed(body)).unwrap()
}

#[tokio::test]
async fn an_edit_beyond_the_body_is_refused() {
    let end = CHAT.len() as u64;
    let insert = |insert_at| Preamble {
        identities: vec![Identity { insert_at, id: MediaId([1; 32]), tokens: 4 }],
        ..Preamble::default()
    };
    let cut = |at, len| Preamble { cuts: vec![(at, len)], ..Preamble::default() };
    let cases = [(insert(end), true), (insert(end + 1), false), (cut(end - 1, 1), true), (cut(end - 1, 2), false)];
    for (index, (preamble, fits)) in cases.iter().enumerate() {
        let record = preamble::encode(preamble);
        let whole = [&record[..], CHAT.as_bytes()].concat();
        let told = bodies(1 << 16).with_preamble(&mut request(whole.clone()), record.len(), &VLLM).await;
        assert_eq!(!matches!(told, Err(Refusal::BadPreamble { .. })), *fits, "{index}: {told:?}");
        let mut untold = chunked(whole);
        bodies(1 << 16).with_preamble(&mut untold, record.len(), &VLLM).await.unwrap();
        assert_eq!(untold.into_body().collect().await.is_ok(), *fits, "{index} chunked");
    }
}

#[tokio::test]
async fn what_may_end_the_engine_is_refused() {
    let part = r#"{"type":"image_embeds","image_embeds":{"image_embeds":"AA"}}"#;
    for body in [
        format!(r#"{{"model":"m","messages":[{{"role":"user","content":[{part}]}}]}}"#),
        r#"{"model":"m","prompt_embeds":"AA"}"#.to_owned(),
        r#"{"model":"m","prompt":"a","cache_salt":"a b"}"#.to_owned(),
    ] {
        let refused = bodies(1 << 16).plain(&mut request(body.clone()), true).await.unwrap_err();
        assert!(matches!(refused, Refusal::Hazard(_)), "{body}: {refused}");
    }
}
