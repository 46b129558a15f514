//! Who is there: workers, the pools they form, the names they serve, and how fresh their word is.
//!
//! A pool is all workers for which a prediction is the same; `P` is the shell's handle to one (facts and index), equal for
//! equal pools. A worker lives from the hello of its sidecar's stream to the end of that stream.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fovea_kv::SequenceHash;

use crate::embeddings::Embeddings;
use crate::history::{History, Recall};
use crate::index::WorkerIndex;
use crate::load::{BookingId, Charge, Report, WorkerLoad};
use crate::speculation::Speculation;

/// Names one worker for the life of one stream; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerKey(pub u64);

/// How long a silent worker is believed. Sidecars speak every 250 ms at least.
#[derive(Clone, Copy, Debug)]
pub struct Freshness {
    /// Silent this long: its overlap counts for nothing.
    pub stale_after: Duration,
    /// Silent this long: it gets no request.
    pub excluded_after: Duration,
    /// A routed prompt is assumed to be in its worker's cache for this long at most, until events tell.
    pub speculative_ttl: Duration,
}

impl Default for Freshness {
    fn default() -> Self {
        Self {
            stale_after: Duration::from_secs(1),
            excluded_after: Duration::from_secs(5),
            speculative_ttl: Duration::from_secs(10),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum State {
    Up,
    /// Silent for a while: routed to, but its overlap is not believed.
    Stale,
    /// Takes no new requests by its own word.
    Draining,
    /// Silent for too long.
    Excluded,
}

impl State {
    pub fn takes_requests(self) -> bool {
        matches!(self, Self::Up | Self::Stale)
    }
}

/// What a hello says about one worker.
#[derive(Clone, Debug)]
pub struct Description<P> {
    pub pool: P,
    /// Its place in the pool's index.
    pub index: WorkerIndex,
    /// For people: headers, logs, metric labels.
    pub name: Arc<str>,
    /// Base URL of its sidecar.
    pub url: Arc<str>,
    pub dp_rank: u32,
    pub served_names: Arc<[String]>,
    pub lora_names: Arc<[String]>,
    /// The engine's events are complete: overlap may be believed.
    pub events: bool,
    pub draining: bool,
    /// What was sent there is not looked at.
    pub by_load: bool,
    /// What its KV cache takes; 0 = not known.
    pub capacity_tokens: u64,
    /// Its closed loop still believes predictions of media.
    pub media_trusted: bool,
}

#[derive(Debug)]
pub struct Worker<P> {
    pub key: WorkerKey,
    pub about: Description<P>,
    pub load: WorkerLoad,
    pub speculation: Speculation,
    /// What it was sent, as long as its events are not believed.
    pub history: History,
    /// Of its encoder.
    pub embeddings: Embeddings,
    heard_at: Instant,
}

impl<P> Worker<P> {
    pub fn state(&self, freshness: &Freshness, now: Instant) -> State {
        let silent = now.saturating_duration_since(self.heard_at);
        if silent >= freshness.excluded_after {
            State::Excluded
        } else if self.about.draining {
            State::Draining
        } else if silent >= freshness.stale_after {
            State::Stale
        } else {
            State::Up
        }
    }

    fn serves(&self, model: &str) -> Option<Served> {
        let has = |names: &[String]| names.iter().any(|name| name == model);
        if has(&self.about.served_names) {
            Some(Served::Base)
        } else if has(&self.about.lora_names) {
            Some(Served::Lora)
        } else {
            None
        }
    }
}

/// What a model name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Served {
    Base,
    Lora,
}

/// Answer to "who serves this model?".
#[derive(Debug, PartialEq, Eq)]
pub enum Resolved<P> {
    /// No worker at all has that name.
    Unknown,
    /// Workers with that name exist, but none takes requests.
    NoneReady,
    Pool {
        pool: P,
        served: Served,
        /// Names of the base model: its directory is found by one of them.
        base_names: Arc<[String]>,
    },
}

/// All workers, in order of key.
#[derive(Debug)]
pub struct Fleet<P> {
    freshness: Freshness,
    recall: Recall,
    workers: Vec<Worker<P>>,
    next: u64,
}

impl<P: Clone + PartialEq> Fleet<P> {
    pub fn new(freshness: Freshness) -> Self {
        Self::with_recall(freshness, Recall::default())
    }

    pub fn with_recall(freshness: Freshness, recall: Recall) -> Self {
        Self { freshness, recall, workers: Vec::new(), next: 0 }
    }

    pub fn recall(&self) -> &Recall {
        &self.recall
    }

    pub fn freshness(&self) -> &Freshness {
        &self.freshness
    }

    pub fn workers(&self) -> &[Worker<P>] {
        &self.workers
    }

    /// The pool equal to `wanted` that is in use, if there is one.
    pub fn pool_like(&self, wanted: &P) -> Option<P> {
        self.workers.iter().map(|worker| &worker.about.pool).find(|pool| *pool == wanted).cloned()
    }

    pub fn add(&mut self, about: Description<P>, now: Instant) -> WorkerKey {
        let key = WorkerKey(self.next);
        self.next += 1;
        self.workers.push(Worker {
            key,
            about,
            load: WorkerLoad::default(),
            speculation: Speculation::default(),
            history: History::default(),
            embeddings: Embeddings::default(),
            heard_at: now,
        });
        key
    }

    /// A later hello of the same stream, in the same pool.
    pub fn describe(&mut self, key: WorkerKey, about: Description<P>) {
        if let Some(worker) = self.get_mut(key) {
            worker.about = about;
        }
    }

    /// The stream ended: the worker is gone at once.
    pub fn remove(&mut self, key: WorkerKey) -> Option<Description<P>> {
        let at = self.workers.binary_search_by_key(&key, |worker| worker.key).ok()?;
        Some(self.workers.remove(at).about)
    }

    /// Any whole message came from the worker's sidecar.
    pub fn heard(&mut self, key: WorkerKey, now: Instant) {
        if let Some(worker) = self.get_mut(key) {
            worker.heard_at = worker.heard_at.max(now);
        }
    }

    pub fn report(&mut self, key: WorkerKey, report: Report) {
        if let Some(worker) = self.get_mut(key) {
            worker.load.report(report);
        }
    }

    /// The worker's encoder holds other items; `anew`: nothing of what was told before.
    pub fn embedded(&mut self, key: WorkerKey, anew: bool, stored: &[u64], removed: &[u64]) {
        if let Some(worker) = self.get_mut(key) {
            if anew {
                worker.embeddings.clear();
            }
            worker.embeddings.change(stored, removed);
        }
    }

    /// The worker's events were applied; see [`WorkerLoad::measure`].
    pub fn measure(&mut self, key: WorkerKey, held: impl FnMut(&[SequenceHash], u32) -> u32) {
        if let Some(worker) = self.get_mut(key) {
            worker.load.measure(held);
        }
    }

    /// Books a request about to be sent, and assumes its blocks held; `None` when the worker has gone.
    pub fn book(
        &mut self,
        key: WorkerKey,
        charge: Charge,
        chain: Arc<[SequenceHash]>,
        now: Instant,
    ) -> Option<BookingId> {
        let ttl = self.freshness.speculative_ttl;
        let worker = self.get_mut(key)?;
        let booking = worker.load.book(charge, Arc::clone(&chain));
        worker.speculation.routed(booking, chain, ttl, now);
        Some(booking)
    }

    /// The request's first response byte came. `remember`: by its chain, whether the worker's events are believed or not.
    pub fn started(&mut self, key: WorkerKey, booking: BookingId, remember: bool, now: Instant) {
        let (recall, freshness) = (self.recall, self.freshness);
        let Some(worker) = self.get_mut(key) else { return };
        let booked = worker.load.started(booking);
        worker.speculation.started(booking, now);
        let believed = worker.about.events && worker.state(&freshness, now) == State::Up;
        let is_remembered = (remember || !believed) && !worker.about.by_load;
        let is_told = |(chain, block_tokens): &(Arc<[SequenceHash]>, u32)| !chain.is_empty() && *block_tokens > 0;
        if let Some((chain, block_tokens)) = booked.filter(is_told).filter(|_| is_remembered) {
            worker.history.sent(&chain, block_tokens, worker.about.capacity_tokens, &recall, now);
        }
    }

    /// The request is over; `failed`: without a response byte.
    pub fn release(&mut self, key: WorkerKey, booking: BookingId, failed: bool) {
        if let Some(worker) = self.get_mut(key) {
            worker.load.release(booking);
            if failed {
                worker.speculation.failed(booking);
            }
        }
    }

    /// The pool for a request that names `model`. Where several pools serve the name (an upgrade under way), `turn`
    /// spreads requests over them in proportion to their ready workers.
    pub fn resolve(&self, model: &str, turn: u64, now: Instant) -> Resolved<P> {
        let mut known = false;
        let mut ready = 0;
        for worker in self.workers.iter().filter(|worker| worker.serves(model).is_some()) {
            known = true;
            ready += u64::from(worker.state(&self.freshness, now).takes_requests());
        }
        if ready == 0 {
            return if known { Resolved::NoneReady } else { Resolved::Unknown };
        }
        let chosen = self.ready(model, now).nth(usize::try_from(turn % ready).unwrap_or(0));
        chosen.map_or(Resolved::NoneReady, |(worker, served)| Resolved::Pool {
            pool: worker.about.pool.clone(),
            served,
            base_names: Arc::clone(&worker.about.served_names),
        })
    }

    /// Does another pool serve `model` and take requests?
    pub fn is_served_elsewhere(&self, pool: &P, model: &str, now: Instant) -> bool {
        self.ready(model, now).any(|(worker, _)| worker.about.pool != *pool)
    }

    /// The pool's workers that serve `model` and take requests.
    pub fn candidates(&self, pool: &P, model: &str, now: Instant) -> impl Iterator<Item = &Worker<P>> {
        self.ready(model, now).map(|(worker, _)| worker).filter(move |worker| worker.about.pool == *pool)
    }

    /// No worker of the pool has stopped to believe predictions of media.
    pub fn media_trusted(&self, pool: &P) -> bool {
        self.workers.iter().filter(|worker| worker.about.pool == *pool).all(|worker| worker.about.media_trusted)
    }

    /// Names of base models and adapters with at least one worker that takes requests, in order, each once; with such a worker.
    pub fn live_names(&self, now: Instant) -> BTreeMap<&str, (Served, &Description<P>)> {
        let mut names = BTreeMap::new();
        for worker in self.workers.iter().filter(|worker| worker.state(&self.freshness, now).takes_requests()) {
            let about = &worker.about;
            let bases = about.served_names.iter().map(|name| (name, Served::Base));
            for (name, served) in bases.chain(about.lora_names.iter().map(|name| (name, Served::Lora))) {
                names.entry(name.as_str()).or_insert((served, about));
            }
        }
        names
    }

    fn ready(&self, model: &str, now: Instant) -> impl Iterator<Item = (&Worker<P>, Served)> {
        self.workers
            .iter()
            .filter_map(move |worker| worker.serves(model).map(|served| (worker, served)))
            .filter(move |(worker, _)| worker.state(&self.freshness, now).takes_requests())
    }

    fn get_mut(&mut self, key: WorkerKey) -> Option<&mut Worker<P>> {
        let at = self.workers.binary_search_by_key(&key, |worker| worker.key).ok()?;
        self.workers.get_mut(at)
    }
}

#[cfg(test)]
mod tests;
