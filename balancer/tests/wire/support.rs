//! A balancer in this process, sidecars that follow a script, and clients that speak plain bytes.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fovea_balancer::config::BalancerConfig;
use fovea_balancer::fetch::Fetcher;
use fovea_balancer::front::{self, Front};
use fovea_balancer::links::Links;
use fovea_balancer::metrics::Metrics;
use fovea_balancer::models::Models;
use fovea_balancer::sync;
use fovea_balancer::workers::Workers;
use fovea_gossip::codec::encode_sidecar;
use fovea_gossip::message::{EngineFacts, EngineKind, FromSidecar, HashScheme, Hello, PROTOCOL, WorkerFacts};
use fovea_service::shutdown::Shutdown;
use prometheus_client::registry::Registry;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;

/// Longest wait for anything in these tests.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub struct Balancer {
    pub http: SocketAddr,
    pub sync: SocketAddr,
    pub workers: Arc<Workers>,
    pub shutdown: Shutdown,
    registry: Registry,
}

pub async fn balancer(config: &str) -> Balancer {
    let config: BalancerConfig = fovea_service::config::parse(config, "test.yaml").unwrap();
    let (http, sync) =
        (TcpListener::bind("127.0.0.1:0").await.unwrap(), TcpListener::bind("127.0.0.1:0").await.unwrap());
    let (http_at, sync_at) = (http.local_addr().unwrap(), sync.local_addr().unwrap());
    let (mut registry, shutdown) = (Registry::default(), Shutdown::new());
    let metrics = Metrics::register(&mut registry);
    let links = Links::load(&config, &metrics.tls).unwrap();
    let models = Models::load(&config).unwrap();
    let workers =
        Arc::new(Workers::new(config.freshness.into(), config.choose_settings(), config.limits.index_entries_max));
    tokio::spawn(sync::serve(
        sync,
        Arc::clone(&workers),
        metrics.clone(),
        config.limits.sync_streams_max,
        links.guard,
        shutdown.clone(),
    ));
    let fetcher = Fetcher::new(&config.media, metrics.media.clone()).unwrap();
    let token = shutdown.token();
    let front = Front::new(config, links.access, Arc::clone(&workers), Arc::new(models), fetcher, metrics, token);
    tokio::spawn(front::serve(http, Arc::new(front), links.clients, shutdown.clone()));
    Balancer { http: http_at, sync: sync_at, workers, shutdown, registry }
}

impl Balancer {
    /// Value of one line of the metrics page; 0 when it is not there.
    pub fn metric(&self, name: &str) -> u64 {
        let mut page = String::new();
        prometheus_client::encoding::text::encode(&mut page, &self.registry).unwrap();
        let line = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
        line.unwrap_or(0)
    }

    /// Waits until `ready` holds.
    pub async fn until(&self, ready: impl Fn(&Self) -> bool) {
        let end = Instant::now() + PATIENCE;
        while !ready(self) {
            assert!(Instant::now() < end, "waited too long");
            tokio::task::yield_now().await;
        }
    }

    pub fn worker_count(&self) -> usize {
        let mut count = 0;
        self.workers.each(Instant::now(), |_, _| count += 1);
        count
    }
}

