//! The sidecars' side: one ordered stream from each, applied to the fleet and to the pools' indexes.
//!
//! **Invariant:** a stream's workers leave routing in the moment the stream ends, however it ends.

pub mod guard;
mod seats;
mod upstream;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fovea_gossip::codec::{CodecError, Decoder, encode_balancer};
use fovea_gossip::inbox::{Change, Inbox, ProtocolError};
use fovea_gossip::message::{FromBalancer, FromSidecar, PROTOCOL};
use fovea_service::label::Snake;
use fovea_service::shutdown::Shutdown;
use fovea_service::tls::socket::Socket;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;

use crate::metrics::{EndLabels, FrameKind, FrameLabels, Metrics, OpenedLabels, StreamEnd};
use crate::workers::Workers;
use guard::{Guard, NotEntered};
use seats::Seats;

/// Bytes taken from a socket at a time.
const READ_BYTES: usize = 64 << 10;
/// A sidecar speaks every 250 ms; one silent for this long has lost its connection without a word.
const SILENCE_MAX: Duration = Duration::from_secs(15);
/// A sidecar that takes no acknowledgement for this long is stuck.
const WRITE_TIME_MAX: Duration = Duration::from_secs(5);
const ACK_EVERY: Duration = Duration::from_secs(1);
/// After a failed accept, most often for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Peers that are proving themselves at a time; more wait to be accepted, so that strangers take no stream's place.
const ENTERING_MAX: usize = 256;

/// Why a stream ends.
#[derive(Debug, thiserror::Error)]
enum Ended {
    #[error("the sidecar closed the stream")]
    Closed,
    #[error("this balancer stops")]
    Shutdown,
    #[error("nothing came for {} s", SILENCE_MAX.as_secs())]
    Silent,
    #[error("the connection broke")]
    Broken(#[from] std::io::Error),
    #[error("the stream was cut inside a frame")]
    Cut,
    #[error(transparent)]
    Frame(#[from] CodecError),
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
    #[error(transparent)]
    Url(#[from] upstream::UrlError),
    #[error(transparent)]
    NotEntered(#[from] NotEntered),
}

impl Ended {
    fn label(&self) -> StreamEnd {
        match self {
            Self::Closed => StreamEnd::Closed,
            Self::Shutdown => StreamEnd::Shutdown,
            Self::Silent => StreamEnd::Silent,
            Self::Broken(_) | Self::Cut => StreamEnd::Broken,
            Self::Frame(_) => StreamEnd::BadFrame,
            Self::Protocol(_) => StreamEnd::Protocol,
            Self::Url(_) => StreamEnd::BadUrl,
            Self::NotEntered(why) => match why {
                NotEntered::TimedOut => StreamEnd::HandshakeTimeout,
                NotEntered::Tls(_) => StreamEnd::Tls,
                NotEntered::KeyMissing => StreamEnd::KeyMissing,
                NotEntered::NoKeyHere => StreamEnd::NoKeyHere,
                NotEntered::WrongKey => StreamEnd::WrongKey,
                NotEntered::Broken(_) => StreamEnd::Broken,
                NotEntered::Malformed => StreamEnd::BadFrame,
            },
        }
    }
}

/// Accepts sidecars until stopped.
pub async fn serve(
    listener: TcpListener,
    workers: Arc<Workers>,
    metrics: Metrics,
    streams_max: usize,
    guard: Guard,
    shutdown: Shutdown,
) {
    let slots = Arc::new(Semaphore::new(streams_max));
    let (guard, entering) = (Arc::new(guard), Arc::new(Semaphore::new(ENTERING_MAX)));
    let accept = async {
        while let Ok(turn) = Arc::clone(&entering).acquire_owned().await {
            let (stream, peer) = match listener.accept().await {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "cannot accept sidecars");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                    continue;
                }
            };
            let (workers, metrics, guard) = (Arc::clone(&workers), metrics.clone(), Arc::clone(&guard));
            let (slots, stop) = (Arc::clone(&slots), shutdown.token());
            shutdown.spawn(async move {
                let entered = stop.run_until_cancelled(guard.enter(stream)).await;
                drop(turn);
                let ended = match entered {
                    None => Ended::Shutdown,
                    Some(Err(error)) => error.into(),
                    Some(Ok(entered)) => match slots.try_acquire_owned() {
                        Ok(_slot) => run(entered, peer, &guard, workers, &metrics, stop).await,
                        Err(_) => {
                            tracing::warn!(%peer, streams_max, "too many sidecar streams: raise limits.sync_streams_max");
                            metrics.sync_ends.get_or_create(&EndLabels { cause: StreamEnd::Refused }).inc();
                            return;
                        }
                    },
                };
                tell(&ended, peer, &metrics);
            });
        }
    };
    shutdown.token().run_until_cancelled(accept).await;
}

async fn run(
    entered: guard::Entered,
    peer: SocketAddr,
    guard: &Guard,
    workers: Arc<Workers>,
    metrics: &Metrics,
    stop: CancellationToken,
) -> Ended {
    metrics.sync_streams.inc();
    metrics.sync_opened.get_or_create(&OpenedLabels { proven: Snake(entered.proven) }).inc();
    let mut link = Link {
        stream: entered.socket,
        peer,
        guard,
        inbox: Inbox::new(),
        decoder: Decoder::new(),
        seats: Seats::new(workers, metrics.clone()),
        acked: Vec::new(),
        metrics: metrics.clone(),
    };
    link.decoder.push(&entered.begun);
    let ended = tokio::select! {
        ended = link.read_on() => ended,
        () = stop.cancelled() => Ended::Shutdown,
    };
    drop(link);
    metrics.sync_streams.dec();
    ended
}

fn tell(ended: &Ended, peer: SocketAddr, metrics: &Metrics) {
    metrics.sync_ends.get_or_create(&EndLabels { cause: ended.label() }).inc();
    match ended.label() {
        StreamEnd::Closed | StreamEnd::Shutdown => tracing::info!(%peer, "sidecar stream ended: {ended}"),
        _ => tracing::warn!(%peer, error = ended as &dyn std::error::Error, "sidecar stream ended"),
    }
}

/// One sidecar's stream.
struct Link<'a> {
    stream: Socket,
    peer: SocketAddr,
    guard: &'a Guard,
    inbox: Inbox,
    decoder: Decoder<FromSidecar>,
    seats: Seats,
    /// Watermark last acknowledged, by worker.
    acked: Vec<Option<(u64, u64)>>,
    metrics: Metrics,
}

impl Link<'_> {
    async fn read_on(&mut self) -> Ended {
        match self.read_frames().await {
            Ok(never) => match never {},
            Err(ended) => ended,
        }
    }

