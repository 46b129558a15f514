//! What the parts of the sidecar share: the ranks, the engine's facts, and the signals that something changed.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError, RwLock};

use fovea_gossip::message::{EngineFacts, EngineKind, HashScheme, Hello, Learnt, PROTOCOL};
use fovea_gossip::outbox::{Outbox, RingLimits};
use fovea_sidecar_core::publish;
use tokio::sync::{Notify, watch};

use crate::config::Config;
use crate::learnt::Log;
use crate::load::RankLoad;
use crate::worker::{Settings, Worker, lock, new_epoch};

/// The ranks of one engine, and the outbox they fill. Replaced as a whole when the ranks change.
#[derive(Debug)]
pub struct Fleet {
    pub workers: Vec<Arc<Worker>>,
    pub outbox: Arc<Mutex<Outbox>>,
}

/// One stream to a balancer, for `/debug/state`.
#[derive(Clone, Copy, Debug, Default, serde::Serialize)]
pub struct StreamInfo {
    pub connected: bool,
    /// Highest seq acknowledged, of the worker that was acknowledged last.
    pub acknowledged_seq: u64,
    pub snapshots: u64,
}

pub struct State {
    fleet: RwLock<Arc<Fleet>>,
    facts: Mutex<Option<EngineFacts>>,
    /// The last look at the engine succeeded.
    up: AtomicBool,
    /// The engine ends: no new requests until there is another.
    draining: AtomicBool,
    /// This program ends.
    stopping: AtomicBool,
    /// A look at the engine is wanted before its time.
    look: Notify,
    hello: watch::Sender<Option<Arc<Hello>>>,
    /// Bumped when the outbox has something new.
    published: watch::Sender<u64>,
    load_changed: Arc<watch::Sender<u64>>,
    /// Bumped at each cache reset seen by the proxy.
    resets: watch::Sender<u64>,
    pub streams: Mutex<BTreeMap<SocketAddr, StreamInfo>>,
    /// What the closed loop learnt of this engine.
    pub learnt: Mutex<Log>,
    advertised_url: String,
    ring: RingLimits,
    publish: publish::Config,
    tokens_min: u32,
    configured: EngineKind,
    /// Fingerprint of the encoder. While there is to be one and it is not known, nothing is said to balancers.
    encoder: Mutex<Option<[u8; 32]>>,
    encoder_wanted: bool,
}

impl State {
    pub fn new(config: &Config) -> Arc<Self> {
        let ring_bytes = usize::try_from(config.gossip.ring_max.as_u64()).unwrap_or(usize::MAX);
        let fleet =
            Fleet { workers: Vec::new(), outbox: Arc::new(Mutex::new(Outbox::new(&[], RingLimits::default()))) };
        Arc::new(Self {
            fleet: RwLock::new(Arc::new(fleet)),
            facts: Mutex::new(None),
            up: AtomicBool::new(false),
            draining: AtomicBool::new(false),
            stopping: AtomicBool::new(false),
            look: Notify::new(),
            hello: watch::Sender::new(None),
            published: watch::Sender::new(0),
            load_changed: Arc::new(watch::Sender::new(0)),
            resets: watch::Sender::new(0),
            streams: Mutex::new(BTreeMap::new()),
            learnt: Mutex::default(),
            advertised_url: config.advertised_url.trim_end_matches('/').to_owned(),
            ring: RingLimits { bytes: ring_bytes, ..RingLimits::default() },
            publish: publish::Config {
                max_blocks: config.blocks.blocks_max,
                block_size: (config.model.block_size > 0).then_some(config.model.block_size),
            },
            tokens_min: config.blocks.tokens_min,
            configured: config.engine.kind.known().unwrap_or(EngineKind::Vllm),
            encoder: Mutex::new(None),
            encoder_wanted: config.encoder.is_on(),
        })
    }

