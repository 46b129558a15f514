//! Framing that proxies disagree about, HTTP/2, shutdown, and what the choice sees of requests under way.

use std::time::Instant;

use super::support::{CHAT, PATIENCE, Script, Seen, balancer, chat, post, sidecar, talk};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";

/// Sends `head` and a chunked empty chat body; the status line of the answer.
async fn check_framing(headers: &str, expect: &str) {
    let balancer = balancer("").await;
    let head = format!("POST {CHAT} HTTP/1.1\r\nhost: b\r\n{headers}\r\n");
    let answer = talk(balancer.http, &format!("{head}2\r\n{{}}\r\n0\r\n\r\n")).await;
    assert!(answer.starts_with(&format!("HTTP/1.1 {expect}")), "{headers:?}: {answer}");
    assert_eq!(answer.matches("HTTP/1.1 ").count(), 1, "{headers:?}: {answer}");
}

#[tokio::test]
async fn ambiguous_framing_is_refused_or_ends_the_connection() {
    // Both: the chunks count, and the connection serves nothing more.
    check_framing("transfer-encoding: chunked\r\ncontent-length: 5\r\n", "400").await;
    check_framing("content-length: 5\r\ncontent-length: 6\r\n", "400").await;
    check_framing("content-length: 5, 6\r\n", "400").await;
    check_framing("content-length: +5\r\n", "400").await;
    check_framing("transfer-encoding: chunked, identity\r\n", "400").await;
    check_framing("transfer-encoding : chunked\r\n", "400").await;
    check_framing("x: a\r\n b\r\ntransfer-encoding: chunked\r\n", "400").await;
    check_framing("transfer-encoding:\r\n chunked\r\n", "400").await;
}

/// Reads until the connection ends; true when it did.
async fn ends(client: &mut TcpStream) -> bool {
    matches!(tokio::time::timeout(PATIENCE, client.read_to_end(&mut Vec::new())).await, Ok(Ok(_)))
}

#[tokio::test]
async fn an_idle_http_2_connection_is_closed_as_others_are() {
    let balancer = balancer("timeouts: {client_idle: 100ms}").await;
    let mut client = TcpStream::connect(balancer.http).await.unwrap();
    client.write_all(PREFACE).await.unwrap();
    assert!(ends(&mut client).await);
}

#[tokio::test]
async fn an_idle_http_2_connection_does_not_hold_a_stopping_balancer() {
    let balancer = balancer("").await;
    let mut client = TcpStream::connect(balancer.http).await.unwrap();
    client.write_all(PREFACE).await.unwrap();
    client.read_exact(&mut [0; 9]).await.unwrap();
    balancer.shutdown.request();
    // GOAWAY, to which a client answers by closing.
    let mut frames = Vec::new();
    while !frames.windows(4).any(|window| window == [8, 7, 0, 0]) {
        assert!(client.read_buf(&mut frames).await.unwrap() > 0, "{frames:?}");
    }
    drop(client);
    assert_eq!(balancer.shutdown.drain(PATIENCE).await, fovea_service::shutdown::Drained::Idle);
}

#[tokio::test]
async fn a_refused_prompt_is_not_assumed_cached() {
    let dir = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/vllm/tiny-qwen3-vl");
    let raw = "HTTP/1.1 400 Bad Request\r\ncontent-length: 2\r\n\r\n{}";
    let balancer = balancer(&format!("models: [{{name: tiny-vl, dir: {dir}}}]")).await;
    let _sidecar = sidecar(&balancer, Script::Raw(raw)).await;
    let body = chat("tiny-vl").replace("hello", &"hello ".repeat(99));
    for _ in 0..2 {
        let answer = talk(balancer.http, &post(CHAT, "connection: close\r\n", &body)).await;
        assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    }
    balancer.until(|b| b.metric("balancer_requests_in_flight") == 0).await;
    assert!(balancer.metric("balancer_prompt_tokens_total") > 200);
    assert_eq!(balancer.metric("balancer_reused_tokens_predicted_total"), 0);
}

#[tokio::test]
async fn prompts_that_nobody_could_count_are_load_too() {
    let balancer = balancer("").await;
    let (mut first, mut second) = (sidecar(&balancer, Script::Silent).await, sidecar(&balancer, Script::Silent).await);
    let mut clients = Vec::new();
    for _ in 0..8 {
        let mut client = TcpStream::connect(balancer.http).await.unwrap();
        client.write_all(post(CHAT, "", &chat("tiny-vl")).as_bytes()).await.unwrap();
        clients.push(client);
        let seen = tokio::select! { seen = first.seen.recv() => seen, seen = second.seen.recv() => seen };
        assert!(matches!(seen, Some(Seen::Request { .. })));
    }
    let mut booked = Vec::new();
    balancer.workers.each(Instant::now(), |worker, _| booked.push(worker.load.booked()));
    assert_eq!(booked, [4, 4]);
}
