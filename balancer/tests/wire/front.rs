//! The front against scripted sidecars: what clients and sidecars see on the wire.

use std::time::Duration;

use super::support::{CHAT, Script, Seen, balancer, chat, post, say, sidecar, talk};
use fovea_gossip::message::FromSidecar;
use fovea_gossip::preamble;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const CLOSE: &str = "connection: close\r\n";

/// Answer to a chat request for the served model, with one sidecar behind.
async fn check(script: Script, body: &str, expect: &[&str]) {
    let balancer = balancer("debug_headers: true").await;
    let _sidecar = sidecar(&balancer, script).await;
    let answer = talk(balancer.http, &post(CHAT, CLOSE, body)).await;
    for part in expect {
        assert!(answer.contains(part), "{part:?} not in {answer:?}");
    }
}

#[tokio::test]
async fn an_answer_passes_untouched_with_our_headers() {
    let expect = [
        "HTTP/1.1 200",
        "\r\n\r\n{\"a\":1}",
        "x-fovea-worker: 127.0.0.1:",
        "x-fovea-view: none;reason=no_model_dir",
        "x-request-id: ",
    ];
    check(Script::Answer("{\"a\":1}"), &chat("tiny-vl"), &expect).await;
}

#[tokio::test]
async fn engine_errors_pass_untouched() {
    let raw = "HTTP/1.1 400 Bad Request\r\ncontent-length: 12\r\n\r\n{\"object\":1}";
    check(Script::Raw(raw), &chat("tiny-vl"), &["HTTP/1.1 400", "{\"object\":1}"]).await;
}

#[tokio::test]
async fn wrong_requests_are_named() {
    let wrong = |text: &str| text.to_owned();
    check(Script::Silent, &chat("other"), &["HTTP/1.1 404", "model_not_found"]).await;
    check(Script::Silent, &wrong("{\"model\": tru}"), &["HTTP/1.1 400", "line 1, column"]).await;
    check(Script::Silent, &wrong("{\"messages\":[]}"), &["HTTP/1.1 400", "\"param\":\"model\""]).await;
}

#[tokio::test]
async fn without_a_worker_clients_are_told_to_come_again() {
    let balancer = balancer("").await;
    let answer = talk(balancer.http, "GET /ready HTTP/1.1\r\nhost: b\r\nconnection: close\r\n\r\n").await;
    assert!(answer.starts_with("HTTP/1.1 503") && answer.to_lowercase().contains("retry-after: "), "{answer}");
    let mut gone = sidecar(&balancer, Script::Silent).await;
    let mut draining = super::support::hello(&format!("http://{}", gone.http), 32);
    draining.draining = true;
    say(&mut gone.link, &FromSidecar::Hello(draining)).await;
    balancer.until(|b| !b.workers.any_ready(std::time::Instant::now())).await;
    let answer = talk(balancer.http, &post(CHAT, CLOSE, &chat("tiny-vl"))).await;
    assert!(answer.starts_with("HTTP/1.1 503") && answer.to_lowercase().contains("retry-after: "), "{answer}");
}

#[tokio::test]
async fn other_paths_and_methods_are_refused_as_json() {
    let balancer = balancer("").await;
    for (request, status) in
        [("GET /metrics", "404"), ("GET /v1/completions", "405"), ("DELETE /v1/models", "405"), ("GET /health", "200")]
    {
        let answer = talk(balancer.http, &format!("{request} HTTP/1.1\r\nhost: b\r\nconnection: close\r\n\r\n")).await;
        assert!(
            answer.starts_with(&format!("HTTP/1.1 {status}")) && answer.contains("\r\n\r\n{"),
            "{request}: {answer}"
        );
    }
}

