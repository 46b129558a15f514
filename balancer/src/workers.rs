//! The shared state of routing: the fleet behind one short lock, and one index per pool, read without a lock and written behind another.
//!
//! **Invariant:** no lock is held across an await, and the fleet's lock is never taken while an index lock is held.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fovea_balancer_core::choose::{self, Candidate, Explained, Mode, Query};
use fovea_balancer_core::fleet::{Description, Fleet, Freshness, Resolved, Served, State, Worker, WorkerKey};
use fovea_balancer_core::health::{self, Health};
use fovea_balancer_core::history::Recall;
use fovea_balancer_core::index::{Index, Reader, WorkerDepth, WorkerIndex};
use fovea_balancer_core::load::{BookingId, Charge, Report};
use fovea_gossip::message::EngineFacts;
use fovea_kv::SequenceHash;
use tokio::sync::Notify;
use xxhash_rust::xxh3::xxh3_64;

use crate::{diagnose, learnt, render};

/// All that a prediction depends on. Workers with equal facts share an index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolFacts {
    /// Without the served names: those may differ inside a pool.
    pub engine: EngineFacts,
    /// Tokens per block; 0 = not known yet.
    pub block_size: u32,
    /// Engines without a sidecar.
    pub is_plain: bool,
    /// Fingerprint of the encoder beside the engine: KV of another's rows is of no use.
    pub encoder: Option<[u8; 32]>,
}

impl PoolFacts {
    pub fn new(engine: &EngineFacts, block_size: u32) -> Self {
        let engine = EngineFacts { served_names: Vec::new(), lora_names: Vec::new(), ..engine.clone() };
        Self { engine, block_size, is_plain: false, encoder: None }
    }
}

/// Workers for which one prediction holds, and what they hold.
pub struct Pool {
    pub facts: PoolFacts,
    index: Mutex<Index>,
    reader: Reader,
    /// How its engines key media, as far as their sidecars have seen.
    pub learnt: learnt::Store,
    /// What its engines' renderers showed.
    pub rendered: render::Store,
    /// What is wrong with it, if so.
    pub watched: diagnose::Watched,
    /// Requests routed; a count per pool, so that each pool's turns go round evenly whatever the mix of models.
    turns: AtomicU64,
}

impl Pool {
    pub fn new(facts: PoolFacts, index_entries_max: usize) -> Self {
        let index = Index::new(index_entries_max);
        let reader = index.reader();
        Self {
            facts,
            index: Mutex::new(index),
            reader,
            learnt: learnt::Store::default(),
            rendered: render::Store::default(),
            watched: diagnose::Watched::default(),
            turns: AtomicU64::new(0),
        }
    }

    /// Lock-free.
    pub fn index(&self) -> &Reader {
        &self.reader
    }

    pub fn index_mut(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PartialEq for Pool {
    fn eq(&self, other: &Self) -> bool {
        self.facts == other.facts
    }
}

impl Eq for Pool {}

pub type PoolRef = Arc<Pool>;

/// The part of a request that the choice looks at.
#[derive(Clone, Debug, Default)]
pub struct Ask<'a> {
    pub model: &'a str,
    pub prompt_tokens: u32,
    pub hashes: &'a [SequenceHash],
    /// Tokens per block where `hashes` are the estimator's and no engine's: only what was sent where can be looked up by them. 0 = they
    /// are the pool's own.
    pub estimated_block_tokens: u32,
    /// The engine does not look into its cache for this prompt; what it computes is stored all the same.
    pub no_reuse: bool,
    pub images: &'a [(u32, u32)],
    /// Of the same images, for [`Embeddings`](fovea_balancer_core::embeddings::Embeddings); may be empty.
    pub image_keys: &'a [u64],
    pub media: Option<u64>,
    pub session: Option<u64>,
}

impl Ask<'_> {
    fn block_tokens(&self, pool: &Pool) -> u32 {
        if self.estimated_block_tokens > 0 { self.estimated_block_tokens } else { pool.facts.block_size }
    }
}

