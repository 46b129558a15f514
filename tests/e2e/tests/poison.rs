//! Requests under which engines die, engines that fail, and pools in which everybody has enough.
#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::time::Duration;

use bytes::Bytes;
use e2e::{Fleet, FleetConfig, Mode, eventually};
use futures_util::future::join_all;
use http::Method;
use http_body_util::BodyExt;
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(20);
const MAGIC: &str = "xyzzy";

fn ask(text: &str, stream: bool, max_tokens: u32) -> Bytes {
    let messages = json!([{"role": "user", "content": text}]);
    json!({"model": "tiny-vl", "stream": stream, "max_tokens": max_tokens, "messages": messages}).to_string().into()
}

async fn fault(fleet: &Fleet, engine: usize, fault: Value) {
    let url = format!("http://{}/sim/fault", fleet.engines[engine].addr("http").unwrap());
    let answer = fleet.client.post(&url, fault.to_string()).await.unwrap();
    assert_eq!(answer.status, 200, "{:?}", answer.body);
}

/// Engines that answer.
async fn alive(fleet: &Fleet) -> usize {
    let states = fleet.engines.iter().map(|engine| async {
        let url = format!("http://{}/sim/state", engine.addr("http")?);
        fleet.client.get_json(&url).await
    });
    join_all(states).await.into_iter().filter(Result::is_ok).count()
}

/// A counter of the balancer.
async fn counter(fleet: &Fleet, name: &str) -> f64 {
    let page = fleet.balancer_metrics().await.unwrap();
    let value = page.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    value.unwrap_or_else(|| panic!("{name} not in:\n{page}"))
}

async fn armed(workers: usize, after_tokens: usize) -> Fleet {
    let mut config = FleetConfig::tiny(workers, Mode::RoundRobin);
    config.balancer_extra = "health: {slow_start: 0s}\n".to_owned();
    let fleet = Fleet::start(config).await.unwrap();
    for engine in 0..workers {
        fault(&fleet, engine, json!({"fault": "die_of", "text": MAGIC, "after_tokens": after_tokens})).await;
    }
    fleet
}

#[tokio::test]
async fn a_poison_request_ends_two_engines_and_no_more() {
    let fleet = armed(4, 0).await;
    let url = fleet.chat_url().unwrap();
    let first = fleet.client.post(&url, ask(MAGIC, false, 5)).await.unwrap();
    assert_eq!((first.status.as_u16(), &first.json().unwrap()["error"]["code"]), (422, &json!("poison")));
    fleet.wait_for_workers(2).await.unwrap();
    for stream in [false, true] {
        // White space makes no other request of it.
        let again = format!(" {}", String::from_utf8_lossy(&ask(MAGIC, false, 5)).replace(":", ": "));
        let again = if stream {
            fleet.client.post(&url, again).await
        } else {
            fleet.client.post(&url, ask(MAGIC, false, 5)).await
        };
        assert_eq!(again.unwrap().status, 422);
    }
    assert_eq!(alive(&fleet).await, 2);
    for n in 0..6 {
        let other = fleet.client.post(&url, ask(&format!("word {n}"), n % 2 == 0, 5)).await.unwrap();
        assert_eq!(other.status, 200, "{:?}", other.body);
    }
    assert!(counter(&fleet, "balancer_engine_deaths_total").await >= 2.0);
    assert_eq!(counter(&fleet, "balancer_quarantine_refused_total").await, 2.0);
}

#[tokio::test]
async fn a_stream_cut_by_a_death_counts_too() {
    let fleet = armed(4, 2).await;
    let url = fleet.chat_url().unwrap();
    for deaths in 1..=2_u32 {
        let response = fleet.client.open(Method::POST, &url, &[], ask(MAGIC, true, 50)).await.unwrap();
        assert_eq!(response.status(), 200);
        // A clean cut: an error in place of the end, and soon.
        let rest = tokio::time::timeout(SOON, response.into_body().collect()).await.expect("no hang");
        assert!(rest.is_err(), "the answer looks whole");
        fleet.wait_for_workers(4 - deaths as usize).await.unwrap();
    }
    assert_eq!(fleet.client.post(&url, ask(MAGIC, true, 50)).await.unwrap().status, 422);
    assert_eq!(alive(&fleet).await, 2);
}

