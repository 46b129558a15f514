//! One stream to one balancer, from dial to end.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use fovea_gossip::auth::{self, AuthError};
use fovea_gossip::codec::{CodecError, Decoder, encode_sidecar};
use fovea_gossip::message::{BucketMask, Buckets, Digest, FromBalancer, FromSidecar, Hello};
use fovea_gossip::outbox::{Cursor, Next, repair_frames, snapshot_frames};
use fovea_kv::sums::SetSums;
use fovea_service::tls::handshake::{HandshakeError, end_of};
use fovea_service::tls::metrics::HandshakeEnd;
use fovea_service::tls::socket::Socket;
use tokio::io::{AsyncReadExt, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout};

use super::Gossip;
use super::link::{self, LinkError};
use crate::worker::lock;

/// From our hello to the balancer's welcome.
const WELCOME_TIMEOUT: Duration = Duration::from_secs(3);
/// Requests of the balancer that wait to be looked at; what finds no room waits in the socket.
const REQUESTS_MAX: usize = 64;
/// Frames gathered into one write, in bytes.
const WRITE_BYTES: usize = 64 << 10;
const READ_BYTES: usize = 4 << 10;

#[derive(Debug, thiserror::Error)]
pub enum StreamError {
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error("no welcome: is this address the sync port of a balancer, and does that want TLS?")]
    NoWelcome {
        #[source]
        source: Option<Box<Self>>,
    },
    #[error("the connection broke")]
    Broken(#[source] std::io::Error),
    #[error("closed by the balancer")]
    Closed,
    #[error("the balancer takes nothing for {limit:?}; raise gossip.write_timeout if the link is only slow")]
    Stuck { limit: Duration },
    #[error("the balancer speaks another protocol")]
    Protocol(#[source] CodecError),
}

impl StreamError {
    pub fn was_connected(&self) -> bool {
        !matches!(self, Self::Link(LinkError::Dial { .. }))
    }

    /// The balancer had taken us; else it is not there, or is none.
    pub fn was_welcome(&self) -> bool {
        !matches!(self, Self::Link(_) | Self::NoWelcome { .. })
    }

    /// What comes in place of a welcome may say why: a balancer with a key refuses by a kind of frame that only the key exchange knows,
    /// and TLS tells a client after its handshake that its certificate was not taken.
    fn no_welcome(cause: Self) -> Self {
        match cause {
            Self::Protocol(CodecError::UnknownKind { kind }) if auth::is_refusal(kind) => {
                LinkError::Key(AuthError::KeyMissing).into()
            }
            Self::Broken(error) if end_of(&error) == HandshakeEnd::RefusedByPeer => {
                LinkError::Tls(HandshakeError::from(error)).into()
            }
            cause => Self::NoWelcome { source: Some(Box::new(cause)) },
        }
    }
}

/// Runs one stream; only an error ends it.
pub(super) async fn run(gossip: &Gossip, address: SocketAddr, host: &str) -> Result<Infallible, StreamError> {
    // Nothing can be said before the engine has been seen.
    let mut hello = gossip.state.hello();
    let seen = hello.wait_for(Option::is_some).await;
    seen.map(drop).map_err(|_| StreamError::Closed)?;
    let (socket, local) = link::open(&gossip.credentials, address, host, gossip.config.dial_timeout).await?;
    let scheme = if gossip.https { "https" } else { "http" };
    let own_url = format!("{scheme}://{}", SocketAddr::new(local.ip(), gossip.http_port));
    let (mut read, write) = tokio::io::split(socket);
    let mut writer = Writer {
        gossip,
        address,
        write,
        own_url,
        buffer: BytesMut::new(),
        cursor: Cursor::default(),
        load_sent: None,
        told: 0,
        learns: false,
        digests: false,
        learnt: 0,
    };
    let first = hello.borrow_and_update().clone();
    writer.hello(first).await.map_err(StreamError::no_welcome)?;
    let mut decoder = Decoder::<FromBalancer>::new();
    match timeout(WELCOME_TIMEOUT, message(&mut read, &mut decoder)).await {
        Ok(Ok(FromBalancer::Welcome(version))) => {
            (writer.learns, writer.digests) = (version.takes_learnt(), version.takes_digests());
        }
        Ok(Err(error)) => return Err(StreamError::no_welcome(error)),
        Ok(Ok(_)) | Err(_) => return Err(StreamError::NoWelcome { source: None }),
    }
    tracing::info!(%address, "stream to a balancer stands");
    let _shown = Shown::new(gossip, address);
    let (requests, asked) = mpsc::channel(REQUESTS_MAX);
    tokio::select! {
        ended = listen(gossip, address, read, decoder, requests) => ended,
        ended = writer.feed(hello, asked) => ended,
    }
}

/// The stream is counted while it stands.
struct Shown<'a> {
    gossip: &'a Gossip,
    address: SocketAddr,
}

