//! Drains and rolling restarts under load: no request is lost that a worker elsewhere could serve.
#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::SeqCst};
use std::time::{Duration, Instant};

use bytes::Bytes;
use e2e::client::Client;
use e2e::{Fleet, FleetConfig, Mode, Program, eventually, tiny_model};
use http::Method;
use http_body_util::BodyExt;
use serde_json::{Value, json};
use tokio::task::JoinHandle;

const SOON: Duration = Duration::from_secs(20);

fn ask(text: &str, max_tokens: u32) -> Bytes {
    let messages = json!([{"role": "user", "content": text}]);
    json!({"model": "tiny-vl", "stream": true, "max_tokens": max_tokens, "messages": messages}).to_string().into()
}

fn slow(workers: usize) -> FleetConfig {
    let mut config = FleetConfig::tiny(workers, Mode::Precise);
    config.engine_args = ["--block-size", "32", "--blocks", "4000", "--decode-ms", "10"].map(str::to_owned).to_vec();
    config.balancer_extra = "health: {slow_start: 0s}\n".to_owned();
    config
}

async fn drain(client: &Client, sidecar: &Program, query: &str) -> Value {
    client.get_json(&format!("http://{}/drain{query}", sidecar.addr("admin").unwrap())).await.unwrap()
}

#[tokio::test]
async fn a_drain_waits_for_streams_and_turns_new_requests_away() {
    let fleet = Fleet::start(slow(1)).await.unwrap();
    let url = fleet.chat_url().unwrap();
    let mut stream = fleet.client.open(Method::POST, &url, &[], ask("long", 100)).await.unwrap().into_body();
    stream.frame().await.unwrap().unwrap();
    let cut = drain(&fleet.client, &fleet.sidecars[0], "?wait=50ms").await;
    assert_eq!(cut, json!({"drained": false, "in_flight": 1}));
    let ready = fleet.client.get(&format!("http://{}/readyz", fleet.sidecars[0].addr("admin").unwrap())).await.unwrap();
    assert_eq!((ready.status.as_u16(), &ready.body[..]), (503, &b"draining\n"[..]));
    // The balancer knows, and so does whoever asks the sidecar itself.
    eventually("the balancer refuses", SOON, || async {
        let answer = fleet.client.post(&url, ask("new", 1)).await?;
        Ok((answer.status == 503 && !answer.header("retry-after").is_empty()).then_some(()))
    })
    .await
    .unwrap();
    let direct = format!("http://{}/v1/chat/completions", fleet.sidecars[0].addr("http").unwrap());
    let refused = fleet.client.post(&direct, ask("new", 1)).await.unwrap();
    assert_eq!((refused.status.as_u16(), refused.header("retry-after")), (503, "1"));
    assert_eq!(refused.json().unwrap()["error"]["type"], "draining");
    let (drained, rest) = tokio::join!(drain(&fleet.client, &fleet.sidecars[0], "?wait=20s"), stream.collect());
    assert_eq!(drained, json!({"drained": true, "in_flight": 0}));
    assert!(String::from_utf8_lossy(&rest.unwrap().to_bytes()).contains("[DONE]"));
    assert_eq!(fleet.engine_states().await.unwrap()[0]["served"], 1);
}

#[tokio::test]
async fn idle_programs_end_at_once() {
    let fleet = Fleet::start(slow(1)).await.unwrap();
    // A connection that is kept alive is idle too.
    assert_eq!(fleet.client.post(&fleet.chat_url().unwrap(), ask("x", 1)).await.unwrap().status, 200);
    let Fleet { balancer, mut sidecars, engines, .. } = fleet;
    for program in [sidecars.remove(0), balancer] {
        let began = Instant::now();
        assert!(program.stop(SOON).await.unwrap().success());
        assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
    }
    drop(engines);
}

/// Clients that ask without end; they try again when a connection is refused, and nothing else.
struct Load {
    stop: Arc<AtomicBool>,
    served: Arc<AtomicUsize>,
    tasks: Vec<JoinHandle<Vec<String>>>,
}