#[tokio::test]
async fn those_that_die_beside_a_poison_request_are_served() {
    let mut config = FleetConfig::tiny(4, Mode::RoundRobin);
    config.engine_args = ["--block-size", "32", "--blocks", "4000", "--decode-ms", "30"].map(str::to_owned).to_vec();
    config.balancer_extra = "health: {slow_start: 0s}\n".to_owned();
    let fleet = Fleet::start(config).await.unwrap();
    for engine in 0..4 {
        fault(&fleet, engine, json!({"fault": "die_of", "text": MAGIC})).await;
    }
    let url = fleet.chat_url().unwrap();
    // Answers that are not streamed: nothing of them has been seen when their engine dies.
    let others = (0..24).map(|n| {
        let (client, url) = (fleet.client.clone(), url.clone());
        tokio::spawn(async move { client.post(&url, ask(&format!("other {n}"), false, 40)).await.unwrap() })
    });
    let others: Vec<_> = others.collect();
    eventually("others run", SOON, || async {
        let states = fleet.engine_states().await?;
        Ok(states.iter().all(|state| state["running"].as_u64() >= Some(3)).then_some(()))
    })
    .await
    .unwrap();
    let poison = fleet.client.post(&url, ask(MAGIC, false, 5)).await.unwrap();
    assert_eq!(poison.status, 422, "{:?}", poison.body);
    let answers = join_all(others).await;
    let failed: Vec<_> = answers.iter().map(|answer| answer.as_ref().unwrap()).filter(|a| a.status != 200).collect();
    assert!(failed.is_empty(), "{} of {} failed, first: {:?}", failed.len(), answers.len(), failed[0]);
    assert_eq!(alive(&fleet).await, 2);
}

#[tokio::test]
async fn a_slow_answer_is_no_death() {
    let mut config = FleetConfig::tiny(1, Mode::RoundRobin);
    config.balancer_extra = "timeouts: {total: 300ms}\n".to_owned();
    let fleet = Fleet::start(config).await.unwrap();
    fault(&fleet, 0, json!({"fault": "stall"})).await;
    let url = fleet.chat_url().unwrap();
    for _ in 0..3 {
        assert_eq!(fleet.client.post(&url, ask("slow", false, 5)).await.unwrap().status, 504);
    }
    fault(&fleet, 0, json!({"fault": "resume"})).await;
    assert_eq!(fleet.client.post(&url, ask("slow", false, 5)).await.unwrap().status, 200);
    assert_eq!(counter(&fleet, "balancer_engine_deaths_total").await, 0.0);
}

#[tokio::test]
async fn an_engine_that_fails_again_and_again_is_left_out_and_comes_back() {
    let mut config = FleetConfig::tiny(3, Mode::RoundRobin);
    config.balancer_extra = "health: {open_for: 1s, slow_start: 0s}\n".to_owned();
    let fleet = Fleet::start(config).await.unwrap();
    let url = fleet.chat_url().unwrap();
    fault(&fleet, 0, json!({"fault": "error", "count": 1000, "status": 500})).await;
    let mut failed = 0;
    for n in 0..30 {
        failed += usize::from(fleet.client.post(&url, ask(&format!("{n}"), false, 2)).await.unwrap().status == 500);
    }
    assert!((5..=6).contains(&failed), "{failed} requests met the sick engine");
    fault(&fleet, 0, json!({"fault": "error", "count": 0, "status": 500})).await;
    eventually("the engine serves again", SOON, || async {
        fleet.client.post(&url, ask("probe", false, 2)).await?;
        let served = fleet.engine_states().await?[0]["served"].as_u64();
        Ok((served > Some(3)).then_some(()))
    })
    .await
    .unwrap();
    assert_eq!(counter(&fleet, "balancer_ejections_total").await, 1.0);
}

#[tokio::test]
async fn a_client_error_ejects_nobody() {
    let fleet = Fleet::start(FleetConfig::tiny(2, Mode::RoundRobin)).await.unwrap();
    let url = fleet.chat_url().unwrap();
    for status in [400, 429] {
        for engine in 0..2 {
            fault(&fleet, engine, json!({"fault": "error", "count": 10, "status": status})).await;
        }
        for _ in 0..20 {
            assert_eq!(fleet.client.post(&url, ask("x", false, 2)).await.unwrap().status, status);
        }
    }
    assert_eq!(fleet.client.post(&url, ask("x", false, 2)).await.unwrap().status, 200);
    assert_eq!(counter(&fleet, "balancer_workers_ejected").await, 0.0);
}
