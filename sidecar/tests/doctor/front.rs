//! A front before a simulated engine: passes requests on, notes them, and changes what a test wants changed.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;
use engine_sim::{Sim, SimConfig};
use fovea_sidecar::config::Config;
use fovea_sidecar::doctor::{Check, Options, Report, examine};
use http::{Request, Response, header};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::Value;
use tokio::net::TcpListener;

/// Answers in place of the engine, or changes the request on its way.
pub type Before = dyn Fn(&str, &mut Value) -> Option<(u16, String)> + Send + Sync;
/// Changes an answer on its way back.
pub type After = dyn Fn(&str, &mut Value) + Send + Sync;

pub struct Front {
    pub address: SocketAddr,
    /// `GET /health` and so on, in order.
    pub seen: Arc<Mutex<Vec<String>>>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Front {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Script {
    engine: SocketAddr,
    before: Box<Before>,
    after: Box<After>,
    date: Option<&'static str>,
    seen: Arc<Mutex<Vec<String>>>,
    client: Client<HttpConnector, Full<Bytes>>,
}

impl Front {
    pub async fn start(engine: SocketAddr, before: Box<Before>, after: Box<After>, date: Option<&'static str>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let seen = Arc::<Mutex<Vec<String>>>::default();
        let client = Client::builder(TokioExecutor::new()).build_http();
        let script = Arc::new(Script { engine, before, after, date, seen: Arc::clone(&seen), client });
        let task = tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let script = Arc::clone(&script);
                tokio::spawn(async move {
                    let service = service_fn(move |request| answer(Arc::clone(&script), request));
                    let _ = hyper::server::conn::http1::Builder::new()
                        .serve_connection(TokioIo::new(stream), service)
                        .await;
                });
            }
        });
        Self { address, seen, task }
    }

    /// One that only passes on.
    pub async fn plain(engine: SocketAddr) -> Self {
        Self::start(engine, Box::new(|_, _| None), Box::new(|_, _| {}), None).await
    }
}

async fn answer(script: Arc<Script>, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    let (head, body) = request.into_parts();
    let path = head.uri.path().to_owned();
    script.seen.lock().unwrap().push(format!("{} {path}", head.method));
    let bytes = body.collect().await.unwrap().to_bytes();
    let mut json: Value = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
    if let Some((status, text)) = (script.before)(&path, &mut json) {
        return Ok(Response::builder().status(status).body(Full::from(text)).unwrap());
    }
    let bytes = if json.is_null() { bytes } else { Bytes::from(json.to_string()) };
    let passed = Request::builder().method(head.method).uri(format!("http://{}{path}", script.engine));
    let response = script.client.request(passed.body(Full::new(bytes)).unwrap()).await.unwrap();
    let (mut head, body) = response.into_parts();
    let mut bytes = body.collect().await.unwrap().to_bytes();
    if let Ok(mut json) = serde_json::from_slice::<Value>(&bytes) {
        (script.after)(&path, &mut json);
        bytes = json.to_string().into();
    }
    head.headers.remove(header::CONTENT_LENGTH);
    if let Some(date) = script.date {
        head.headers.insert(header::DATE, header::HeaderValue::from_static(date));
    }
    Ok(Response::from_parts(head, Full::new(bytes)))
}

/// A simulated engine that waits for nothing.
pub async fn sim(change: impl FnOnce(&mut SimConfig)) -> Sim {
    let mut config = SimConfig {
        model_dir: concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/vllm/tiny-qwen3-vl").into(),
        blocks: 600,
        max_model_len: 2048,
        speed: 0.0,
        ..SimConfig::default()
    };
    change(&mut config);
    Sim::start(config).await.unwrap()
}

pub fn options(engine: SocketAddr) -> Options {
    let mut config = Config::default();
    config.engine.url = format!("http://{engine}");
    // Whatever the limits of the shell that runs the tests.
    config.limits.connections_max = 16;
    Options { config, model: None, probe: true, timeout: Duration::from_secs(30) }
}

pub fn find<'a>(report: &'a Report, name: &str) -> &'a Check {
    report.checks.iter().find(|check| check.name == name).unwrap()
}

/// Examines, and expects this one check to be wrong, or not to be told, and with this remedy.
#[track_caller]
pub fn expect(report: &Report, name: &str, ok: Option<bool>, found: &str, remedy: &str) {
    let check = find(report, name);
    let said = check.remedy.as_deref().unwrap_or_default();
    assert_eq!(check.ok, ok, "{check:?}");
    assert!(check.found.contains(found), "{check:?}");
    assert!(said.contains(remedy), "{check:?}");
}

/// The doctor's report of an engine behind a front.
pub async fn behind(engine: &Sim, before: Box<Before>, after: Box<After>) -> Report {
    let front = Front::start(engine.http, before, after, None).await;
    examine(&options(front.address)).await
}
