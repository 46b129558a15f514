//! Bad input and missing workers: a clear, typed answer each, and nothing breaks.

use e2e::{Fleet, FleetConfig, Mode, Program};
use http::Method;
use serde_json::json;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

fn small_bodies() -> FleetConfig {
    FleetConfig { balancer_extra: "limits:\n  body_max: 64KiB\n".into(), ..FleetConfig::tiny(1, Mode::Precise) }
}

#[tokio::test]
async fn bodies_that_are_wrong_are_refused_with_their_reason() {
    let fleet = Fleet::start(small_bodies()).await.unwrap();
    let url = fleet.chat_url().unwrap();
    let rows: [(&str, String, u16, &str); 5] = [
        ("a truncated body", r#"{"model": "tiny-vl", "messages": ["#.into(), 400, "line 1"),
        ("no messages", r#"{"model": "tiny-vl"}"#.into(), 400, "messages"),
        ("an unknown model", json!({"model": "nope", "messages": []}).to_string(), 404, "nope"),
        ("a body over the limit", format!("{{\"model\": \"tiny-vl\", \"x\": \"{}\"}}", "a".repeat(70_000)), 413, "64"),
        ("not JSON at all", "\u{1}\u{2}".into(), 400, ""),
    ];
    for (what, body, status, word) in rows {
        let answer = fleet.client.post(&url, body).await.unwrap();
        assert_eq!(answer.status, status, "{what}: {:?}", answer.body);
        let message = answer.json().unwrap()["error"]["message"].as_str().unwrap().to_owned();
        assert!(message.contains(word), "{what}: {message}");
        assert!(!answer.header("x-request-id").is_empty(), "{what}: no request id");
    }
    assert_eq!(fleet.client.post(&format!("{}/v1/nothing", fleet.url().unwrap()), "{}").await.unwrap().status, 404);
}

#[tokio::test]
async fn a_declared_length_over_the_limit_is_refused_before_the_body_is_read() {
    let fleet = Fleet::start(small_bodies()).await.unwrap();
    let mut stream = TcpStream::connect(fleet.balancer.addr("http").unwrap()).await.unwrap();
    stream
        .write_all(b"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000\r\n\r\n{")
        .await
        .unwrap();
    let mut answer = [0; 64];
    let read = stream.read(&mut answer).await.unwrap();
    assert!(answer[..read].starts_with(b"HTTP/1.1 413"), "{:?}", String::from_utf8_lossy(&answer[..read]));
}

#[tokio::test]
async fn an_engine_s_own_errors_pass_untouched() {
    let fleet = Fleet::start(FleetConfig::tiny(1, Mode::Precise)).await.unwrap();
    let body =
        json!({"model": "tiny-vl", "messages": [{"role": "user", "content": "hello ".repeat(3000)}], "max_tokens": 1})
            .to_string();
    let through = fleet.client.post(&fleet.chat_url().unwrap(), body.clone()).await.unwrap();
    let engine = format!("http://{}/v1/chat/completions", fleet.engines[0].addr("http").unwrap());
    let direct = fleet.client.post(&engine, body).await.unwrap();
    assert_eq!((through.status.as_u16(), &through.body), (400, &direct.body));
}

#[tokio::test]
async fn without_a_worker_a_declared_model_is_503_with_retry_after() {
    let fleet = Fleet::without_workers(FleetConfig::tiny(0, Mode::Precise)).await.unwrap();
    let answer = fleet
        .client
        .post(
            &fleet.chat_url().unwrap(),
            json!({"model": "tiny-vl", "messages": [{"role": "user", "content": "hi"}]}).to_string(),
        )
        .await
        .unwrap();
    assert_eq!(answer.status, 503, "{:?}", answer.body);
    let seconds: u32 = answer.header("retry-after").parse().unwrap();
    assert!((1..=5).contains(&seconds));
}

#[tokio::test]
async fn hostile_bytes_on_the_sync_port_end_that_stream_alone() {
    let fleet = Fleet::start(FleetConfig::tiny(1, Mode::Precise)).await.unwrap();
    let hostile: [&[u8]; 4] =
        [b"\xff\xff\xff\xff", b"\x08\x00\x00\x00garbage!", b"GET / HTTP/1.1\r\n\r\n", b"\x02\x00\x00\x00\x00\x00"];
    for bytes in hostile {
        let mut stream = TcpStream::connect(fleet.balancer.addr("sync").unwrap()).await.unwrap();
        stream.write_all(bytes).await.unwrap();
        stream.shutdown().await.unwrap();
        let mut rest = Vec::new();
        // The balancer closes it, with or without a reset.
        let _ = stream.read_to_end(&mut rest).await;
    }
    let answer = fleet
        .client
        .post(
            &fleet.chat_url().unwrap(),
            json!({"model": "tiny-vl", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}).to_string(),
        )
        .await
        .unwrap();
    assert_eq!(answer.status, 200);
}

#[tokio::test]
async fn hostile_event_frames_are_counted_and_nothing_dies() {
    let fleet = Fleet::start(FleetConfig::tiny(1, Mode::Precise)).await.unwrap();
    let engine = fleet.engines[0].addr("http").unwrap();
    let fault = fleet
        .client
        .post(&format!("http://{engine}/sim/fault"), json!({"fault": "garbage"}).to_string())
        .await
        .unwrap();
    assert_eq!(fault.status, 200, "{:?}", fault.body);
    let ask =
        json!({"model": "tiny-vl", "messages": [{"role": "user", "content": "word ".repeat(100)}], "max_tokens": 1})
            .to_string();
    assert_eq!(fleet.client.post(&fleet.chat_url().unwrap(), ask.clone()).await.unwrap().status, 200);
    fleet.wait_for_workers(1).await.unwrap();
    assert_eq!(fleet.client.post(&fleet.chat_url().unwrap(), ask).await.unwrap().status, 200);
}

#[tokio::test]
async fn a_config_with_a_typo_is_refused_with_its_place() {
    let dir = tempfile::tempdir().unwrap();
    for program in ["fovea-balancer", "fovea-sidecar"] {
        let (config, log) = (dir.path().join("c.yaml"), dir.path().join("log"));
        tokio::fs::write(&config, "listen: 127.0.0.1:0\nlissten: 1\n").await.unwrap();
        let args = ["run".to_owned(), "--config".to_owned(), config.display().to_string()];
        assert!(Program::start(program, &args, &log).await.is_err());
        let said = tokio::fs::read_to_string(&log).await.unwrap();
        assert!(said.contains("lissten") && said.contains(":2:"), "{program} said {said:?}");
        tokio::fs::remove_file(&log).await.unwrap();
    }
}

#[tokio::test]
async fn dangerous_engine_paths_are_refused_by_the_sidecar() {
    let fleet = Fleet::start(FleetConfig::tiny(1, Mode::Precise)).await.unwrap();
    let sidecar = fleet.sidecars[0].addr("http").unwrap();
    for path in ["/reset_prefix_cache", "/sleep", "/collective_rpc", "/metrics", "/v1/../reset_prefix_cache"] {
        let answer =
            fleet.client.send(Method::POST, &format!("http://{sidecar}{path}"), &[], "{}".into()).await.unwrap();
        assert_eq!(answer.status, 403, "{path}: {:?}", answer.body);
    }
}

#[tokio::test]
async fn a_sidecar_with_a_key_takes_preambles_from_those_who_know_it() {
    let config = FleetConfig {
        trust: "trust: {shared_key: right}",
        balancer_extra: "trust: {shared_key: right}\n".into(),
        ..FleetConfig::tiny(1, Mode::Precise)
    };
    let fleet = Fleet::start(config).await.unwrap();
    let ask = json!({"model": "tiny-vl", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}).to_string();
    let answer = fleet.client.post(&fleet.chat_url().unwrap(), ask.clone()).await.unwrap();
    assert_eq!(answer.status, 200, "{:?}", answer.body);
    let url = format!("http://{}/v1/chat/completions", fleet.sidecars[0].addr("http").unwrap());
    let headers = [("x-fovea-preamble", "7"), ("x-fovea-key", "wrong")];
    let answer = fleet.client.send(Method::POST, &url, &headers, ask.into()).await.unwrap();
    assert_eq!(answer.status, 403, "{:?}", answer.body);
}

#[tokio::test]
async fn what_may_end_an_engine_is_refused_on_both_ways_in() {
    let fleet = Fleet::start(FleetConfig::tiny(1, Mode::Precise)).await.unwrap();
    let part = json!({"type": "image_embeds", "image_embeds": {"image_embeds": "AA"}});
    let body = json!({"model": "tiny-vl", "messages": [{"role": "user", "content": [part]}]}).to_string();
    for program in [&fleet.balancer, &fleet.sidecars[0]] {
        let url = format!("http://{}/v1/chat/completions", program.addr("http").unwrap());
        let answer = fleet.client.post(&url, body.clone()).await.unwrap();
        assert_eq!((answer.status.as_u16(), &answer.json().unwrap()["error"]["param"]), (400, &json!("messages")));
    }
}