impl Load {
    fn start(urls: Arc<std::sync::Mutex<Vec<String>>>, clients: usize) -> Self {
        let (stop, served) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
        let tasks =
            (0..clients).map(|n| tokio::spawn(client(n, Arc::clone(&urls), Arc::clone(&stop), Arc::clone(&served))));
        Self { tasks: tasks.collect(), stop, served }
    }

    /// Until so many more are served.
    async fn more(&self, count: usize) {
        let before = self.served.load(SeqCst);
        eventually("more are served", Duration::from_secs(60), || async {
            Ok((self.served.load(SeqCst) >= before + count).then_some(()))
        })
        .await
        .unwrap();
    }

    async fn end(self) -> (usize, Vec<String>) {
        self.stop.store(true, SeqCst);
        let mut failed = Vec::new();
        for task in self.tasks {
            failed.extend(task.await.unwrap());
        }
        (self.served.load(SeqCst), failed)
    }
}

async fn client(
    n: usize,
    urls: Arc<std::sync::Mutex<Vec<String>>>,
    stop: Arc<AtomicBool>,
    served: Arc<AtomicUsize>,
) -> Vec<String> {
    let mut failed = Vec::new();
    // A connection for each request: a pool's race with a server that closes idle ones is the client's to handle.
    for turn in n.. {
        if stop.load(SeqCst) {
            break;
        }
        let urls = urls.lock().unwrap().clone();
        let mut outcome = Err("no balancer".to_owned());
        for (place, _) in urls.iter().enumerate() {
            let client = Client::default();
            match client.stream(&urls[(turn + place) % urls.len()], ask(&format!("client {n} turn {turn}"), 4)).await {
                Ok(answer) if answer.status == 200 && answer.text.contains("[DONE]") => outcome = Ok(()),
                Ok(answer) => outcome = Err(format!("{} {}", answer.status, answer.text)),
                Err(error) if format!("{error:#}").contains("refused") => continue,
                Err(error) => outcome = Err(format!("{error:#}")),
            }
            break;
        }
        match outcome {
            Ok(()) => drop(served.fetch_add(1, SeqCst)),
            Err(error) => failed.push(error),
        }
    }
    failed
}

fn shared(url: String) -> Arc<std::sync::Mutex<Vec<String>>> {
    Arc::new(std::sync::Mutex::new(vec![url]))
}

#[tokio::test]
async fn engines_and_sidecars_are_replaced_one_by_one_without_a_failed_request() {
    let mut fleet = Fleet::start(slow(3)).await.unwrap();
    let load = Load::start(shared(fleet.chat_url().unwrap()), 6);
    load.more(20).await;
    for turn in 0..3 {
        // As a pod ends: the engine's preStop waits on the drain, then the engine ends, then its sidecar.
        let (engine, sidecar) = (fleet.engines.remove(0), fleet.sidecars.remove(0));
        assert_eq!(drain(&fleet.client, &sidecar, "?wait=20s").await["drained"], true);
        engine.kill().await.unwrap();
        assert!(sidecar.stop(SOON).await.unwrap().success());
        let engine = fleet.start_engine(3 + turn, 0).await.unwrap();
        let url = format!("http://{}", engine.addr("http").unwrap());
        fleet.engines.push(engine);
        let sidecar = fleet.start_sidecar(3 + turn, &url).await.unwrap();
        fleet.sidecars.push(sidecar);
        fleet.wait_for_workers(3).await.unwrap();
        load.more(20).await;
    }
    let (served, failed) = load.end().await;
    assert!(failed.is_empty(), "{} of {served} failed, first: {}", failed.len(), failed[0]);
}

