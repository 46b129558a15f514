//! More than the workers can take, and clients that are slow, many or gone.
#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::time::{Duration, Instant};

use bytes::Bytes;
use e2e::{Fleet, FleetConfig, Mode, eventually};
use futures_util::future::join_all;
use http::Method;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const SOON: Duration = Duration::from_secs(20);

fn ask(text: &str, stream: bool, max_tokens: u32, priority: i64) -> Bytes {
    let messages = json!([{"role": "user", "content": text}]);
    let body = json!({"model": "tiny-vl", "stream": stream, "max_tokens": max_tokens, "priority": priority, "messages": messages});
    body.to_string().into()
}

/// One engine that is saturated by two requests.
async fn narrow(extra: &str) -> Fleet {
    let mut config = FleetConfig::tiny(1, Mode::Precise);
    config.engine_args = ["--block-size", "32", "--blocks", "4000", "--decode-ms", "10"].map(str::to_owned).to_vec();
    config.balancer_extra = extra.to_owned();
    Fleet::start(config).await.unwrap()
}

async fn engine(fleet: &Fleet) -> Value {
    fleet.engine_states().await.unwrap().remove(0)
}

async fn metric(fleet: &Fleet, name: &str) -> f64 {
    let page = fleet.balancer_metrics().await.unwrap();
    let value = page.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    value.unwrap_or_else(|| panic!("{name} not in:\n{page}"))
}

