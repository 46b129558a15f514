//! Clients leave, engines restart, workers die, programs are told to stop.

use std::time::Duration;

use e2e::client::Client;
use e2e::workload::four_pictures;
use e2e::{Fleet, FleetConfig, Mode, Program, eventually};
use http::Method;
use http_body_util::BodyExt;
use serde_json::{Value, json};

const SOON: Duration = Duration::from_secs(20);

fn slow(flags: &[&str]) -> FleetConfig {
    let mut config = FleetConfig::tiny(1, Mode::Precise);
    config.engine_args =
        ["--block-size", "32", "--blocks", "4000"].iter().chain(flags).map(|&arg| arg.to_owned()).collect();
    config
}

fn ask(words: usize, max_tokens: u32) -> String {
    json!({"model": "tiny-vl", "stream": true, "max_tokens": max_tokens, "messages": [{"role": "user", "content": "word ".repeat(words)}]}).to_string()
}

async fn state(client: &Client, engine: &Program) -> anyhow::Result<Value> {
    client.get_json(&format!("http://{}/sim/state", engine.addr("http")?)).await
}

/// Waits until the engine's counter has this value.
async fn reaches(fleet: &Fleet, counter: &str, value: u64) -> Value {
    let engine = &fleet.engines[0];
    eventually(&format!("{counter} = {value}"), SOON, || async {
        let state = state(&fleet.client, engine).await?;
        Ok((state[counter] == value).then_some(state))
    })
    .await
    .expect("the engine gets there")
}

#[tokio::test]
async fn a_client_that_leaves_mid_stream_stops_the_engine() {
    let fleet = Fleet::start(slow(&["--decode-ms", "20"])).await.unwrap();
    let response =
        fleet.client.open(Method::POST, &fleet.chat_url().unwrap(), &[], ask(20, 3000).into()).await.unwrap();
    assert_eq!(response.status(), 200);
    let mut body = response.into_body();
    body.frame().await.unwrap().unwrap();
    drop(body);
    let at_end = reaches(&fleet, "aborted", 1).await;
    assert!(at_end["generated_tokens"].as_u64().unwrap() < 1000);
    assert_eq!(at_end["running"], 0);
}

#[tokio::test]
async fn a_client_that_leaves_during_prefill_stops_the_engine_before_its_first_token() {
    let fleet = Fleet::start(slow(&["--prefill-tps", "50", "--max-model-len", "8192"])).await.unwrap();
    let (client, url) = (fleet.client.clone(), fleet.chat_url().unwrap());
    let request = tokio::spawn(async move { client.open(Method::POST, &url, &[], ask(2000, 5).into()).await });
    reaches(&fleet, "running", 1).await;
    request.abort();
    let at_end = reaches(&fleet, "aborted", 1).await;
    assert_eq!(at_end["generated_tokens"], 0);
}

#[tokio::test]
async fn a_restarted_engine_is_believed_to_hold_nothing() {
    let fleet = Fleet::start(FleetConfig::tiny(1, Mode::Precise)).await.unwrap();
    let (url, body) = (fleet.chat_url().unwrap(), four_pictures(1));
    fleet.client.stream(&url, body.clone()).await.unwrap();
    fleet.settled().await.unwrap();
    let fault = format!("http://{}/sim/fault", fleet.engines[0].addr("http").unwrap());
    fleet.client.post(&fault, json!({"fault": "restart"}).to_string()).await.unwrap();
    fleet.settled().await.unwrap();
    fleet.wait_for_workers(1).await.unwrap();
    let after = fleet.client.stream(&url, body.clone()).await.unwrap();
    assert!(after.header("x-fovea-overlap").starts_with("0/"), "{:?}", after.headers);
    fleet.settled().await.unwrap();
    let again = fleet.client.stream(&url, body).await.unwrap();
    assert!(!again.header("x-fovea-overlap").starts_with("0/"));
}

#[tokio::test]
async fn lost_and_reordered_events_are_replayed() {
    let fleet = Fleet::start(FleetConfig::tiny(1, Mode::Precise)).await.unwrap();
    let (url, fault) =
        (fleet.chat_url().unwrap(), format!("http://{}/sim/fault", fleet.engines[0].addr("http").unwrap()));
    for (i, kind) in
        [json!({"fault": "drop", "count": 1}), json!({"fault": "reorder"}), json!({"fault": "duplicate", "count": 1})]
            .into_iter()
            .enumerate()
    {
        let answer = fleet.client.post(&fault, kind.to_string()).await.unwrap();
        assert_eq!(answer.status, 200, "{:?}", answer.body);
        for k in 0..3 {
            fleet.client.stream(&url, four_pictures(i as u64 * 100 + k * 10)).await.unwrap();
        }
        fleet.settled().await.unwrap();
    }
}

#[tokio::test]
async fn a_dead_sidecar_costs_no_request() {
    let mut fleet = Fleet::start(FleetConfig::tiny(2, Mode::RoundRobin)).await.unwrap();
    fleet.sidecars.remove(0).kill().await.unwrap();
    for _ in 0..6 {
        let answer = fleet.client.stream(&fleet.chat_url().unwrap(), ask(30, 1).into()).await.unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text);
    }
    fleet.wait_for_workers(1).await.unwrap();
}

#[tokio::test]
async fn a_dead_engine_takes_no_more_requests() {
    let mut fleet = Fleet::start(FleetConfig::tiny(2, Mode::RoundRobin)).await.unwrap();
    fleet.engines.remove(0).kill().await.unwrap();
    fleet.wait_for_workers(1).await.unwrap();
    for _ in 0..4 {
        let answer = fleet.client.stream(&fleet.chat_url().unwrap(), ask(30, 1).into()).await.unwrap();
        assert_eq!(answer.status, 200, "{}", answer.text);
    }
}

#[tokio::test]
async fn programs_end_when_told_to() {
    let fleet = Fleet::start(FleetConfig::tiny(1, Mode::Precise)).await.unwrap();
    let Fleet { balancer, mut sidecars, .. } = fleet;
    let balancer = balancer.stop(SOON).await.unwrap();
    let sidecar = sidecars.remove(0).stop(SOON).await.unwrap();
    assert!(balancer.success() && sidecar.success(), "balancer {balancer}, sidecar {sidecar}");
}

#[tokio::test]
async fn a_stream_in_flight_ends_before_a_balancer_that_is_told_to_stop() {
    let fleet = Fleet::start(slow(&["--decode-ms", "20"])).await.unwrap();
    let response = fleet.client.open(Method::POST, &fleet.chat_url().unwrap(), &[], ask(20, 40).into()).await.unwrap();
    assert_eq!(response.status(), 200);
    let mut body = response.into_body();
    body.frame().await.unwrap().unwrap();
    let Fleet { balancer, engines, sidecars, .. } = fleet;
    let (status, rest) = tokio::join!(balancer.stop(SOON), body.collect());
    let text = String::from_utf8(rest.unwrap().to_bytes().to_vec()).unwrap();
    assert!(text.contains("[DONE]"), "the stream was cut: {text}");
    assert!(status.unwrap().success());
    drop((engines, sidecars));
}