    pub fn fleet(&self) -> Arc<Fleet> {
        Arc::clone(&self.fleet.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub fn workers(&self) -> Vec<Arc<Worker>> {
        self.fleet().workers.clone()
    }

    pub fn worker_of_rank(&self, rank: u32) -> Option<Arc<Worker>> {
        self.fleet().workers.iter().find(|worker| worker.rank == rank).cloned()
    }

    /// New ranks: new workers, each in an epoch of its own. Requests in flight stay charged to the old ones.
    pub fn rebuild(&self, ranks: &[u32], kind: EngineKind) -> Arc<Fleet> {
        let mut epoch = 0;
        let epochs: Vec<u64> = ranks
            .iter()
            .map(|_| {
                epoch = new_epoch(epoch);
                epoch
            })
            .collect();
        let outbox = Arc::new(Mutex::new(Outbox::new(&epochs, self.ring)));
        // The others have no blocks of a token.
        let tokens_min = if kind == EngineKind::Sglang { self.tokens_min } else { 0 };
        let settings = Settings { publish: self.publish, tokens_min }.of_published_blocks();
        let worker = |(index, &rank): (u16, &u32)| {
            let load = RankLoad::new(Arc::clone(&self.load_changed));
            Arc::new(Worker::new(index, rank, load, Arc::clone(&outbox), settings))
        };
        let workers = (0..).zip(ranks).map(worker).collect();
        let fleet = Arc::new(Fleet { workers, outbox });
        *self.fleet.write().unwrap_or_else(PoisonError::into_inner) = Arc::clone(&fleet);
        fleet
    }

    /// Facts of a look that succeeded. True = they changed.
    pub fn set_facts(&self, facts: EngineFacts) -> bool {
        if !self.up.swap(true, Relaxed) {
            // Another engine than the one that was drained.
            self.draining.store(false, Relaxed);
        }
        let changed = lock(&self.facts).replace(facts.clone()) != Some(facts);
        self.refresh_hello();
        changed
    }

    /// The engine does not answer.
    pub fn set_down(&self) {
        if self.up.swap(false, Relaxed) {
            self.refresh_hello();
        }
    }

    /// A request found the engine dead or not to be reached: balancers should know before the next look is due.
    pub fn want_look(&self) {
        self.look.notify_one();
    }

    /// Ends when a look is wanted.
    pub async fn look_wanted(&self) {
        self.look.notified().await;
    }

    /// This program ends: no new requests.
    pub fn set_stopping(&self) {
        self.stopping.store(true, Relaxed);
        self.refresh_hello();
    }

    /// The engine ends: no new requests, until it was down and is up again.
    pub fn set_draining(&self) {
        self.draining.store(true, Relaxed);
        self.refresh_hello();
    }

    pub fn is_up(&self) -> bool {
        self.up.load(Relaxed)
    }

    pub fn is_draining(&self) -> bool {
        self.draining.load(Relaxed) || self.stopping.load(Relaxed)
    }

    pub fn facts(&self) -> Option<EngineFacts> {
        lock(&self.facts).clone()
    }

    /// The encoder serves.
    pub fn set_encoder(&self, fingerprint: [u8; 32]) {
        *lock(&self.encoder) = Some(fingerprint);
        self.refresh_hello();
    }

    /// Family of the engine; of one not seen yet as configured.
    pub fn kind(&self) -> EngineKind {
        lock(&self.facts).as_ref().map_or(self.configured, |facts| facts.kind)
    }

    /// Longest sequence in tokens; unknown = no limit.
    pub fn max_model_len(&self) -> u32 {
        lock(&self.facts).as_ref().map(|facts| facts.max_model_len).filter(|&most| most > 0).unwrap_or(u32::MAX)
    }

    /// Makes the hello anew; streams send it when it differs.
    pub fn refresh_hello(&self) {
        let Some(mut engine) = self.facts() else { return };
        let encoder_fingerprint = *lock(&self.encoder);
        if self.encoder_wanted && encoder_fingerprint.is_none() {
            return;
        }
        let workers = self.workers();
        engine.hybrid |= workers.iter().any(|worker| worker.is_hybrid());
        if workers.iter().any(|worker| worker.has_pairs()) {
            engine.hash_scheme = HashScheme::Fovea1Pairs;
        }
        let hello = Hello {
            protocol: PROTOCOL,
            advertised_url: self.advertised_url.clone(),
            engine,
            workers: workers.iter().map(|worker| worker.facts()).collect(),
            draining: self.is_draining() || !self.is_up(),
            media_trusted: workers.iter().all(|worker| worker.media_trusted()),
            encoder_fingerprint,
        };
        self.hello.send_if_modified(|old| {
            let changed = old.as_deref() != Some(&hello);
            if changed {
                *old = Some(Arc::new(hello));
            }
            changed
        });
    }

    /// `None` until the engine has been seen once.
    pub fn hello(&self) -> watch::Receiver<Option<Arc<Hello>>> {
        self.hello.subscribe()
    }

    pub fn published(&self) -> watch::Receiver<u64> {
        self.published.subscribe()
    }

    pub fn announce(&self) {
        self.published.send_modify(|version| *version = version.wrapping_add(1));
    }

    pub fn load_changed(&self) -> watch::Receiver<u64> {
        self.load_changed.subscribe()
    }

    /// Facts for the balancers.
    pub fn learn(&self, facts: Vec<Learnt>) {
        let mut log = lock(&self.learnt);
        let news = facts.into_iter().filter_map(|fact| log.put(fact).then_some(())).count();
        drop(log);
        if news > 0 {
            self.announce();
        }
    }

    /// The proxy saw the engine empty its cache.
    pub fn cache_reset(&self) {
        self.resets.send_modify(|count| *count = count.wrapping_add(1));
    }

    pub fn resets(&self) -> watch::Receiver<u64> {
        self.resets.subscribe()
    }
}
