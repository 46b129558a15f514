//! KV events on a ZMQ PUB socket, replay on a ROUTER socket.
//!
//! Mirrors `vllm/distributed/kv_events.py` (0.32): three frames `[topic, seq, payload]`; one task serves both sockets,
//! as vLLM's publisher thread does. The socket is an XPUB, which is PUB on the wire, so that subscriptions can be seen.

use crate::cache::Batch;
use crate::fault::Fault;
use bytes::Bytes;
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};
use tokio::runtime::{Builder, Runtime};
use tokio::sync::{mpsc, watch};
use zeromq::{RouterSocket, Socket, SocketRecv, SocketSend, XPubSocket, ZmqError, ZmqMessage};

/// What the engine tells its publisher.
#[derive(Debug)]
pub enum Command {
    /// One step's events.
    Batch(Batch),
    /// A fault of the wire.
    Fault(Fault),
}

/// What others may see of the publisher.
#[derive(Debug, Default)]
pub struct Published {
    /// Next sequence number.
    pub next_seq: AtomicU64,
    /// Subscriptions received since the last restart.
    pub subscriptions: AtomicU64,
    /// Restarts finished.
    pub restarts: AtomicU64,
    /// Those of the whole engine.
    pub changes: Changes,
}

/// Counts changes of anything that [`crate::State`] shows; clones count together.
#[derive(Clone, Debug, Default)]
pub struct Changes(Arc<watch::Sender<u64>>);

impl Changes {
    /// Wakes those who wait for a state.
    pub fn note(&self) {
        self.0.send_modify(|n| *n += 1);
    }

    /// Sees changes from here on.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.0.subscribe()
    }
}

/// Settings of the publisher.
#[derive(Clone, Debug)]
pub struct Options {
    /// First frame of each message.
    pub topic: String,
    /// Replies to a replay carry the topic: vLLM 0.32, SGLang from 0.5.22.
    pub replay_topic: bool,
    /// Batches kept for replay.
    pub buffer_steps: usize,
    /// Data-parallel rank, the last element of each batch.
    pub rank: u32,
}

/// Longest wait for a reader that does not read; its message is lost then.
const SEND_MAX: Duration = Duration::from_secs(5);
/// Tries to find consecutive free ports for all ranks.
const RUN_TRIES: u32 = 50;
/// Tries to bind an address again after a restart, 10 ms apart.
const REBIND_TRIES: u32 = 200;

/// Runs what the sockets of one life spawn. A dying process cuts its connections, while `Socket::close` leaves accepted ones open:
/// ending the runtime cuts them.
struct Life(Option<Runtime>);

impl Life {
    fn begin() -> Result<Self, ZmqError> {
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        runtime.map(|runtime| Self(Some(runtime))).map_err(ZmqError::from)
    }

    async fn bind<S: Socket + 'static>(&self, endpoint: String) -> Result<(S, String), ZmqError> {
        let bind = async move {
            let mut socket = S::new();
            let bound = socket.bind(&endpoint).await?.to_string();
            Ok((socket, bound))
        };
        let Some(runtime) = &self.0 else { return Err(ZmqError::Other("the life has ended")) };
        runtime.spawn(bind).await.unwrap_or(Err(ZmqError::Other("the bind was cut")))
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}

/// Both sockets, bound.
pub struct Publisher {
    life: Life,
    events: XPubSocket,
    replay: RouterSocket,
    /// Address of the event socket, `tcp://…`.
    pub events_endpoint: String,
    /// Address of the replay socket, `tcp://…`.
    pub replay_endpoint: String,
    wire: Wire,
    published: Arc<Published>,
}

impl Publisher {
    /// Binds both sockets; port 0 lets the system choose.
    ///
    /// # Errors
    /// An address is in use or wrong.
    pub async fn bind(
        host: &str,
        ports: (u16, u16),
        options: Options,
        published: Arc<Published>,
    ) -> Result<Self, ZmqError> {
        let life = Life::begin()?;
        let (events, events_endpoint) = life.bind(format!("tcp://{host}:{}", ports.0)).await?;
        let (replay, replay_endpoint) = life.bind(format!("tcp://{host}:{}", ports.1)).await?;
        let wire = Wire::new(options);
        Ok(Self { life, events, replay, events_endpoint, replay_endpoint, wire, published })
    }

    /// Binds the sockets of `ranks` ranks: each port is that of rank 0 plus the rank. Port 0 lets the system choose the first of a free run.
    ///
    /// # Errors
    /// An address is in use or wrong.
    pub async fn bind_ranks(
        host: &str,
        ports: (u16, u16),
        options: &Options,
        published: &[Arc<Published>],
    ) -> Result<Vec<Self>, ZmqError> {
        let mut tries = 0;
        loop {
            match Self::bind_run(host, ports, options, published).await {
                Err(error) if tries < RUN_TRIES && (ports.0 == 0 || ports.1 == 0) && published.len() > 1 => {
                    tracing::debug!(%error, "no free run of ports here");
                    tries += 1;
                }
                bound => return bound,
            }
        }
    }

