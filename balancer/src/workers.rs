//! The shared state of routing: the fleet behind one short lock, and one index per pool, read without a lock and written behind another.
//!
//! **Invariant:** no lock is held across an await, and the fleet's lock is never taken while an index lock is held.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fovea_balancer_core::choose::{self, Candidate, Explained, Mode, Query};
use fovea_balancer_core::fleet::{Description, Fleet, Freshness, Resolved, Served, State, Worker, WorkerKey};
use fovea_balancer_core::index::{Index, Reader, WorkerDepth};
use fovea_balancer_core::load::{BookingId, Charge, Report};
use fovea_gossip::message::EngineFacts;
use fovea_kv::SequenceHash;
use xxhash_rust::xxh3::xxh3_64;

use crate::{learnt, render};

/// All that a prediction depends on. Workers with equal facts share an index.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PoolFacts {
    /// Without the served names: those may differ inside a pool.
    pub engine: EngineFacts,
    /// Tokens per block; 0 = not known yet.
    pub block_size: u32,
}

impl PoolFacts {
    pub fn new(engine: &EngineFacts, block_size: u32) -> Self {
        let engine = EngineFacts { served_names: Vec::new(), lora_names: Vec::new(), ..engine.clone() };
        Self { engine, block_size }
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
    /// The engine does not look into its cache for this prompt; what it computes is stored all the same.
    pub no_reuse: bool,
    pub images: &'a [(u32, u32)],
    pub media: Option<u64>,
    pub session: Option<u64>,
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
    /// Its overlap could be believed.
    pub precise: bool,
    pub booked: Booked,
}

/// One request's share of its worker's load; given back on drop, however the request ended.
pub struct Booked {
    workers: Arc<Workers>,
    pub key: WorkerKey,
    id: BookingId,
    started: AtomicBool,
}

impl Booked {
    /// The first response byte came.
    pub fn started(&self) {
        self.started.store(true, Ordering::Relaxed);
        self.workers.fleet().started(self.key, self.id, Instant::now());
    }
}

impl Drop for Booked {
    fn drop(&mut self) {
        let failed = !self.started.load(Ordering::Relaxed);
        self.workers.fleet().release(self.key, self.id, failed, Instant::now());
    }
}

pub struct Workers {
    fleet: Mutex<Fleet<PoolRef>>,
    settings: choose::Settings,
    index_entries_max: usize,
    /// Requests that asked for a pool.
    resolved: AtomicU64,
}

impl Workers {
    pub fn new(freshness: Freshness, settings: choose::Settings, index_entries_max: usize) -> Self {
        Self { fleet: Mutex::new(Fleet::new(freshness)), settings, index_entries_max, resolved: AtomicU64::new(0) }
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
        let mut fleet = self.fleet();
        if let Some(pool) = fleet.pool_like(&about.pool) {
            about.pool = pool;
        }
        about.index = about.pool.index_mut().add_worker();
        (fleet.add(about.clone(), now), about)
    }

    pub fn describe(&self, key: WorkerKey, about: Description<PoolRef>) {
        self.fleet().describe(key, about);
    }

    /// Out of routing at once; then out of the index.
    pub fn remove(&self, key: WorkerKey) {
        let gone = self.fleet().remove(key);
        if let Some(about) = gone {
            about.pool.index_mut().remove_worker(about.index);
        }
    }

    pub fn heard(&self, keys: impl Iterator<Item = WorkerKey>, now: Instant) {
        let mut fleet = self.fleet();
        keys.for_each(|key| fleet.heard(key, now));
    }

    pub fn report(&self, key: WorkerKey, report: Report, now: Instant) {
        self.fleet().report(key, report, now);
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
        let mut depths = Vec::new();
        let looked_up = if ask.no_reuse { &[] } else { ask.hashes };
        if self.settings.mode == Mode::Precise {
            pool.index().depths(looked_up, &mut depths);
        }
        let query = Query {
            prompt_tokens: ask.prompt_tokens,
            block_tokens: pool.facts.block_size,
            images: ask.images,
            media: ask.media,
            session: ask.session,
            turn: pool.turns.fetch_add(1, Ordering::Relaxed),
        };
        let mut explained = Vec::new();
        let mut fleet = self.fleet();
        let candidates: Vec<_> = fleet
            .candidates(pool, ask.model, now)
            .filter(|worker| Some(worker.key) != avoid)
            .map(|worker| candidate(worker, looked_up, confirmed(worker, fleet.freshness(), &depths, now), now))
            .collect();
        let chosen = choose::choose(&candidates, &query, &self.settings, &mut explained)?;
        let charge = Charge {
            prefill_tokens: u64::from(ask.prompt_tokens.saturating_sub(chosen.reused_tokens)),
            prompt_tokens: u64::from(ask.prompt_tokens),
        };
        let chain = if self.settings.mode == Mode::Precise { ask.hashes.into() } else { [].into() };
        let id = fleet.book(chosen.key, charge, chain, now)?;
        let worker = fleet.workers().iter().find(|worker| worker.key == chosen.key)?;
        let (about, confirmed) = (worker.about.clone(), confirmed(worker, fleet.freshness(), &depths, now));
        drop(fleet);
        trace(&explained, chosen.key);
        Some(Route {
            name: about.name,
            url: about.url,
            dp_rank: about.dp_rank,
            confirmed_blocks: confirmed.map_or(0, |depth| depth[2]),
            reused_tokens: chosen.reused_tokens,
            precise: confirmed.is_some() && self.settings.mode == Mode::Precise,
            booked: Booked { workers: Arc::clone(self), key: chosen.key, id, started: AtomicBool::new(false) },
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

fn candidate(worker: &Worker<PoolRef>, chain: &[SequenceHash], confirmed: Option<[u32; 3]>, now: Instant) -> Candidate {
    let assumed = confirmed.map_or(0, |depth| worker.speculation.depth(chain, depth[0], now));
    Candidate {
        key: worker.key,
        affinity: xxh3_64(worker.about.name.as_bytes()),
        overlap_blocks: confirmed.unwrap_or_default().map(|depth| depth.max(assumed)),
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

#[cfg(test)]
mod tests;