async fn waiting(fleet: &Fleet, count: f64) {
    eventually(&format!("{count} wait"), SOON, || async {
        Ok((metric(fleet, "balancer_queue_waiting ").await == count).then_some(()))
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn a_saturated_pool_makes_requests_wait_and_serves_them_all() {
    let fleet = narrow("queue: {requests_max: 2}\n").await;
    let url = fleet.chat_url().unwrap();
    let answers = (0..12).map(|n| fleet.client.post(&url, ask(&format!("word {n}"), n % 2 == 0, 10, 0)));
    let all = join_all(answers);
    let most = async {
        let mut most = 0;
        loop {
            let state = engine(&fleet).await;
            most = most.max(state["running"].as_u64().unwrap() + state["waiting"].as_u64().unwrap());
            if state["served"].as_u64() >= Some(12) {
                return most;
            }
        }
    };
    let (answers, most) = tokio::join!(all, most);
    assert!(answers.into_iter().all(|answer| answer.unwrap().status == 200));
    assert!(most <= 3, "{most} requests at an engine that was to have 2");
    fleet.quiet().await.unwrap();
    assert_eq!(metric(&fleet, "balancer_queue_waiting ").await, 0.0);
}

#[tokio::test]
async fn lower_priority_goes_first_and_a_client_that_leaves_gives_up_its_place() {
    let fleet = narrow("queue: {requests_max: 1}\n").await;
    let url = fleet.chat_url().unwrap();
    let send = |priority: i64, tokens: u32| {
        let (client, url) = (fleet.client.clone(), url.clone());
        tokio::spawn(async move {
            let answer = client.post(&url, ask(&format!("p{priority}"), false, tokens, priority)).await.unwrap();
            assert_eq!(answer.status, 200);
            Instant::now()
        })
    };
    let first = send(0, 100);
    eventually("the first runs", SOON, || async { Ok((engine(&fleet).await["running"] == 1).then_some(())) })
        .await
        .unwrap();
    let late = send(5, 2);
    waiting(&fleet, 1.0).await;
    let gone = send(-9, 2);
    waiting(&fleet, 2.0).await;
    let urgent = send(-5, 2);
    waiting(&fleet, 3.0).await;
    gone.abort();
    waiting(&fleet, 2.0).await;
    let (first, late, urgent) = (first.await.unwrap(), late.await.unwrap(), urgent.await.unwrap());
    assert!(first < urgent && urgent < late);
    assert_eq!(engine(&fleet).await["served"], 3);
    fleet.quiet().await.unwrap();
}

#[tokio::test]
async fn a_wait_and_a_queue_are_bounded() {
    let fleet = narrow("queue: {requests_max: 1, waiting_max: 2, wait_max: 400ms, status: 429}\n").await;
    let url = fleet.chat_url().unwrap();
    let (client, long) = (fleet.client.clone(), url.clone());
    let long = tokio::spawn(async move { client.post(&long, ask("long", false, 300, 0)).await.unwrap().status });
    eventually("the first runs", SOON, || async { Ok((engine(&fleet).await["running"] == 1).then_some(())) })
        .await
        .unwrap();
    let answers = join_all((0..5).map(|n| fleet.client.post(&url, ask(&format!("{n}"), false, 1, 0)))).await;
    for answer in answers {
        let answer = answer.unwrap();
        assert_eq!((answer.status.as_u16(), &answer.json().unwrap()["error"]["code"]), (429, &json!("overloaded")));
        assert!((1..=5).contains(&answer.header("retry-after").parse::<u32>().unwrap()));
    }
    assert_eq!(metric(&fleet, "balancer_queue_refused_total ").await, 5.0);
    assert_eq!(long.await.unwrap(), 200);
}

/// LOD-03: nothing stays booked for clients that left.
#[tokio::test]
async fn requests_cancelled_at_any_point_leave_nothing_booked() {
    let fleet = narrow("queue: {requests_max: 4}\n").await;
    let url = fleet.chat_url().unwrap();
    let cancelled = (0..200_u64).map(|n| {
        let (client, url) = (fleet.client.clone(), url.clone());
        async move {
            let body = ask(&format!("word {n}"), n % 3 != 0, 30, (n % 5).cast_signed());
            let request = async {
                let answer = client.open(Method::POST, &url, &[], body).await.unwrap();
                answer.into_body().collect().await.map(drop)
            };
            let _ = tokio::time::timeout(Duration::from_millis(n * 7 % 500), request).await;
        }
    });
    join_all(cancelled).await;
    fleet.quiet().await.unwrap();
    assert_eq!(metric(&fleet, "balancer_queue_waiting ").await, 0.0);
    let last = fleet.client.post(&url, ask("last", false, 2, 0)).await.unwrap();
    assert_eq!(last.status, 200);
}

async fn raw(fleet: &Fleet) -> TcpStream {
    TcpStream::connect(fleet.balancer.addr("http").unwrap()).await.unwrap()
}

/// What the other side says before it closes; an error is a close too.
async fn last_words(mut stream: TcpStream) -> String {
    let mut said = Vec::new();
    let _ = tokio::time::timeout(SOON, stream.read_to_end(&mut said)).await.expect("the connection ends");
    String::from_utf8_lossy(&said).into_owned()
}

#[tokio::test]
async fn many_slow_heads_and_bodies_end_in_time_and_harm_nobody() {
    let mut config = FleetConfig::tiny(1, Mode::Precise);
    config.balancer_extra =
        "timeouts: {client_headers: 700ms, client_idle: 800ms, client_body: 900ms}\nlimits: {bodies_max: 64MiB, body_max: 16MiB}\n"
            .to_owned();
    let fleet = Fleet::start(config).await.unwrap();
    let began = Instant::now();
    let slow = (0..150).map(|n| {
        let fleet = &fleet;
        async move {
            let mut stream = raw(fleet).await;
            let text = match n % 3 {
                0 => "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\nx: ",
                1 => "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: 100000\r\n\r\n{\"model\"",
                _ => "POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ntransfer-encoding: chunked\r\n\r\n5\r\n{\"mod",
            };
            stream.write_all(text.as_bytes()).await.unwrap();
            (n, last_words(stream).await)
        }
    });
    let served = async {
        for n in 0..20 {
            let answer = fleet.client.post(&fleet.chat_url().unwrap(), ask(&format!("{n}"), n % 2 == 0, 2, 0)).await;
            assert_eq!(answer.unwrap().status, 200);
        }
    };
    let (said, ()) = tokio::join!(join_all(slow), served);
    for (n, said) in said {
        assert!(n % 3 == 0 || said.starts_with("HTTP/1.1 408"), "{n}: {said}");
    }
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    eventually("all budget is back", SOON, || async {
        Ok((metric(&fleet, "balancer_body_bytes_in_flight ").await == 0.0).then_some(()))
    })
    .await
    .unwrap();
}

#[tokio::test]
async fn clients_that_do_not_read_are_cut_off_and_harm_nobody() {
    let mut config = FleetConfig::tiny(1, Mode::Precise);
    config.balancer_extra = "timeouts: {client_write: 1s}\n".to_owned();
    let fleet = Fleet::start(config).await.unwrap();
    let body = ask("tell me all", true, 3500, 0);
    let mut deaf = Vec::new();
    for _ in 0..30 {
        let mut stream = raw(&fleet).await;
        let head = format!("POST /v1/chat/completions HTTP/1.1\r\nhost: a\r\ncontent-length: {}\r\n\r\n", body.len());
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(&body).await.unwrap();
        deaf.push(stream);
    }
    for n in 0..10 {
        let answer = fleet.client.post(&fleet.chat_url().unwrap(), ask(&format!("{n}"), false, 2, 0)).await.unwrap();
        assert_eq!(answer.status, 200);
    }
    fleet.quiet().await.unwrap();
    drop(deaf);
}

#[tokio::test]
async fn two_thousand_streams_at_once_are_all_served() {
    let mut config = FleetConfig::tiny(2, Mode::Precise);
    config.engine_args = ["--speed", "0", "--block-size", "32", "--blocks", "40000", "--max-running", "4000"]
        .map(str::to_owned)
        .to_vec();
    let fleet = Fleet::start(config).await.unwrap();
    let url = fleet.chat_url().unwrap();
    let streams = (0..2000).map(|n| {
        let (client, url) = (fleet.client.clone(), url.clone());
        async move { client.stream(&url, ask(&format!("stream {n}"), true, 4, 0)).await }
    });
    let failed: Vec<_> = join_all(streams)
        .await
        .into_iter()
        .filter(|answer| !answer.as_ref().is_ok_and(|answer| answer.status == 200 && answer.text.contains("[DONE]")))
        .collect();
    assert!(failed.is_empty(), "{} failed, first: {:?}", failed.len(), failed.first());
    fleet.quiet().await.unwrap();
}