#[tokio::test]
async fn served_names_of_live_workers_are_the_models() {
    let balancer = balancer("").await;
    let mut sidecar = sidecar(&balancer, Script::Silent).await;
    let mut with_adapter = super::support::hello(&format!("http://{}", sidecar.http), 32);
    with_adapter.engine.lora_names = vec!["ada".to_owned()];
    say(&mut sidecar.link, &FromSidecar::Hello(with_adapter)).await;
    balancer.until(|b| b.metric(r#"balancer_sync_frames_total{kind="hello"}"#) == 2).await;
    let answer = talk(balancer.http, "GET /v1/models HTTP/1.1\r\nhost: b\r\nconnection: close\r\n\r\n").await;
    let list: serde_json::Value = serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap();
    let card = |id, root, parent: Option<&str>| {
        serde_json::json!({
            "id": id, "object": "model", "created": 0, "owned_by": "fovea", "root": root, "parent": parent,
            "max_model_len": 2048,
        })
    };
    let cards = [card("ada", "ada", Some("tiny-vl")), card("tiny-vl", "./tiny-qwen3-vl", None)];
    assert_eq!(list, serde_json::json!({"object": "list", "data": cards}));
}

#[tokio::test]
async fn a_body_over_the_limit_is_refused_before_it_is_read() {
    let balancer = balancer("limits: {body_max: 1KiB}").await;
    let mut client = TcpStream::connect(balancer.http).await.unwrap();
    client.write_all(b"POST /v1/completions HTTP/1.1\r\nhost: b\r\ncontent-length: 1000000000\r\n\r\n{").await.unwrap();
    let mut answer = [0; 12];
    client.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 413");
}

#[tokio::test]
async fn a_chunked_body_is_counted_while_it_comes() {
    let balancer = balancer("limits: {body_max: 1KiB}").await;
    let piece = format!("200\r\n{}\r\n", "x".repeat(0x200));
    let head = "POST /v1/completions HTTP/1.1\r\nhost: b\r\ntransfer-encoding: chunked\r\n\r\n";
    let answer = talk(balancer.http, &format!("{head}{piece}{piece}{piece}0\r\n\r\n")).await;
    assert!(answer.starts_with("HTTP/1.1 413"), "{answer}");
}

#[tokio::test]
async fn chunked_and_expecting_clients_are_served() {
    let balancer = balancer("").await;
    let mut sidecar = sidecar(&balancer, Script::Answer("ok")).await;
    let body = chat("tiny-vl");
    let pad = " ".repeat(200_000);
    let sent = format!("{body}{pad}");
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: b\r\n{CLOSE}transfer-encoding: chunked\r\n\r\n");
    let chunked = format!("{head}{:x}\r\n{body}\r\n{:x}\r\n{pad}\r\n0\r\n\r\n", body.len(), pad.len());
    assert!(talk(balancer.http, &chunked).await.ends_with("\r\n\r\nok"));
    let expecting =
        talk(balancer.http, &post(CHAT, "expect: 100-continue\r\nconnection: close\r\nx-fovea-preamble: 3\r\n", &sent))
            .await;
    assert!(expecting.starts_with("HTTP/1.1 100") && expecting.ends_with("\r\n\r\nok"), "{expecting}");
    for _ in 0..2 {
        let Some(Seen::Request { head, body }) = sidecar.seen.recv().await else { panic!("no request") };
        let announced: Vec<_> = head.lines().filter_map(|line| line.strip_prefix("x-fovea-preamble: ")).collect();
        let [announced] = announced[..] else { panic!("not one preamble: {head}") };
        let record: usize = announced.parse().unwrap();
        assert!(head.contains(&format!("content-length: {}\r\n", record + sent.len())), "{head}");
        assert!(!head.contains("expect") && !head.contains("transfer-encoding"), "{head}");
        assert!(body[record..] == *sent.as_bytes());
    }
}

#[tokio::test]
async fn headers_of_the_client_say_what_load_its_videos_make() {
    let balancer = balancer("estimate: {video: {tokensPerFrame: {mode: static}}}").await;
    let mut sidecar = sidecar(&balancer, Script::Answer("ok")).await;
    let part = r#"[{"type":"video_url","video_url":{"url":"http://a/b.mp4"}}]"#;
    let body = chat("tiny-vl").replace("\"hello there\"", part);
    // Two frames of one token a second; never more than the model's context of 2048.
    for (duration, tokens) in [("0.5", 1), ("500", 1000), ("1e9", 2048), ("two", 20)] {
        let headers = format!("{CLOSE}X-LLM-D-Video-Duration-Seconds: {duration}\r\n");
        talk(balancer.http, &post(CHAT, &headers, &body)).await;
        let Some(Seen::Request { body: sent, .. }) = sidecar.seen.recv().await else { panic!("no request") };
        let record = preamble::decode(&sent[..sent.len() - body.len()]).unwrap();
        let text = u32::try_from(body.len() - "http://a/b.mp4".len()).unwrap() / 4;
        assert_eq!(record.prompt_tokens, tokens + text, "{duration}");
    }
}

#[tokio::test]
async fn an_http_1_0_client_sees_the_end_by_the_end_of_the_connection() {
    let raw = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n";
    let balancer = balancer("").await;
    let _sidecar = sidecar(&balancer, Script::Raw(raw)).await;
    let answer = talk(balancer.http, &post(CHAT, "", &chat("tiny-vl")).replace("HTTP/1.1", "HTTP/1.0")).await;
    assert!(answer.ends_with("\r\n\r\nabc") && !answer.to_lowercase().contains("keep-alive"), "{answer}");
}

#[tokio::test]
async fn two_lengths_are_refused() {
    let balancer = balancer("").await;
    let twice = format!("POST {CHAT} HTTP/1.1\r\nhost: b\r\ncontent-length: 3\r\ncontent-length: 4\r\n\r\nabc");
    assert!(talk(balancer.http, &twice).await.starts_with("HTTP/1.1 400"));
}

#[tokio::test]
async fn one_connection_serves_many_requests() {
    let balancer = balancer("").await;
    let _sidecar = sidecar(&balancer, Script::Answer("ok")).await;
    let mut client = TcpStream::connect(balancer.http).await.unwrap();
    for _ in 0..3 {
        client.write_all(post(CHAT, "", &chat("tiny-vl")).as_bytes()).await.unwrap();
        let (head, body) = super::support::read_message(&mut client).await.unwrap();
        assert!(head.starts_with("http/1.1 200") && body == b"ok", "{head}");
    }
}

/// The client leaves; the sidecar's connection must end.
async fn check_cancel(script: Script, read_bytes: usize) {
    let balancer = balancer("").await;
    let mut sidecar = sidecar(&balancer, script).await;
    let mut client = TcpStream::connect(balancer.http).await.unwrap();
    client.write_all(post(CHAT, "", &chat("tiny-vl")).as_bytes()).await.unwrap();
    assert!(matches!(sidecar.seen.recv().await, Some(Seen::Request { .. })));
    client.read_exact(&mut vec![0; read_bytes]).await.unwrap();
    drop(client);
    let closed = tokio::time::timeout(Duration::from_secs(5), sidecar.seen.recv()).await;
    assert!(matches!(closed, Ok(Some(Seen::Closed))), "{closed:?}");
    balancer.until(|b| b.metric(r#"balancer_errors_total{kind="client_gone"}"#) == 1).await;
    let mut booked = 1;
    balancer.until(|b| b.metric("balancer_requests_in_flight") == 0).await;
    balancer.workers.each(std::time::Instant::now(), |worker, _| booked = worker.load.booked());
    assert_eq!(booked, 0);
}

#[tokio::test]
async fn a_client_that_leaves_during_prefill_ends_the_work() {
    check_cancel(Script::Silent, 0).await;
}

#[tokio::test]
async fn a_client_that_leaves_mid_stream_ends_the_work() {
    check_cancel(Script::OneEvent, 60).await;
}

#[tokio::test]
async fn an_answer_that_breaks_off_has_no_terminator() {
    let raw = "HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n";
    let balancer = balancer("").await;
    let _sidecar = sidecar(&balancer, Script::Raw(raw)).await;
    let answer = talk(balancer.http, &post(CHAT, "", &chat("tiny-vl"))).await;
    assert!(answer.contains("abc") && !answer.contains("\r\n0\r\n"), "{answer:?}");
}

/// Two sidecars, the first of which fails in some way: every request is served by the other.
async fn check_retry(bad: Script) {
    let balancer = balancer("mode: round_robin\nretry_percent: 100").await;
    let _bad = sidecar(&balancer, bad).await;
    let _good = sidecar(&balancer, Script::Answer("ok")).await;
    for _ in 0..4 {
        let answer = talk(balancer.http, &post(CHAT, CLOSE, &chat("tiny-vl"))).await;
        assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("ok"), "{answer}");
    }
    assert!(balancer.metric("balancer_retries_total") > 0);
}

#[tokio::test]
async fn a_503_goes_to_another_worker() {
    check_retry(Script::Raw("HTTP/1.1 503 Service Unavailable\r\ncontent-length: 0\r\n\r\n")).await;
}

#[tokio::test]
async fn a_worker_that_dies_before_the_first_byte_is_replaced() {
    check_retry(Script::Hang).await;
}

#[tokio::test]
async fn without_another_worker_the_503_passes() {
    let raw = "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nbusy";
    check(Script::Raw(raw), &chat("tiny-vl"), &["HTTP/1.1 503", "busy"]).await;
    check(Script::Hang, &chat("tiny-vl"), &["HTTP/1.1 502", "upstream_error"]).await;
}

#[tokio::test]
async fn a_503_outlives_a_second_try_that_brings_nothing() {
    let balancer = balancer("mode: round_robin\nretry_percent: 100").await;
    let busy = "HTTP/1.1 503 Service Unavailable\r\ncontent-length: 4\r\n\r\nbusy";
    let _busy = sidecar(&balancer, Script::Raw(busy)).await;
    let _dead = sidecar(&balancer, Script::Hang).await;
    for _ in 0..2 {
        let answer = talk(balancer.http, &post(CHAT, CLOSE, &chat("tiny-vl"))).await;
        assert!(answer.starts_with("HTTP/1.1 503") && answer.ends_with("busy"), "{answer}");
    }
}

#[tokio::test]
async fn a_stopping_balancer_ends_requests_and_closes_connections() {
    let balancer = balancer("").await;
    let mut sidecar = sidecar(&balancer, Script::OneEvent).await;
    let mut client = TcpStream::connect(balancer.http).await.unwrap();
    client.write_all(post(CHAT, "", &chat("tiny-vl")).as_bytes()).await.unwrap();
    assert!(matches!(sidecar.seen.recv().await, Some(Seen::Request { .. })));
    let idle = TcpStream::connect(balancer.http).await.unwrap();
    balancer.shutdown.request();
    let mut idle = idle;
    assert_eq!(idle.read(&mut [0; 1]).await.unwrap_or(0), 0);
    client.read_exact(&mut [0; 60]).await.unwrap();
    drop(client);
    assert_eq!(balancer.shutdown.drain(super::support::PATIENCE).await, fovea_service::shutdown::Drained::Idle);
}
