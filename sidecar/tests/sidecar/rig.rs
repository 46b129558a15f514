//! Starts a sidecar on ports of the system's choice, and speaks HTTP to it.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use engine_sim::{Sim, SimConfig};
use fovea_service::shutdown::Shutdown;
use fovea_sidecar::app::App;
use fovea_sidecar::config::Config;
use fovea_sidecar::state::State;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;

pub struct Sidecar {
    pub http: SocketAddr,
    pub admin: SocketAddr,
    pub state: Arc<State>,
    pub shutdown: Shutdown,
    pub client: Client<HttpConnector, Full<Bytes>>,
    running: tokio::task::JoinHandle<()>,
}

/// Everything on loopback and quick; the rest as by default.
pub fn config(engine: SocketAddr, balancers: &[SocketAddr]) -> Config {
    let any = SocketAddr::from(([127, 0, 0, 1], 0));
    let mut config = Config {
        listen: any,
        admin: any,
        balancers: balancers.iter().map(ToString::to_string).collect(),
        ..Config::default()
    };
    config.trust.loopback = true;
    config.engine.url = format!("http://{engine}");
    config.engine.check_interval = Duration::from_millis(100);
    config
}

pub async fn start(config: Config) -> Sidecar {
    let shutdown = Shutdown::new();
    let app = App::start(config, shutdown.clone()).await.unwrap();
    let (http, admin, state) = (app.http, app.admin, Arc::clone(&app.state));
    let running = tokio::spawn(app.run());
    let client = Client::builder(TokioExecutor::new()).build_http();
    Sidecar { http, admin, state, shutdown, client, running }
}

impl Drop for Sidecar {
    fn drop(&mut self) {
        self.shutdown.request();
        self.running.abort();
    }
}

impl Sidecar {
    pub async fn post(&self, path: &str, headers: &[(&str, &str)], body: impl Into<Bytes>) -> Response<Incoming> {
        let mut request = Request::post(format!("http://{}{path}", self.http));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        self.client.request(request.body(Full::new(body.into())).unwrap()).await.unwrap()
    }

    pub async fn page(&self, path: &str) -> (u16, String) {
        let request = Request::get(format!("http://{}{path}", self.admin)).body(Full::default()).unwrap();
        let answer = self.client.request(request).await.unwrap();
        (answer.status().as_u16(), text(answer).await)
    }

    /// Waits for the end after a stop was asked for.
    pub async fn ended(mut self) {
        (&mut self.running).await.unwrap();
    }
}

pub async fn text(response: Response<Incoming>) -> String {
    String::from_utf8(response.into_body().collect().await.unwrap().to_bytes().to_vec()).unwrap()
}

pub async fn json(response: Response<Incoming>) -> serde_json::Value {
    serde_json::from_str(&text(response).await).unwrap()
}

/// A simulated engine with blocks of 4 tokens and no waiting.
pub async fn sim(change: impl FnOnce(&mut SimConfig)) -> Sim {
    let mut config = SimConfig {
        model_dir: concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/vllm/tiny-qwen3-vl").into(),
        block_size: 4,
        blocks: 600,
        max_model_len: 2048,
        speed: 0.0,
        ..SimConfig::default()
    };
    change(&mut config);
    Sim::start(config).await.unwrap()
}
