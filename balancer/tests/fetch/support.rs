//! Origins that follow a script, a resolver that does too, and fetchers that may reach them.

use std::collections::{HashMap, VecDeque};
use std::future::Future;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use async_trait::async_trait;
use fovea_balancer::config::media::MediaConfig;
use fovea_balancer::fetch::{Fetched, Fetcher, MediaMetrics, Reason, RefusalLabels, Resolve};
use prometheus_client::registry::Registry;
use serde::Deserialize;
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;

/// Longest wait for anything in these tests.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// What an origin sends after reading a request's head.
#[derive(Clone)]
pub enum Reply {
    /// Head lines without the status line's version, and a body with its length.
    Plain(&'static str, Vec<(&'static str, String)>, Vec<u8>),
    /// These bytes, then the end of the connection.
    Raw(Vec<u8>),
    /// These bytes, then nothing, with the connection open.
    Stall(Vec<u8>),
    /// These bytes, then the piece for ever.
    Endless(Vec<u8>, Vec<u8>),
    /// The other reply, once the origin's gate lets it through.
    Gated(Box<Reply>),
}

pub fn ok(body: &[u8]) -> Reply {
    Reply::Plain("200 OK", vec![], body.to_vec())
}

pub fn tagged(tag: &str, body: &[u8]) -> Reply {
    Reply::Plain("200 OK", vec![("ETag", tag.to_owned())], body.to_vec())
}

pub fn redirect(location: &str) -> Reply {
    Reply::Plain("302 Found", vec![("Location", location.to_owned())], b"elsewhere".to_vec())
}

type Script = dyn Fn(&str, usize) -> Reply + Send + Sync;

pub struct Origin {
    pub address: SocketAddr,
    pub seen: Arc<Mutex<Vec<String>>>,
    pub gate: Arc<Semaphore>,
    /// Bytes that the kernel took from an endless reply.
    pub sent: Arc<Mutex<u64>>,
    /// Requests being answered, and the most of them at one time.
    pub busy: Arc<Mutex<(usize, usize)>>,
}

/// An origin on 127.0.0.1; `script` maps a request's head and its number (from 0) to the reply.
pub async fn origin(script: impl Fn(&str, usize) -> Reply + Send + Sync + 'static) -> Origin {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (seen, gate, sent, busy) = (Arc::default(), Arc::new(Semaphore::new(0)), Arc::default(), Arc::default());
    let made = Origin { address: listener.local_addr().unwrap(), seen, gate, sent, busy };
    let state = made.share();
    let script: Arc<Script> = Arc::new(script);
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            let (state, script) = (state.share(), Arc::clone(&script));
            tokio::spawn(async move { state.serve(stream, &*script).await });
        }
    });
    made
}

impl Origin {
    pub fn share(&self) -> Self {
        let Self { address, seen, gate, sent, busy } = self;
        Self { address: *address, seen: seen.clone(), gate: gate.clone(), sent: sent.clone(), busy: busy.clone() }
    }

    pub fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    pub fn count(&self) -> usize {
        self.seen.lock().unwrap().len()
    }

    pub fn head(&self, index: usize) -> String {
        self.seen.lock().unwrap()[index].to_ascii_lowercase()
    }

    /// Answers one connection; a peer that leaves ends it.
    pub async fn serve(&self, mut stream: impl AsyncRead + AsyncWrite + Unpin, script: &Script) -> Option<()> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(stream.read_u8().await.ok()?);
        }
        let head = String::from_utf8(head).unwrap();
        let number = {
            let mut seen = self.seen.lock().unwrap();
            seen.push(head.clone());
            seen.len() - 1
        };
        {
            let mut busy = self.busy.lock().unwrap();
            busy.0 += 1;
            busy.1 = busy.1.max(busy.0);
        }
        let mut reply = script(&head, number);
        if let Reply::Gated(inner) = reply {
            self.gate.acquire().await.unwrap().forget();
            reply = *inner;
        }
        self.busy.lock().unwrap().0 -= 1;
        match reply {
            Reply::Plain(status, headers, body) => {
                let mut text = format!("HTTP/1.1 {status}\r\nContent-Length: {}\r\n", body.len());
                headers.iter().for_each(|(name, value)| text += &format!("{name}: {value}\r\n"));
                stream.write_all((text + "\r\n").as_bytes()).await.ok()?;
                stream.write_all(&body).await.ok()?;
            }
            Reply::Raw(bytes) => stream.write_all(&bytes).await.ok()?,
            Reply::Stall(bytes) => {
                stream.write_all(&bytes).await.ok()?;
                stream.read_u8().await.ok()?;
            }
            Reply::Endless(head, piece) => {
                stream.write_all(&head).await.ok()?;
                loop {
                    stream.write_all(&piece).await.ok()?;
                    *self.sent.lock().unwrap() += piece.len() as u64;
                }
            }
            Reply::Gated(_) => panic!("one gate is enough"),
        }
        stream.shutdown().await.ok()
    }
}