impl<'a> Shown<'a> {
    fn new(gossip: &'a Gossip, address: SocketAddr) -> Self {
        gossip.metrics.streams.inc();
        lock(&gossip.state.streams).entry(address).or_default().connected = true;
        Self { gossip, address }
    }
}

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        self.gossip.metrics.streams.dec();
        if let Some(info) = lock(&self.gossip.state.streams).get_mut(&self.address) {
            info.connected = false;
        }
    }
}

async fn message(
    read: &mut ReadHalf<Socket>,
    decoder: &mut Decoder<FromBalancer>,
) -> Result<FromBalancer, StreamError> {
    let mut bytes = [0; READ_BYTES];
    loop {
        if let Some(message) = decoder.next().map_err(StreamError::Protocol)? {
            return Ok(message);
        }
        match read.read(&mut bytes).await.map_err(StreamError::Broken)? {
            0 => return Err(StreamError::Closed),
            n => decoder.push(&bytes[..n]),
        }
    }
}

/// Reads what the balancer says, and passes on the workers it wants anew.
async fn listen(
    gossip: &Gossip,
    address: SocketAddr,
    mut read: ReadHalf<Socket>,
    mut decoder: Decoder<FromBalancer>,
    requests: mpsc::Sender<Request>,
) -> Result<Infallible, StreamError> {
    loop {
        match message(&mut read, &mut decoder).await? {
            FromBalancer::Welcome(_) => {}
            FromBalancer::Ack { seq, .. } => {
                if let Some(info) = lock(&gossip.state.streams).get_mut(&address) {
                    info.acknowledged_seq = seq;
                }
            }
            FromBalancer::Resync { worker } => {
                gossip.metrics.resyncs.inc();
                requests.send(Request::Snapshot(worker)).await.map_err(|_| StreamError::Closed)?;
            }
            FromBalancer::AskBuckets { worker } => {
                gossip.metrics.mismatches.inc();
                requests.send(Request::Buckets(worker)).await.map_err(|_| StreamError::Closed)?;
            }
            FromBalancer::AskRepair { worker, buckets } => {
                requests.send(Request::Repair(worker, buckets)).await.map_err(|_| StreamError::Closed)?;
            }
        }
    }
}

/// What a balancer wants of a worker.
enum Request {
    Snapshot(u16),
    Buckets(u16),
    Repair(u16, [BucketMask; 3]),
}

struct Writer<'a> {
    gossip: &'a Gossip,
    address: SocketAddr,
    write: WriteHalf<Socket>,
    own_url: String,
    buffer: BytesMut,
    cursor: Cursor,
    load_sent: Option<Instant>,
    /// Workers in the last hello: of others the balancer does not know yet.
    told: usize,
    /// The balancer takes learnt facts.
    learns: bool,
    /// And digests.
    digests: bool,
    /// Place in the log of learnt facts up to which it has them.
    learnt: u64,
}