/// A chosen worker, with its load booked until this is dropped.
pub struct Route {
    /// For people.
    pub name: Arc<str>,
    /// Base URL of its sidecar.
    pub url: Arc<str>,
    pub dp_rank: u32,
    /// Leading blocks of the prompt that the worker's sidecar has confirmed.
    pub confirmed_blocks: u32,
    pub reused_tokens: u32,
    /// It has no sidecar.
    pub plain: bool,
    /// Its overlap could be believed.
    pub precise: bool,
    /// Its overlap is what this balancer sent it.
    pub approximate: bool,
    pub booked: Booked,
}

/// One request's share of its worker's load; given back on drop, however the request ended.
pub struct Booked {
    workers: Arc<Workers>,
    pub key: WorkerKey,
    id: BookingId,
    /// Its chain is not told by events, or they are not read.
    remember: bool,
    started: AtomicBool,
}

impl Booked {
    /// The first response byte came.
    pub fn started(&self) {
        self.started.store(true, Ordering::Relaxed);
        self.workers.fleet().started(self.key, self.id, self.remember, Instant::now());
    }
}

impl Drop for Booked {
    fn drop(&mut self) {
        let failed = !self.started.load(Ordering::Relaxed);
        self.workers.fleet().release(self.key, self.id, failed);
        self.workers.freed.notify_one();
    }
}

pub struct Workers {
    fleet: Mutex<Fleet<PoolRef>>,
    /// Locked while the fleet is, never the other way round.
    health: Mutex<Health>,
    /// Some worker's load may have fallen.
    freed: Notify,
    settings: choose::Settings,
    index_entries_max: usize,
    /// Requests that asked for a pool.
    resolved: AtomicU64,
}

impl Workers {
    pub fn new(freshness: Freshness, settings: choose::Settings, index_entries_max: usize) -> Self {
        Self::with_recall(freshness, Recall::default(), settings, index_entries_max)
    }

    /// `recall`: of what was sent to workers without events.
    pub fn with_recall(
        freshness: Freshness,
        recall: Recall,
        settings: choose::Settings,
        index_entries_max: usize,
    ) -> Self {
        let fleet = Mutex::new(Fleet::with_recall(freshness, recall));
        let health = Mutex::new(Health::new(health::Settings::default()));
        Self { fleet, health, freed: Notify::new(), settings, index_entries_max, resolved: AtomicU64::new(0) }
    }

    pub fn mode(&self) -> Mode {
        self.settings.mode
    }

    /// A pool with these facts that no worker is in yet; [`Self::add`] takes the one in use where there is one.
    pub fn new_pool(&self, facts: PoolFacts) -> PoolRef {
        Arc::new(Pool::new(facts, self.index_entries_max))
    }

    /// Adds a worker and gives it a place in its pool's index, freed by [`Self::remove`]. Equal pools become one.
    pub fn add(&self, mut about: Description<PoolRef>, now: Instant) -> (WorkerKey, Description<PoolRef>) {
        if let Some(pool) = self.fleet().pool_like(&about.pool) {
            about.pool = pool;
        }
        // A snapshot may be holding the index for a while; routing must not wait for it.
        about.index = about.pool.index_mut().add_worker();
        let mut fleet = self.fleet();
        while let Some(pool) = fleet.pool_like(&about.pool).filter(|pool| !Arc::ptr_eq(pool, &about.pool)) {
            // Another worker began an equal pool meanwhile.
            drop(fleet);
            about.pool.index_mut().remove_worker(about.index);
            about.index = pool.index_mut().add_worker();
            about.pool = pool;
            fleet = self.fleet();
        }
        let key = fleet.add(about.clone(), now);
        self.health().add(key, now);
        self.freed.notify_one();
        (key, about)
    }

    pub fn describe(&self, key: WorkerKey, about: Description<PoolRef>) {
        self.fleet().describe(key, about);
    }

    /// Out of routing at once; then out of the index.
    pub fn remove(&self, key: WorkerKey) {
        let gone = self.fleet().remove(key);
        self.health().remove(key);
        self.freed.notify_one();
        if let Some(about) = gone {
            about.pool.index_mut().remove_worker(about.index);
        }
    }

