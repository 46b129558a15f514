//! What crosses the sidecar and what does not, against a scripted engine; cancelling also against the simulated one.

use std::time::Duration;

use fovea_gossip::preamble::{self, Identity, Preamble};
use fovea_kv::MediaId;
use fovea_service::config::ByteSize;
use http_body_util::BodyExt;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::balancer::Balancer;
use crate::engine::{Engine, Note};
use crate::rig::{self, Sidecar, config, sim};

const CHAT: &str = concat!(
    r#"{"messages":[{"role":"user","content":[{"type":"image_url","image_url":{"url":"data:image/png;base64,AAAA"},"#,
    r#""uuid":"mine"},{"type":"text","text":"hi"}]}],"model":"m"}"#
);

async fn rig() -> (Engine, Sidecar) {
    let engine = Engine::start().await;
    let sidecar = rig::start(config(engine.address, &[])).await;
    (engine, sidecar)
}

#[tokio::test]
async fn client_uuids_and_our_headers_do_not_cross() {
    let (_engine, sidecar) = rig().await;
    let sent = [("x-request-id", "r1"), ("x-data-parallel-rank", "3"), ("x-fovea-worker", "w"), ("authorization", "k")];
    let answer = sidecar.post("/v1/chat/completions?a=1", &sent, CHAT).await;
    assert!(answer.headers().get("x-fovea-secret").is_none() && answer.headers()["x-engine"] == "yes");
    let echo = rig::json(answer).await;
    assert_eq!(echo["query"], "a=1");
    assert_eq!(echo["body"], CHAT.replace(r#","uuid":"mine""#, ""));
    let headers = echo["headers"].as_object().unwrap();
    assert_eq!((&headers["x-request-id"], &headers["authorization"]), (&"r1".into(), &"k".into()));
    for name in ["x-data-parallel-rank", "x-fovea-worker", "transfer-encoding"] {
        assert!(!headers.contains_key(name), "{name}");
    }
}

fn record() -> Vec<u8> {
    let at = |part: &str| CHAT.find(part).unwrap() as u64;
    preamble::encode(&Preamble {
        prompt_tokens: 40,
        identities: vec![Identity { insert_at: at(r#""type":"image_url""#), id: MediaId([0xcd; 32]), tokens: 4 }],
        cuts: vec![(at(r#","uuid":"mine""#), r#","uuid":"mine""#.len() as u64)],
        ..Preamble::default()
    })
}

#[tokio::test]
async fn a_balancers_identities_are_set_in_the_engines_dialect() {
    let (_engine, sidecar) = rig().await;
    let record = record();
    let length = record.len().to_string();
    let answer = sidecar
        .post("/v1/chat/completions", &[(preamble::HEADER, length.as_str())], [&record[..], CHAT.as_bytes()].concat())
        .await;
    let echo = rig::json(answer).await;
    let body: serde_json::Value = serde_json::from_str(echo["body"].as_str().unwrap()).unwrap();
    let part = &body["messages"][0]["content"][0];
    assert_eq!((&part["uuid"], &part["type"]), (&"cd".repeat(32).into(), &"image_url".into()));
    assert_eq!(echo["headers"]["content-length"], echo["body"].as_str().unwrap().len().to_string());
    assert!(echo["headers"].get(preamble::HEADER).is_none());
}

#[tokio::test]
async fn a_preamble_is_taken_from_trusted_peers_only() {
    let engine = Engine::start().await;
    let mut config = config(engine.address, &[]);
    (config.trust.loopback, config.trust.shared_key) = (false, "secret".into());
    let sidecar = rig::start(config).await;
    let record = record();
    let (length, body) = (record.len().to_string(), [&record[..], CHAT.as_bytes()].concat());
    for (key, status) in [("secret", 200), ("secrets", 403), ("", 403)] {
        let headers = [(preamble::HEADER, length.as_str()), ("x-fovea-key", key)];
        let answer = sidecar.post("/v1/chat/completions", &headers, body.clone()).await;
        assert_eq!(answer.status().as_u16(), status, "{key}");
    }
    let answer =
        sidecar.post("/v1/chat/completions", &[(preamble::HEADER, "zz"), ("x-fovea-key", "secret")], body).await;
    assert_eq!(answer.status(), 400);
    assert_eq!(rig::json(answer).await["error"]["type"], "bad_preamble");
}

#[tokio::test]
async fn only_listed_paths_reach_the_engine() {
    let engine = Engine::start().await;
    let mut config = config(engine.address, &[]);
    config.allow_paths = vec!["/extra".into()];
    let sidecar = rig::start(config).await;
    for (path, status) in [("/reset_prefix_cache", 403), ("/collective_rpc", 403), ("/metrics", 403), ("/extra", 404)] {
        let answer = sidecar.post(path, &[], "{}").await;
        assert_eq!(answer.status().as_u16(), status, "{path}");
        if status == 403 {
            assert_eq!(rig::json(answer).await["error"]["type"], "path_not_allowed");
        }
    }
}

#[tokio::test]
async fn the_engines_errors_pass_untouched() {
    let (_engine, sidecar) = rig().await;
    let answer = sidecar.post("/tokenize", &[], r#"{"model":"m","prompt":"x"}"#).await;
    assert_eq!(answer.status(), 422);
    assert_eq!(
        rig::text(answer).await,
        r#"{"error":{"message":"no","type":"BadRequestError","param":null,"code":422}}"#
    );
}

#[tokio::test]
async fn an_answer_streams_piece_by_piece() {
    let (engine, sidecar) = rig().await;
    let mut answer = sidecar.post("/v1/completions", &[], r#"{"model":"m","prompt":"x","stream":true}"#).await;
    let pieces = engine.pieces.clone().unwrap();
    for piece in ["data: a\n\n", "data: b\n\n"] {
        pieces.send(piece).await.unwrap();
        let frame = answer.frame().await.unwrap().unwrap().into_data().unwrap();
        assert_eq!(frame, piece);
    }
}

/// A request whose connection the test holds.
async fn open(sidecar: &Sidecar, path: &str) -> TcpStream {
    let mut stream = TcpStream::connect(sidecar.http).await.unwrap();
    let body = r#"{"model":"m","prompt":"x","stream":true}"#;
    let head = format!("POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all(head.as_bytes()).await.unwrap();
    stream.write_all(body.as_bytes()).await.unwrap();
    stream
}

async fn next(engine: &mut Engine) -> Note {
    tokio::time::timeout(Duration::from_secs(20), engine.notes.recv()).await.unwrap().unwrap()
}

#[tokio::test]
async fn a_client_that_leaves_during_prefill_cancels_at_the_engine() {
    let (mut engine, sidecar) = rig().await;
    let client = open(&sidecar, "/v1/embeddings").await;
    assert_eq!(next(&mut engine).await, Note::Began);
    drop(client);
    assert_eq!(next(&mut engine).await, Note::Left);
}

#[tokio::test]
async fn a_client_that_leaves_while_the_engine_is_silent_cancels_too() {
    let (mut engine, sidecar) = rig().await;
    let mut client = open(&sidecar, "/v1/completions").await;
    assert_eq!(next(&mut engine).await, Note::Began);
    engine.pieces.as_ref().unwrap().send("data: a\n\n").await.unwrap();
    let mut seen = vec![0; 4096];
    assert!(client.read(&mut seen).await.unwrap() > 0);
    drop(client);
    assert_eq!(next(&mut engine).await, Note::Left);
}

#[tokio::test]
async fn a_leaving_client_aborts_the_simulated_engines_job_and_weighs_nothing() {
    let (sim, balancer) = (sim(|config| (config.speed, config.decode_ms) = (1.0, 50.0)).await, Balancer::start().await);
    let sidecar = rig::start(config(sim.http, &[balancer.address])).await;
    balancer.until("a hello", |seen| seen.hello.is_some()).await;
    let mut stream = TcpStream::connect(sidecar.http).await.unwrap();
    let body = r#"{"model":"tiny-vl","prompt":[1,2,3,4,5,6,7,8],"max_tokens":1000,"stream":true}"#;
    let head = format!("POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n", body.len());
    stream.write_all((head + body).as_bytes()).await.unwrap();
    sim.wait_for(|state| state.counts.running == 1).await;
    balancer.until("a running request", |seen| seen.load.running == 1).await;
    drop(stream);
    assert_eq!(sim.wait_for(|state| state.counts.aborted == 1).await.counts.running, 0);
    let idle = balancer.until("no load", |seen| seen.load.running == 0 && seen.load.waiting == 0).await.load;
    assert_eq!((idle.prefill_tokens, idle.decode_tokens), (0, 0));
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused_before_it_is_sent() {
    let engine = Engine::start().await;
    let mut config = config(engine.address, &[]);
    config.limits.body_max = ByteSize::kib(1);
    let sidecar = rig::start(config).await;
    let mut stream = TcpStream::connect(sidecar.http).await.unwrap();
    stream.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 2000\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 413 ") && answer.contains("body_too_long"), "{answer}");
}

#[tokio::test]
async fn a_chunked_body_behind_a_preamble_obeys_the_limit() {
    let engine = Engine::start().await;
    let mut config = config(engine.address, &[]);
    config.limits.body_max = ByteSize::kib(1);
    let sidecar = rig::start(config).await;
    let record = preamble::encode(&Preamble::default());
    let mut stream = TcpStream::connect(sidecar.http).await.unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n";
    let head = format!("{head}{}: {}\r\n\r\n{:x}\r\n", preamble::HEADER, record.len(), record.len());
    let rest = format!("\r\n7d0\r\n{}\r\n0\r\n\r\n", " ".repeat(2000));
    stream.write_all(&[head.as_bytes(), &record, rest.as_bytes()].concat()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 413 ") && answer.contains("body_too_long"), "{answer}");
}

#[tokio::test]
async fn a_reset_whose_answer_nobody_saw_counts_as_one() {
    let mut engine = Engine::start().await;
    let mut config = config(engine.address, &[]);
    config.allow_paths = vec!["/pause".into()];
    let sidecar = rig::start(config).await;
    let mut resets = sidecar.state.resets();
    let client = open(&sidecar, "/pause").await;
    assert_eq!(next(&mut engine).await, Note::Began);
    assert!(!resets.has_changed().unwrap());
    drop(client);
    tokio::time::timeout(Duration::from_secs(20), resets.changed()).await.unwrap().unwrap();
}

#[tokio::test]
async fn json_that_cannot_be_scanned_is_named_with_its_place() {
    let (_engine, sidecar) = rig().await;
    let answer = sidecar.post("/v1/chat/completions", &[], "{\"messages\": [}").await;
    assert_eq!(answer.status(), 400);
    let error = rig::json(answer).await;
    assert_eq!(error["error"]["type"], "bad_json");
    assert!(error["error"]["message"].as_str().unwrap().contains("line 1"), "{error}");
}

#[tokio::test]
async fn a_connection_that_sends_no_head_is_closed() {
    let engine = Engine::start().await;
    let mut config = config(engine.address, &[]);
    config.timeouts.client_head = Duration::from_millis(200);
    let sidecar = rig::start(config).await;
    let whole = "GET /v1/models HTTP/1.1\r\nhost: a\r\n\r\n";
    for begun in ["", "P", "POST /v1/completions HTTP/1.1\r\n", whole] {
        let mut stream = TcpStream::connect(sidecar.http).await.unwrap();
        stream.write_all(begun.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let closed = stream.read_to_end(&mut answer);
        assert!(tokio::time::timeout(Duration::from_secs(20), closed).await.is_ok(), "{begun}");
    }
}

/// Sends bytes as they are, and gives all that comes back.
async fn raw(sidecar: &Sidecar, request: &str) -> String {
    let mut stream = TcpStream::connect(sidecar.http).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    answer
}

#[tokio::test]
async fn a_body_has_one_length_on_both_sides() {
    let (_engine, sidecar) = rig().await;
    let post = |headers: &str, body: &str| {
        format!("POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n{headers}\r\n{body}")
    };
    for headers in
        ["content-length: 2\r\ncontent-length: 30\r\n", "content-length: 2, 30\r\n", "transfer-encoding: xchunked\r\n"]
    {
        let answer = raw(&sidecar, &post(headers, "{}")).await;
        assert!(answer.starts_with("HTTP/1.1 400 "), "{headers}{answer}");
    }
    let body = r#"{"model":"m","messages":[]}"#;
    let chunked = format!("{:x}\r\n{body}\r\n0\r\n\r\n", body.len());
    let answer = raw(&sidecar, &post("transfer-encoding: chunked\r\ncontent-length: 3\r\n", &chunked)).await;
    let length = format!(r#""content-length":"{}""#, body.len());
    let refused = answer.starts_with("HTTP/1.1 400 ");
    assert!(refused || answer.contains(&length) && !answer.contains("transfer-encoding\":"), "{answer}");
}

#[tokio::test]
async fn a_stop_waits_for_the_answer_in_progress() {
    let (mut engine, sidecar) = rig().await;
    let mut answer = sidecar.post("/v1/completions", &[], r#"{"model":"m","prompt":"x"}"#).await;
    let pieces = engine.pieces.take().unwrap();
    sidecar.shutdown.request();
    pieces.send("end").await.unwrap();
    drop(pieces);
    assert_eq!(answer.frame().await.unwrap().unwrap().into_data().unwrap(), "end");
    assert!(answer.frame().await.is_none());
    sidecar.ended().await;
}
