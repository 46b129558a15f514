//! Programs that die without a word, connections that hang, and a machine that runs out of something.
#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::process::Stdio;
use std::time::Duration;

use bytes::Bytes;
use e2e::client::Client;
use e2e::{Fleet, FleetConfig, Mode, bin_dir, eventually, tiny_model};
use futures_util::future::join_all;
use http::Method;
use http_body_util::BodyExt;
use serde_json::json;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::net::TcpStream;
use tokio::process::{Child, Command};

const SOON: Duration = Duration::from_secs(20);

fn ask(text: &str, stream: bool, max_tokens: u32) -> Bytes {
    let messages = json!([{"role": "user", "content": text}]);
    json!({"model": "tiny-vl", "stream": stream, "max_tokens": max_tokens, "messages": messages}).to_string().into()
}

fn slow(workers: usize) -> FleetConfig {
    let mut config = FleetConfig::tiny(workers, Mode::RoundRobin);
    config.engine_args = ["--block-size", "32", "--blocks", "4000", "--decode-ms", "10"].map(str::to_owned).to_vec();
    config.balancer_extra = "health: {slow_start: 0s}\n".to_owned();
    config
}

/// Starts answers that are not streamed, so that no byte of them has been sent, and waits until they run.
async fn in_flight(fleet: &Fleet, count: usize) -> Vec<tokio::task::JoinHandle<e2e::client::Answer>> {
    let url = fleet.chat_url().unwrap();
    let sent = (0..count).map(|n| {
        let (client, url) = (fleet.client.clone(), url.clone());
        tokio::spawn(async move { client.post(&url, ask(&format!("request {n}"), false, 60)).await.unwrap() })
    });
    let sent: Vec<_> = sent.collect();
    eventually("all run", SOON, || async {
        let running = fleet.engine_states().await?.iter().filter_map(|state| state["running"].as_u64()).sum::<u64>();
        Ok((running == count as u64).then_some(()))
    })
    .await
    .unwrap();
    sent
}

async fn all_served(sent: Vec<tokio::task::JoinHandle<e2e::client::Answer>>) {
    let count = sent.len();
    let answers = join_all(sent).await;
    let failed: Vec<_> = answers.iter().map(|answer| answer.as_ref().unwrap()).filter(|a| a.status != 200).collect();
    assert!(failed.is_empty(), "{} of {count} failed, first: {:?}", failed.len(), failed[0]);
}

#[tokio::test]
async fn a_sidecar_that_is_killed_under_load_costs_no_request_without_a_byte() {
    let mut fleet = Fleet::start(slow(3)).await.unwrap();
    let sent = in_flight(&fleet, 144).await;
    fleet.sidecars.remove(0).kill().await.unwrap();
    all_served(sent).await;
    fleet.quiet().await.unwrap();
}

#[tokio::test]
async fn an_engine_that_is_killed_under_load_costs_no_request_without_a_byte() {
    let mut fleet = Fleet::start(slow(3)).await.unwrap();
    let sent = in_flight(&fleet, 144).await;
    fleet.engines.remove(0).kill().await.unwrap();
    all_served(sent).await;
}

#[tokio::test]
async fn a_death_in_mid_stream_is_a_cut_and_no_hang() {
    let mut fleet = Fleet::start(slow(1)).await.unwrap();
    let response =
        fleet.client.open(Method::POST, &fleet.chat_url().unwrap(), &[], ask("long", true, 1000)).await.unwrap();
    let mut body = response.into_body();
    body.frame().await.unwrap().unwrap();
    fleet.engines.remove(0).kill().await.unwrap();
    let rest = tokio::time::timeout(Duration::from_secs(5), body.collect()).await.expect("no hang");
    assert!(rest.is_err(), "the cut looks like an end");
}

#[tokio::test]
async fn a_worker_that_takes_connections_and_says_nothing_is_given_up_on() {
    let fleet = Fleet::start(FleetConfig {
        balancer_extra: "timeouts: {first_byte: 500ms}\n".to_owned(),
        ..FleetConfig::tiny(2, Mode::RoundRobin)
    })
    .await
    .unwrap();
    let pid = fleet.sidecars[0].pid().unwrap().to_string();
    // The kernel goes on taking connections for a process that is stopped.
    assert!(Command::new("kill").args(["-STOP", &pid]).status().await.unwrap().success());
    let url = fleet.chat_url().unwrap();
    // Its silence takes it out of the choice; until then a request may end with 504.
    eventually("only the other is asked", SOON, || async {
        let answers = join_all((0..4).map(|n| fleet.client.post(&url, ask(&format!("{n}"), true, 2)))).await;
        Ok(answers.iter().all(|answer| answer.as_ref().is_ok_and(|answer| answer.status == 200)).then_some(()))
    })
    .await
    .unwrap();
    assert!(Command::new("kill").args(["-CONT", &pid]).status().await.unwrap().success());
    fleet.wait_for_workers(2).await.unwrap();
}

/// A balancer started by a shell that first does `before`, with its stderr to `stderr`.
async fn balancer(dir: &std::path::Path, before: &str, stderr: &str) -> (Child, serde_json::Value) {
    let yaml = format!(
        "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nsync: 127.0.0.1:0\nmodels: [{{name: tiny-vl, dir: {}}}]\nlog: {{filter: trace}}\n",
        tiny_model().display()
    );
    let config = dir.join("cramped.yaml");
    tokio::fs::write(&config, yaml).await.unwrap();
    let program = bin_dir().unwrap().join("fovea-balancer");
    let line = format!("{before} exec '{}' run --config '{}' 2>{stderr}", program.display(), config.display());
    let mut shell = Command::new("sh");
    let mut child =
        shell.args(["-c", &line]).stdin(Stdio::null()).stdout(Stdio::piped()).kill_on_drop(true).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    let line = tokio::time::timeout(SOON, lines.next_line()).await.unwrap().unwrap().expect("a ready line");
    tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
    (child, serde_json::from_str(&line).unwrap())
}

#[tokio::test]
async fn logs_to_a_full_disk_do_not_stop_service() {
    let dir = tempfile::tempdir().unwrap();
    let (mut child, ready) = balancer(dir.path(), "", "/dev/full").await;
    let client = Client::default();
    for _ in 0..20 {
        let answer = client.get(&format!("http://{}/health", ready["http"].as_str().unwrap())).await.unwrap();
        assert_eq!(answer.status, 200);
    }
    assert!(child.try_wait().unwrap().is_none());
}

#[tokio::test]
async fn a_balancer_without_file_descriptors_recovers() {
    let dir = tempfile::tempdir().unwrap();
    let (mut child, ready) = balancer(dir.path(), "ulimit -n 64;", "/dev/null").await;
    let address = ready["http"].as_str().unwrap();
    let held = join_all((0..120).map(|_| TcpStream::connect(address))).await;
    assert!(held.iter().all(Result::is_ok));
    let client = Client::default();
    let none = tokio::time::timeout(Duration::from_millis(500), client.get(&format!("http://{address}/health"))).await;
    assert!(none.is_err(), "there were descriptors left: {none:?}");
    drop(held);
    eventually("it serves again", SOON, || async {
        let answer =
            tokio::time::timeout(Duration::from_secs(1), Client::default().get(&format!("http://{address}/health")))
                .await;
        Ok(answer.is_ok_and(|answer| answer.is_ok_and(|answer| answer.status == 200)).then_some(()))
    })
    .await
    .unwrap();
    assert!(child.try_wait().unwrap().is_none());
}