    pub fn heard(&self, keys: impl Iterator<Item = WorkerKey>, now: Instant) {
        let mut fleet = self.fleet();
        keys.for_each(|key| fleet.heard(key, now));
    }

    pub fn report(&self, key: WorkerKey, report: Report) {
        self.fleet().report(key, report);
        self.freed.notify_one();
    }

    /// A worker's encoder holds other items; see [`Fleet::embedded`].
    pub fn embedded(&self, key: WorkerKey, anew: bool, stored: &[u64], removed: &[u64]) {
        self.fleet().embedded(key, anew, stored, removed);
    }

    /// A worker's events were applied: its waiting requests are that much further.
    pub fn measure(&self, key: WorkerKey, pool: &PoolRef, place: WorkerIndex) {
        self.fleet().measure(key, |chain, held| pool.index().depth_of(place, chain, held));
    }

    /// The pool for a model name; see [`Fleet::resolve`].
    pub fn resolve(&self, model: &str, now: Instant) -> Resolved<PoolRef> {
        // Mixed, because a regular mix of models would always meet the same pool.
        let turn = xxh3_64(&self.resolved.fetch_add(1, Ordering::Relaxed).to_le_bytes());
        self.fleet().resolve(model, turn, now)
    }

    /// Predictions of media are believed in this pool.
    pub fn media_trusted(&self, pool: &PoolRef) -> bool {
        self.fleet().media_trusted(pool)
    }

    /// Calls `look` for every name that a worker which takes requests serves, in order, with such a worker.
    pub fn each_name(&self, now: Instant, mut look: impl FnMut(&str, Served, &Description<PoolRef>)) {
        self.fleet().live_names(now).into_iter().for_each(|(name, (served, about))| look(name, served, about));
    }

    /// At least one worker takes requests.
    pub fn any_ready(&self, now: Instant) -> bool {
        let fleet = self.fleet();
        fleet.workers().iter().any(|worker| worker.state(fleet.freshness(), now).takes_requests())
    }

    /// Chooses a worker of `pool` and books the request on it; `avoid` had its try. `None` when nobody is left.
    pub fn route(self: &Arc<Self>, pool: &PoolRef, ask: &Ask, avoid: Option<WorkerKey>, now: Instant) -> Option<Route> {
        self.route_among(pool, ask, |key| Some(key) != avoid, now)
    }

    /// Does another pool serve `model` and take requests?
    pub fn is_served_elsewhere(&self, pool: &PoolRef, model: &str, now: Instant) -> bool {
        self.fleet().is_served_elsewhere(pool, model, now)
    }

    /// As [`Self::route`], among the workers that are `allowed`.
    pub fn route_among(
        self: &Arc<Self>,
        pool: &PoolRef,
        ask: &Ask,
        allowed: impl Fn(WorkerKey) -> bool,
        now: Instant,
    ) -> Option<Route> {
        let mut depths = Vec::new();
        let looked_up = if ask.no_reuse { &[] } else { ask.hashes };
        let by_events = self.settings.mode == Mode::Precise && ask.estimated_block_tokens == 0;
        if by_events {
            pool.index().depths(looked_up, &mut depths);
        }
        let block_tokens = ask.block_tokens(pool);
        let query = Query {
            prompt_tokens: ask.prompt_tokens,
            block_tokens,
            images: ask.images,
            media: ask.media,
            session: ask.session,
            turn: pool.turns.fetch_add(1, Ordering::Relaxed),
        };
        let mut explained = Vec::new();
        let mut fleet = self.fleet();
        let mut candidates: Vec<_> = fleet
            .candidates(pool, ask.model, now)
            .filter(|worker| allowed(worker.key))
            .map(|worker| {
                let confirmed = confirmed(worker, fleet.freshness(), &depths, now).filter(|_| by_events);
                candidate(worker, ask, looked_up, confirmed, fleet.recall(), now)
            })
            .collect();
        self.sift(&mut candidates, query.turn, now);
        let chosen = choose::choose(&candidates, &query, &self.settings, &mut explained)?;
        let charge = Charge {
            prefill_tokens: u64::from(ask.prompt_tokens.saturating_sub(chosen.reused_tokens)),
            prompt_tokens: u64::from(ask.prompt_tokens),
            encode_tokens: chosen.encode_tokens,
            // What it finds in the cache says nothing of its progress.
            block_tokens: if ask.no_reuse { 0 } else { block_tokens },
        };
        let by_cache = matches!(self.settings.mode, Mode::Precise | Mode::Approximate);
        let chain = if by_cache { ask.hashes.into() } else { [].into() };
        let id = fleet.book(chosen.key, charge, chain, now)?;
        self.health().sent(chosen.key, now);
        let worker = fleet.workers().iter().find(|worker| worker.key == chosen.key)?;
        let confirmed = confirmed(worker, fleet.freshness(), &depths, now).filter(|_| by_events);
        let about = worker.about.clone();
        drop(fleet);
        trace(&explained, chosen.key);
        Some(Route {
            name: about.name,
            url: about.url,
            dp_rank: about.dp_rank,
            confirmed_blocks: confirmed.map_or(0, |depth| depth[2]),
            reused_tokens: chosen.reused_tokens,
            plain: pool.facts.is_plain,
            precise: confirmed.is_some(),
            approximate: confirmed.is_none() && by_cache && !looked_up.is_empty() && !about.by_load,
            booked: Booked {
                workers: Arc::clone(self),
                key: chosen.key,
                id,
                remember: !by_events,
                started: AtomicBool::new(false),
            },
        })
    }