#[tokio::test]
async fn sidecars_alone_are_restarted_without_a_failed_request() {
    let mut fleet = Fleet::start(slow(2)).await.unwrap();
    let load = Load::start(shared(fleet.chat_url().unwrap()), 6);
    load.more(20).await;
    for turn in 0..2 {
        let sidecar = fleet.sidecars.remove(0);
        assert!(sidecar.stop(SOON).await.unwrap().success());
        let url = format!("http://{}", fleet.engines[turn].addr("http").unwrap());
        let sidecar = fleet.start_sidecar(2 + turn, &url).await.unwrap();
        fleet.sidecars.push(sidecar);
        fleet.wait_for_workers(2).await.unwrap();
        load.more(20).await;
    }
    let (served, failed) = load.end().await;
    assert!(failed.is_empty(), "{} of {served} failed, first: {}", failed.len(), failed[0]);
}

async fn balancer(dir: &Path, name: &str, ports: [&str; 2]) -> Program {
    let yaml = format!(
        "listen: {}\nadmin: 127.0.0.1:0\nsync: {}\nmodels: [{{name: tiny-vl, dir: {}}}]\n",
        ports[0],
        ports[1],
        tiny_model().display()
    );
    let config = dir.join(format!("{name}.yaml"));
    tokio::fs::write(&config, yaml).await.unwrap();
    let args = ["run".to_owned(), "--config".to_owned(), config.display().to_string()];
    Program::start("fovea-balancer", &args, &dir.join(format!("{name}.log"))).await.unwrap()
}

async fn ready(client: &Client, balancer: &Program) {
    let url = format!("http://{}/readyz", balancer.addr("admin").unwrap());
    eventually("the balancer is ready", SOON, || async { Ok((client.get(&url).await?.status == 200).then_some(())) })
        .await
        .unwrap();
}

#[tokio::test]
async fn balancers_are_restarted_one_by_one_without_a_failed_request() {
    let fleet = Fleet::without_workers(slow(1)).await.unwrap();
    let dir = fleet.dir();
    let any = ["127.0.0.1:0", "127.0.0.1:0"];
    let mut balancers = vec![balancer(dir, "a", any).await, balancer(dir, "b", any).await];
    let engine = fleet.start_engine(0, 0).await.unwrap();
    let syncs: Vec<_> = balancers.iter().map(|balancer| balancer.addr("sync").unwrap()).collect();
    let yaml = format!(
        "listen: 127.0.0.1:0\nadmin: 127.0.0.1:0\nbalancers: {syncs:?}\nengine: {{url: \"http://{}\", check_interval: 200ms}}\ntrust: {{loopback: true}}\n",
        engine.addr("http").unwrap()
    );
    let config = dir.join("sidecar.yaml");
    tokio::fs::write(&config, yaml).await.unwrap();
    let args = ["run".to_owned(), "--config".to_owned(), config.display().to_string()];
    let _sidecar = Program::start("fovea-sidecar", &args, &dir.join("sidecar.log")).await.unwrap();
    for balancer in &balancers {
        ready(&fleet.client, balancer).await;
    }
    let url = |balancer: &Program| format!("http://{}/v1/chat/completions", balancer.addr("http").unwrap());
    let urls = Arc::new(std::sync::Mutex::new(balancers.iter().map(url).collect::<Vec<_>>()));
    let load = Load::start(urls, 6);
    load.more(20).await;
    for name in ["a", "b"] {
        let old = balancers.remove(0);
        let ports = [old.addr("http").unwrap(), old.addr("sync").unwrap()];
        assert!(old.stop(SOON).await.unwrap().success());
        load.more(5).await;
        // As the rollout does, clients are sent there only once it is ready: until then nothing listens here that they are told of.
        let new = balancer(dir, name, [&ports[0], &ports[1]]).await;
        ready(&fleet.client, &new).await;
        balancers.push(new);
        load.more(20).await;
    }
    let (served, failed) = load.end().await;
    // A client that reaches a balancer before its first sidecar has come is told to come again.
    let lost: Vec<_> = failed.iter().filter(|error| !error.starts_with("503")).collect();
    assert!(lost.is_empty(), "{} of {served} failed, first: {}", lost.len(), lost[0]);
}