/// Answers by host, in order; the last answer stays.
#[derive(Default)]
pub struct Scripted {
    answers: Mutex<HashMap<String, VecDeque<Vec<IpAddr>>>>,
    pub asked: Mutex<Vec<String>>,
}

impl Scripted {
    pub fn new(rows: &[(&str, &[&[&str]])]) -> Arc<Self> {
        let addresses = |texts: &[&str]| texts.iter().map(|text| text.parse().unwrap()).collect();
        let row = |(host, answers): &(&str, &[&[&str]])| {
            ((*host).to_owned(), answers.iter().map(|texts| addresses(texts)).collect())
        };
        Arc::new(Self { answers: Mutex::new(rows.iter().map(row).collect()), asked: Mutex::default() })
    }
}

#[async_trait]
impl Resolve for Scripted {
    async fn resolve(&self, host: &str) -> io::Result<Vec<IpAddr>> {
        self.asked.lock().unwrap().push(host.to_owned());
        let mut answers = self.answers.lock().unwrap();
        let answers = answers.get_mut(host).ok_or(io::ErrorKind::NotFound)?;
        Ok(if answers.len() > 1 { answers.pop_front() } else { answers.front().cloned() }.unwrap_or_default())
    }
}

pub struct Tested {
    pub fetcher: Fetcher,
    pub metrics: MediaMetrics,
}

/// A fetcher with a `media` section in YAML.
pub fn fetcher_with(config: &str, resolver: Arc<Scripted>) -> Tested {
    let metrics = MediaMetrics::register(&mut Registry::default());
    let fetcher = Fetcher::with_resolver(&section(config), metrics.clone(), resolver).unwrap();
    Tested { fetcher, metrics }
}

/// A fetcher that may reach 127.0.0.1 on every port, with more of the `media` section in YAML flow style.
pub fn fetcher(more: &str) -> Tested {
    fetcher_with(&format!("{{allow: [127.0.0.1/32], ports: [], {more}}}"), Scripted::new(&[]))
}

/// A `media` section.
pub fn section(text: &str) -> MediaConfig {
    #[derive(Deserialize)]
    struct File {
        media: MediaConfig,
    }
    impl fovea_service::config::Validate for File {
        fn validate(&self) -> Result<(), fovea_service::config::Invalid> {
            self.media.validate()
        }
    }
    fovea_service::config::parse::<File>(&format!("media: {text}"), "test.yaml").unwrap().media
}

impl Tested {
    /// Fetches and expects this refusal, counted once.
    #[track_caller]
    pub fn refuses(&self, url: &str, reason: Reason) -> impl Future<Output = ()> {
        let place = std::panic::Location::caller();
        async move {
            let before = self.refusals(reason);
            let error = within(self.fetcher.fetch(url)).await.map(|_| ()).unwrap_err();
            assert_eq!(error.cause, reason, "{url} at {place}");
            assert_eq!(self.refusals(reason), before + 1, "{url} at {place}");
        }
    }

    pub async fn fetches(&self, url: &str) -> Fetched {
        within(self.fetcher.fetch(url)).await.unwrap()
    }

    pub fn refusals(&self, reason: Reason) -> u64 {
        self.metrics.refusals.get_or_create(&RefusalLabels { reason }).get()
    }
}

pub async fn within<T>(work: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, work).await.expect("waited too long")
}

/// Lets other tasks run until `ready` holds.
pub async fn until(ready: impl Fn() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !ready() {
        assert!(Instant::now() < end, "waited too long");
        tokio::task::yield_now().await;
    }
}

/// A PNG of this size as far as its header goes, with `more` bytes after it.
pub fn png(width: u32, height: u32, more: usize) -> Vec<u8> {
    let mut bytes = b"\x89PNG\r\n\x1a\n".to_vec();
    let sides = [width.to_be_bytes(), height.to_be_bytes()].concat();
    let chunks: [(&[u8], Vec<u8>); 3] =
        [(b"IHDR", [&sides[..], b"\x08\x02\0\0\0"].concat()), (b"IDAT", vec![7; more]), (b"IEND", vec![])];
    for (name, body) in chunks {
        bytes.extend((body.len() as u32).to_be_bytes());
        let covered = [name, &body].concat();
        bytes.extend(&covered);
        bytes.extend(crc32(&covered).to_be_bytes());
    }
    bytes
}

/// CRC-32 of PNG, bit by bit.
fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), step))
}