/// What a scripted sidecar does with a request once it is read.
#[derive(Clone, Copy)]
pub enum Script {
    /// Answers 200 with this body.
    Answer(&'static str),
    /// Answers these bytes, head included, then closes.
    Raw(&'static str),
    /// Answers nothing and waits for the connection to end.
    Silent,
    /// Sends the head and one event of a stream, then waits for the connection to end.
    OneEvent,
    /// Reads the request and closes.
    Hang,
}

/// What a sidecar saw.
#[derive(Debug)]
pub enum Seen {
    Request {
        head: String,
        body: Vec<u8>,
    },
    /// The balancer closed the connection while the script waited.
    Closed,
}

pub struct Sidecar {
    pub http: SocketAddr,
    pub seen: mpsc::UnboundedReceiver<Seen>,
    pub link: TcpStream,
}

pub fn hello(url: &str, block_size: u32) -> Hello {
    Hello {
        protocol: PROTOCOL,
        advertised_url: url.to_owned(),
        engine: EngineFacts {
            kind: EngineKind::Vllm,
            version: "0.32.0".to_owned(),
            engine_model: "./tiny-qwen3-vl".to_owned(),
            served_names: vec!["tiny-vl".to_owned()],
            lora_names: Vec::new(),
            max_model_len: 2048,
            exif: true,
            hash_scheme: HashScheme::Fovea1,
            hybrid: false,
        },
        workers: vec![WorkerFacts { dp_rank: 0, block_size, capacity_blocks: 400, events: true }],
        draining: false,
        media_trusted: true,
        encoder_fingerprint: None,
    }
}

pub async fn sidecar(balancer: &Balancer, script: Script) -> Sidecar {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let http = listener.local_addr().unwrap();
    let (tell, seen) = mpsc::unbounded_channel();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(follow(stream, script, tell.clone()));
        }
    });
    let before = balancer.worker_count();
    let mut link = TcpStream::connect(balancer.sync).await.unwrap();
    say(&mut link, &FromSidecar::Hello(hello(&format!("http://{http}"), 32))).await;
    balancer.until(|balancer| balancer.worker_count() > before).await;
    Sidecar { http, seen, link }
}

pub async fn say(link: &mut TcpStream, message: &FromSidecar) {
    link.write_all(&encode_sidecar(message).unwrap()).await.unwrap();
}

async fn follow(mut stream: TcpStream, script: Script, tell: mpsc::UnboundedSender<Seen>) {
    while let Some((head, body)) = read_message(&mut stream).await {
        let _ = tell.send(Seen::Request { head, body });
        let raw = match script {
            Script::Answer(text) => format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n{text}", text.len()),
            Script::Raw(raw) => raw.to_owned(),
            Script::Hang => return,
            Script::Silent => String::new(),
            Script::OneEvent => {
                "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n9\r\ndata: a\n\n\r\n".to_owned()
            }
        };
        if stream.write_all(raw.as_bytes()).await.is_err() {
            return;
        }
        match script {
            Script::Answer(_) => {}
            Script::Raw(_) | Script::Hang => return,
            Script::Silent | Script::OneEvent => {
                let _ = stream.read_to_end(&mut Vec::new()).await;
                let _ = tell.send(Seen::Closed);
                return;
            }
        }
    }
}

/// Head and body of one message with a content length; `None` at the end of the connection.
pub async fn read_message(stream: &mut TcpStream) -> Option<(String, Vec<u8>)> {
    let mut bytes = Vec::new();
    let split = loop {
        if let Some(at) = bytes.windows(4).position(|window| window == b"\r\n\r\n") {
            break at + 4;
        }
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    };
    let head = String::from_utf8(bytes[..split].to_vec()).unwrap().to_ascii_lowercase();
    let length =
        head.lines().find_map(|line| line.strip_prefix("content-length: ")?.parse::<usize>().ok()).unwrap_or(0);
    while bytes.len() < split + length {
        if stream.read_buf(&mut bytes).await.ok()? == 0 {
            return None;
        }
    }
    Some((head, bytes[split..].to_vec()))
}

/// A request head and body for `path`, with a content length.
pub fn post(path: &str, headers: &str, body: &str) -> String {
    format!("POST {path} HTTP/1.1\r\nhost: b\r\ncontent-length: {}\r\n{headers}\r\n{body}", body.len())
}

pub const CHAT: &str = "/v1/chat/completions";

/// A chat body for a model.
pub fn chat(model: &str) -> String {
    format!(r#"{{"model":"{model}","messages":[{{"role":"user","content":"hello there"}}],"stream":true}}"#)
}

/// Sends `request` and reads until the connection ends. Requests ask for `connection: close` themselves.
pub async fn talk(at: SocketAddr, request: &str) -> String {
    let mut stream = TcpStream::connect(at).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    let read = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut answer)).await;
    read.expect("an answer in time").unwrap();
    String::from_utf8(answer).unwrap()
}