    async fn read_frames(&mut self) -> Result<std::convert::Infallible, Ended> {
        let mut bytes = vec![0; READ_BYTES];
        let mut ack_at = tokio::time::interval(ACK_EVERY);
        ack_at.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        let mut silent_at = tokio::time::Instant::now() + SILENCE_MAX;
        loop {
            while let Some(message) = self.decoder.next()? {
                silent_at = tokio::time::Instant::now() + SILENCE_MAX;
                self.take(message).await?;
            }
            let read = tokio::select! {
                read = self.stream.read(&mut bytes) => read?,
                _ = ack_at.tick() => {
                    self.acknowledge().await?;
                    continue;
                }
                () = tokio::time::sleep_until(silent_at) => return Err(Ended::Silent),
            };
            if read == 0 {
                return Err(if self.decoder.is_inside_frame() { Ended::Cut } else { Ended::Closed });
            }
            self.decoder.push(&bytes[..read]);
        }
    }

    async fn take(&mut self, message: FromSidecar) -> Result<(), Ended> {
        let kind = match &message {
            FromSidecar::Hello(_) => FrameKind::Hello,
            FromSidecar::Snapshot(_) => FrameKind::Snapshot,
            FromSidecar::Delta(_) => FrameKind::Delta,
            FromSidecar::Load(_) => FrameKind::Load,
            FromSidecar::Learnt(_) => FrameKind::Learnt,
            FromSidecar::Digest(_) => FrameKind::Digest,
            FromSidecar::Buckets(_) | FromSidecar::Repair(_) => FrameKind::Repair,
            FromSidecar::Embeddings(_) => FrameKind::Embeddings,
            FromSidecar::Heartbeat => FrameKind::Heartbeat,
        };
        self.metrics.sync_frames.get_or_create(&FrameLabels { kind }).inc();
        let first_hello = self.inbox.hello().is_none();
        for change in self.inbox.apply(message)? {
            match change {
                Change::Hello(hello) => {
                    let secure = self.guard.sidecars.as_deref();
                    let address = upstream::resolve(&hello.advertised_url, self.peer.ip(), secure.is_some()).await?;
                    if let Some((address, tls)) = address.secure().zip(secure) {
                        tls.remember(address.0, address.1);
                    }
                    self.seats.describe(&hello, &address, Instant::now());
                    self.acked.resize(hello.workers.len(), None);
                    if first_hello {
                        tracing::info!(peer = %self.peer, worker = address.name, "sidecar connected");
                        self.send(&FromBalancer::Welcome(PROTOCOL)).await?;
                    }
                }
                Change::Resync { worker } => {
                    self.metrics.sync_resyncs.inc();
                    self.seats.void(worker);
                    self.send(&FromBalancer::Resync { worker }).await?;
                }
                Change::Digest { worker, levels } => {
                    if let Some(question) = self.seats.audit(worker, &levels) {
                        self.send(&question).await?;
                    }
                }
                Change::Buckets(theirs) => {
                    if let Some(question) = self.seats.compare(&theirs) {
                        if matches!(question, FromBalancer::Resync { .. }) {
                            self.inbox.resync(theirs.worker);
                            self.metrics.sync_resyncs.inc();
                        }
                        self.send(&question).await?;
                    }
                }
                other => self.seats.perform(other),
            }
        }
        self.seats.heard(Instant::now());
        Ok(())
    }

    async fn acknowledge(&mut self) -> Result<(), Ended> {
        let mut frames = Vec::new();
        for (worker, acked) in (0u16..).zip(&mut self.acked) {
            let watermark = self.inbox.watermark(worker);
            if let Some((epoch, seq)) = watermark.filter(|_| watermark != *acked) {
                frames.extend_from_slice(&encode_balancer(&FromBalancer::Ack { worker, epoch, seq }));
                *acked = watermark;
            }
        }
        self.write(&frames).await
    }

    async fn send(&mut self, message: &FromBalancer) -> Result<(), Ended> {
        self.write(&encode_balancer(message)).await
    }

    async fn write(&mut self, frames: &[u8]) -> Result<(), Ended> {
        let written = timeout(WRITE_TIME_MAX, async {
            self.stream.write_all(frames).await?;
            self.stream.flush().await
        });
        let written = written.await;
        Ok(written.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()))?)
    }
}