    async fn bind_run(
        host: &str,
        mut ports: (u16, u16),
        options: &Options,
        published: &[Arc<Published>],
    ) -> Result<Vec<Self>, ZmqError> {
        let mut bound: Vec<Self> = Vec::with_capacity(published.len());
        for (rank, published) in (0..).zip(published) {
            if let Some(first) = bound.first() {
                ports = (port_of(&first.events_endpoint), port_of(&first.replay_endpoint));
            }
            let past = || ZmqError::Other("the ports of the ranks do not fit below 65536");
            let port = |base: u16| base.checked_add(if base == 0 { 0 } else { rank }).ok_or_else(past);
            let options = Options { rank: u32::from(rank), ..options.clone() };
            bound.push(Self::bind(host, (port(ports.0)?, port(ports.1)?), options, Arc::clone(published)).await?);
        }
        Ok(bound)
    }

    /// Publishes until the engine is gone.
    pub async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        loop {
            tokio::select! {
                biased;
                message = self.events.recv() => self.note_subscription(message),
                request = self.replay.recv() => {
                    if let Ok(request) = request {
                        self.answer(&request.into_vec()).await;
                    }
                }
                command = commands.recv() => match command {
                    Some(Command::Batch(batch)) => {
                        let messages = self.wire.batch(now(), &batch);
                        self.published.next_seq.store(self.wire.next_seq, Ordering::Relaxed);
                        self.published.changes.note();
                        self.publish(messages).await;
                    }
                    Some(Command::Fault(Fault::Restart)) => self = self.restart().await,
                    Some(Command::Fault(fault)) => {
                        let messages = self.wire.fault(fault);
                        self.publish(messages).await;
                    }
                    None => return,
                },
            }
        }
    }

    fn note_subscription(&self, message: Result<ZmqMessage, ZmqError>) {
        let subscribes = message.is_ok_and(|message| message.get(0).is_some_and(|frame| frame.first() == Some(&1)));
        self.published.subscriptions.fetch_add(u64::from(subscribes), Ordering::Relaxed);
        self.published.changes.note();
    }

    async fn publish(&mut self, messages: Vec<Message>) {
        for message in messages {
            if let Ok(message) = ZmqMessage::try_from(message.to_vec()) {
                // A slow reader's loss is seen by its sequence numbers.
                let _ = tokio::time::timeout(SEND_MAX, self.events.send(message)).await;
            }
        }
    }

    /// `[peer, "", start]` → every kept batch from `start` on, then the end marker. Other shapes get no answer.
    async fn answer(&mut self, request: &[Bytes]) {
        let [peer, delimiter, start] = request else { return };
        let Ok(start) = <[u8; 8]>::try_from(start.as_ref()) else { return };
        if !delimiter.is_empty() {
            return;
        }
        for [topic, seq, payload] in self.wire.kept_from(u64::from_be_bytes(start)) {
            let mut frames = vec![peer.clone(), Bytes::new(), topic, seq, payload];
            if !self.wire.options.replay_topic {
                frames.remove(2);
            }
            let Ok(message) = ZmqMessage::try_from(frames) else { return };
            let sent = tokio::time::timeout(SEND_MAX, self.replay.send(message)).await;
            if !matches!(sent, Ok(Ok(()))) {
                return;
            }
        }
    }

    async fn restart(mut self) -> Self {
        // The old connections go first: a new life never shares one with the old.
        self.life = Life(None);
        self.published.next_seq.store(0, Ordering::Relaxed);
        self.published.subscriptions.store(0, Ordering::Relaxed);
        match self.rebind().await {
            Ok((life, events, replay)) => {
                (self.life, self.events, self.replay) = (life, events, replay);
                self.published.restarts.fetch_add(1, Ordering::Relaxed);
            }
            Err(error) => tracing::error!(%error, "cannot bind again; the engine goes on without events"),
        }
        self.wire = Wire::new(self.wire.options);
        self.published.changes.note();
        self
    }

    async fn rebind(&self) -> Result<(Life, XPubSocket, RouterSocket), ZmqError> {
        let life = Life::begin()?;
        let mut tries = 0;
        loop {
            let bound = async {
                let (events, _) = life.bind(self.events_endpoint.clone()).await?;
                let (replay, _) = life.bind(self.replay_endpoint.clone()).await?;
                Ok((events, replay))
            };
            match bound.await {
                Ok((events, replay)) => return Ok((life, events, replay)),
                Err(error) if tries == REBIND_TRIES => return Err(error),
                Err(error) => tracing::debug!(%error, "address still in use"),
            }
            tries += 1;
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

/// Port of `tcp://host:port`; 0 when there is none.
fn port_of(endpoint: &str) -> u16 {
    endpoint.rsplit(':').next().and_then(|port| port.parse().ok()).unwrap_or(0)
}

fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

type Message = [Bytes; 3];

/// Sequence numbers, the replay buffer and the faults that touch them; no socket.
struct Wire {
    options: Options,
    topic: Bytes,
    next_seq: u64,
    kept: VecDeque<Message>,
    drop: u64,
    duplicate: u64,
    reorder: bool,
    held: Option<Message>,
}

impl Wire {
    fn new(options: Options) -> Self {
        let topic = Bytes::from(options.topic.clone().into_bytes());
        let kept = VecDeque::new();
        Self { options, topic, next_seq: 0, kept, drop: 0, duplicate: 0, reorder: false, held: None }
    }

    /// Numbers and keeps a batch; returns what goes out for it.
    fn batch(&mut self, ts: f64, batch: &Batch) -> Vec<Message> {
        let payload = Bytes::from(batch.encode(ts, self.options.rank));
        let message = [self.topic.clone(), Bytes::copy_from_slice(&self.next_seq.to_be_bytes()), payload];
        self.next_seq += 1;
        self.kept.push_back(message.clone());
        while self.kept.len() > self.options.buffer_steps {
            self.kept.pop_front();
        }
        if self.drop > 0 {
            self.drop -= 1;
            return Vec::new();
        }
        if std::mem::take(&mut self.reorder) {
            self.held = Some(message);
            return Vec::new();
        }
        let mut out = vec![message];
        if self.duplicate > 0 {
            self.duplicate -= 1;
            out.push(out[0].clone());
        }
        out.extend(self.held.take());
        out
    }

    fn fault(&mut self, fault: Fault) -> Vec<Message> {
        match fault {
            Fault::Drop { count } => self.drop = count,
            Fault::Duplicate { count } => self.duplicate = count,
            Fault::Reorder => self.reorder = true,
            Fault::Forget => self.kept.clear(),
            Fault::Garbage => {
                let seq = Bytes::copy_from_slice(&self.next_seq.to_be_bytes());
                return vec![[self.topic.clone(), seq, Bytes::from_static(b"\xc1 no msgpack")]];
            }
            _ => {}
        }
        Vec::new()
    }

    /// Kept batches from `start` on, then the end marker.
    fn kept_from(&self, start: u64) -> Vec<Message> {
        let first = self.next_seq - self.kept.len() as u64;
        let skip = usize::try_from(start.saturating_sub(first)).unwrap_or(usize::MAX);
        let end = [Bytes::new(), Bytes::from_static(&[0xff; 8]), Bytes::new()];
        self.kept.iter().skip(skip).cloned().chain([end]).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::events::{HashForm, KvEvent};

    fn seqs(messages: &[Message]) -> Vec<u64> {
        messages.iter().map(|[_, seq, _]| u64::from_be_bytes(seq.as_ref().try_into().unwrap())).collect()
    }

    /// Sends `batches` batches after a fault and compares the sequence numbers that go out.
    #[track_caller]
    fn check(fault: Fault, batches: usize, expect: &[u64]) -> Wire {
        let mut wire = Wire::new(Options { topic: "kv".to_owned(), replay_topic: true, buffer_steps: 3, rank: 0 });
        wire.fault(fault);
        let cleared = Batch::Blocks { events: vec![KvEvent::Cleared], form: HashForm::Int };
        let sent: Vec<_> = (0..batches).flat_map(|_| wire.batch(0.0, &cleared)).collect();
        assert_eq!(seqs(&sent), expect);
        wire
    }

    #[test]
    fn a_dropped_batch_keeps_its_number_and_is_replayed() {
        let wire = check(Fault::Drop { count: 2 }, 3, &[2]);
        assert_eq!(seqs(&wire.kept_from(1)), [1, 2, u64::MAX]);
    }

    #[test]
    fn a_reordered_batch_follows_its_successor() {
        check(Fault::Reorder, 3, &[1, 0, 2]);
    }

    #[test]
    fn a_duplicate_goes_out_twice() {
        check(Fault::Duplicate { count: 1 }, 2, &[0, 0, 1]);
    }

    #[test]
    fn the_buffer_forgets_the_oldest() {
        let mut wire = check(Fault::Resume, 5, &[0, 1, 2, 3, 4]);
        assert_eq!(seqs(&wire.kept_from(0)), [2, 3, 4, u64::MAX]);
        assert_eq!(seqs(&wire.kept_from(9)), [u64::MAX]);
        wire.fault(Fault::Forget);
        assert_eq!(seqs(&wire.kept_from(0)), [u64::MAX]);
    }
}