impl Writer<'_> {
    /// Sends what is new, as it becomes new.
    async fn feed(
        &mut self,
        mut hello: tokio::sync::watch::Receiver<Option<Arc<Hello>>>,
        mut asked: mpsc::Receiver<Request>,
    ) -> Result<Infallible, StreamError> {
        let state = &self.gossip.state;
        let (mut published, mut load) = (state.published(), state.load_changed());
        let config = &self.gossip.config;
        self.facts().await?;
        self.blocks().await?;
        self.load().await?;
        let mut load_due = None;
        let mut digest_at = tokio::time::interval(config.digest_interval);
        digest_at.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            let heartbeat = tokio::time::sleep(config.heartbeat);
            tokio::select! {
                Ok(()) = hello.changed() => {
                    let new = hello.borrow_and_update().clone();
                    self.hello(new).await?;
                    self.facts().await?;
                    self.blocks().await?;
                }
                Ok(()) = published.changed() => {
                    self.facts().await?;
                    self.blocks().await?;
                }
                Some(request) = asked.recv() => self.answer(request).await?,
                _ = digest_at.tick(), if self.digests => self.digests().await?,
                Ok(()) = load.changed(), if load_due.is_none() => {
                    load_due = Some(self.load_sent.map_or_else(Instant::now, |sent| sent + config.load_interval));
                }
                () = tokio::time::sleep_until(load_due.unwrap_or_else(Instant::now)), if load_due.is_some() => {
                    load_due = None;
                    load.mark_unchanged();
                    self.load().await?;
                }
                () = heartbeat => self.send(&FromSidecar::Heartbeat).await?,
            }
        }
    }

    async fn hello(&mut self, hello: Option<Arc<Hello>>) -> Result<(), StreamError> {
        let Some(hello) = hello else { return Ok(()) };
        let mut hello = Hello::clone(&hello);
        self.told = hello.workers.len();
        // Changed facts may put the workers into another pool, which knows nothing.
        self.learnt = 0;
        if hello.advertised_url.is_empty() {
            hello.advertised_url.clone_from(&self.own_url);
        }
        self.send(&FromSidecar::Hello(hello)).await
    }

    async fn load(&mut self) -> Result<(), StreamError> {
        self.load_sent = Some(Instant::now());
        let workers = self.gossip.state.workers();
        if workers.len() != self.told {
            return Ok(());
        }
        for worker in workers {
            self.put(
                encode_sidecar(&FromSidecar::Load(worker.load.message(worker.index))).map_err(StreamError::Protocol)?,
            )
            .await?;
        }
        self.flush().await
    }

    /// Everything learnt that this balancer has not got.
    async fn facts(&mut self) -> Result<(), StreamError> {
        while self.learns {
            let (facts, place) = lock(&self.gossip.state.learnt).after(self.learnt);
            if facts.is_empty() {
                break;
            }
            self.learnt = place;
            self.put(encode_sidecar(&FromSidecar::Learnt(facts)).map_err(StreamError::Protocol)?).await?;
        }
        Ok(())
    }

    /// Everything in the outbox that this balancer has not got.
    async fn blocks(&mut self) -> Result<(), StreamError> {
        let fleet = self.gossip.state.fleet();
        if fleet.workers.len() != self.told {
            // New ranks: the hello that names them is on its way.
            return Ok(());
        }
        loop {
            let next = lock(&fleet.outbox).poll(&mut self.cursor);
            match next {
                Next::Frame(frame) => self.put(frame).await?,
                Next::NeedSnapshot { worker, .. } => {
                    let snapshot = fleet.workers.get(usize::from(worker)).and_then(|worker| worker.snapshot());
                    let Some((epoch, seq, levels)) = snapshot else { return Err(StreamError::Closed) };
                    for frame in snapshot_frames(worker, epoch, seq, levels) {
                        self.put(frame).await?;
                    }
                    self.cursor.snapshot_taken(worker, epoch, seq);
                    self.gossip.metrics.snapshots.inc();
                    if let Some(info) = lock(&self.gossip.state.streams).get_mut(&self.address) {
                        info.snapshots += 1;
                    }
                }
                Next::Idle => return self.flush().await,
            }
        }
    }

    async fn answer(&mut self, request: Request) -> Result<(), StreamError> {
        self.blocks().await?;
        match request {
            Request::Snapshot(worker) => self.cursor.resync(worker),
            Request::Buckets(worker) => {
                // Where something came between the two, the next digest leads here again.
                if let Some((epoch, seq, sums)) = self.sums(worker) {
                    let levels = Box::new(sums.map(|level| *level.buckets()));
                    self.send(&FromSidecar::Buckets(Buckets { worker, epoch, seq, levels })).await?;
                }
            }
            Request::Repair(worker, buckets) => {
                let fleet = self.gossip.state.fleet();
                let snapshot = fleet.workers.get(usize::from(worker)).and_then(|worker| worker.snapshot());
                let there = snapshot.filter(|(epoch, seq, _)| self.cursor.is_at(worker, *epoch, *seq));
                if let Some((epoch, seq, levels)) = there {
                    self.gossip.metrics.repairs.inc();
                    for frame in repair_frames(worker, epoch, seq, buckets, levels) {
                        self.put(frame).await?;
                    }
                }
            }
        }
        self.blocks().await
    }

    /// A digest of each worker that this balancer has everything of.
    async fn digests(&mut self) -> Result<(), StreamError> {
        self.blocks().await?;
        for worker in 0..u16::try_from(self.told).unwrap_or(u16::MAX) {
            if let Some((epoch, seq, sums)) = self.sums(worker) {
                let levels = sums.map(|level| level.total());
                let digest = FromSidecar::Digest(Digest { worker, epoch, seq, levels });
                self.put(encode_sidecar(&digest).map_err(StreamError::Protocol)?).await?;
            }
        }
        self.flush().await
    }

    /// Sums of a worker's set, if all of it is on the stream.
    fn sums(&self, worker: u16) -> Option<(u64, u64, [SetSums; 3])> {
        let fleet = self.gossip.state.fleet();
        let (epoch, seq, sums) = fleet.workers.get(usize::from(worker))?.sums()?;
        self.cursor.is_at(worker, epoch, seq).then_some((epoch, seq, sums))
    }

    async fn send(&mut self, message: &FromSidecar) -> Result<(), StreamError> {
        self.put(encode_sidecar(message).map_err(StreamError::Protocol)?).await?;
        self.flush().await
    }

    async fn put(&mut self, frame: Bytes) -> Result<(), StreamError> {
        self.gossip.metrics.frames.inc();
        self.buffer.extend_from_slice(&frame);
        if self.buffer.len() >= WRITE_BYTES { self.flush().await } else { Ok(()) }
    }

    async fn flush(&mut self) -> Result<(), StreamError> {
        let limit = self.gossip.config.write_timeout;
        self.gossip.metrics.bytes.inc_by(self.buffer.len() as u64);
        let written = timeout(limit, async {
            self.write.write_all(&self.buffer).await?;
            self.write.flush().await
        });
        let written = written.await;
        self.buffer.clear();
        written.map_err(|_| StreamError::Stuck { limit })?.map_err(StreamError::Broken)
    }
}