    /// Calls `look` for every worker with its state.
    pub fn each(&self, now: Instant, mut look: impl FnMut(&Worker<PoolRef>, State)) {
        let fleet = self.fleet();
        fleet.workers().iter().for_each(|worker| look(worker, worker.state(fleet.freshness(), now)));
    }

    /// Pools in use, each once.
    pub fn pools(&self) -> Vec<PoolRef> {
        let mut pools: Vec<PoolRef> = Vec::new();
        for worker in self.fleet().workers() {
            if !pools.iter().any(|pool| Arc::ptr_eq(pool, &worker.about.pool)) {
                pools.push(Arc::clone(&worker.about.pool));
            }
        }
        pools
    }

    fn fleet(&self) -> MutexGuard<'_, Fleet<PoolRef>> {
        self.fleet.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Depths that the worker's events tell; `None` when they cannot be believed.
fn confirmed(
    worker: &Worker<PoolRef>,
    freshness: &Freshness,
    depths: &[WorkerDepth],
    now: Instant,
) -> Option<[u32; 3]> {
    let believed = worker.about.events && worker.state(freshness, now) == State::Up;
    let depth = depths.binary_search_by_key(&worker.about.index, |depth| depth.worker);
    believed.then(|| depth.map_or([0; 3], |at| depths[at].depth))
}

/// Overlap by events, or else by what was sent to the worker; and by what it computes at this moment.
fn candidate(
    worker: &Worker<PoolRef>,
    ask: &Ask,
    chain: &[SequenceHash],
    confirmed: Option<[u32; 3]>,
    recall: &Recall,
    now: Instant,
) -> Candidate {
    let chain = if worker.about.by_load { &[] } else { chain };
    let known = confirmed.unwrap_or_else(|| [worker.history.depth(chain, recall, now); 3]);
    let assumed = worker.speculation.depth(chain, known[0], now);
    Candidate {
        key: worker.key,
        affinity: xxh3_64(worker.about.name.as_bytes()),
        overlap_blocks: known.map(|depth| depth.max(assumed)),
        embedded: worker.embeddings.held(ask.image_keys),
        waiting_tokens: worker.load.waiting_tokens(),
        decode_tokens: worker.load.decode_tokens(),
    }
}

fn trace(explained: &[Explained], chosen: WorkerKey) {
    if !tracing::enabled!(tracing::Level::TRACE) {
        return;
    }
    for why in explained {
        let (overlap, chosen) = (why.overlap_blocks, why.key == chosen);
        tracing::trace!(worker = why.key.0, ?overlap, cost = why.cost, guarded = why.guarded, chosen, "candidate");
    }
}

mod standing;
#[cfg(test)]
mod tests;

pub use standing::Saturation;
