//! One data-parallel rank: what of its KV is published, under which epoch, and its load.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use fovea_gossip::message::{Learnt, LevelDelta, WorkerFacts};
use fovea_gossip::outbox::Outbox;
use fovea_kv::event::{Batch, KvEvent};
use fovea_kv::regroup::Regroup;
use fovea_kv::sums::SetSums;
use fovea_kv::{EngineHash, SequenceHash, Tier};
use fovea_sidecar_core::publish::{self, Counters, Gauges, Publisher};
use fovea_sidecar_core::verify::{self, Divergence, Expected, FlightId, Outcome, Verdict, Verifier};

use crate::load::RankLoad;

/// Locks through a panic elsewhere: every critical section here leaves the data whole.
pub fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A number for a new life of the engine, higher than all before, across restarts of this program too (µs since 1970).
pub fn new_epoch(before: u64) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(now.as_micros()).unwrap_or(u64::MAX - 1).max(before + 1)
}

/// What the follower of this rank's events knows of their stream.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stream {
    /// Connected, no batch known to be missing.
    pub live: bool,
    /// And nothing that the engine holds is unknown.
    pub complete: bool,
    pub watermark: Option<u64>,
}

/// What the engine's pages say of this rank; 0 = nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Told {
    /// Tokens per block of the engine.
    pub block_size: u32,
    pub capacity_tokens: u64,
}

/// What is the same for all ranks.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub publish: publish::Config,
    /// Blocks of fewer tokens are published several as one; 0 = as they are.
    pub tokens_min: u32,
}

impl Settings {
    /// `publish.block_size` given in the engine's blocks.
    pub fn of_published_blocks(mut self) -> Self {
        self.publish.block_size = self.publish.block_size.map(|size| size.saturating_mul(self.together(size)));
        self
    }

    /// Blocks of the engine in one published block.
    fn together(&self, block_size: u32) -> u32 {
        self.tokens_min.div_ceil(block_size.max(1)).max(1)
    }
}

#[derive(Debug)]
struct Kv {
    settings: Settings,
    publisher: Publisher,
    /// Made when the first block tells its size; `None` before, and where blocks stay as they are.
    regroup: Option<Regroup>,
    /// Events on their way through `regroup`.
    regrouped: Vec<KvEvent>,
    /// The engine hashes pairs of tokens.
    pairs: bool,
    verifier: Verifier,
    stream: Stream,
    told: Told,
}

impl Kv {
    fn apply(&mut self, event: &KvEvent) {
        if let KvEvent::Stored(stored) = event
            && self.regroup.is_none()
            && stored.block_size > 0
            && self.settings.together(stored.block_size) > 1
        {
            self.regroup = Some(Regroup::new(self.settings.together(stored.block_size)));
        }
        let Some(regroup) = &mut self.regroup else { return self.publish(event) };
        let mut out = std::mem::take(&mut self.regrouped);
        regroup.apply(event.clone(), &mut out);
        out.drain(..).for_each(|event| self.publish(&event));
        self.regrouped = out;
    }

    /// The closed loop sees each event beside the names of its blocks: of those that go, before they are gone.
    fn publish(&mut self, event: &KvEvent) {
        if !self.verifier.is_interested() {
            return self.publisher.apply(event);
        }
        match event {
            KvEvent::Stored(stored) => {
                self.publisher.apply(event);
                let parent = stored.parent.and_then(|hash| self.publisher.translate(hash, stored.group));
                self.verifier.stored(stored, parent, &self.names(&stored.hashes, stored.group));
            }
            KvEvent::Removed(removed) => {
                self.verifier.removed(&self.names(&removed.hashes, removed.group));
                self.publisher.apply(event);
            }
            KvEvent::Cleared => {
                self.publisher.apply(event);
                self.verifier.cleared();
            }
        }
    }

    fn names(&self, hashes: &[EngineHash], group: u32) -> Vec<Option<SequenceHash>> {
        hashes.iter().map(|&hash| self.publisher.translate(hash, group)).collect()
    }
}

/// What a closed loop has to say at one moment.
#[derive(Debug)]
pub struct Settled {
    pub verdicts: Vec<Verdict>,
    pub media_trusted: bool,
}

/// Place in the hello's list of workers, rank, and state. Lock order: `kv`, then the outbox.
#[derive(Debug)]
pub struct Worker {
    pub index: u16,
    pub rank: u32,
    pub load: Arc<RankLoad>,
    kv: Mutex<Kv>,
    outbox: Arc<Mutex<Outbox>>,
}

impl Worker {
    pub fn new(index: u16, rank: u32, load: Arc<RankLoad>, outbox: Arc<Mutex<Outbox>>, settings: Settings) -> Self {
        let kv = Kv {
            settings,
            publisher: Publisher::new(settings.publish),
            regroup: None,
            regrouped: Vec::new(),
            pairs: false,
            verifier: Verifier::new(verify::Config::default()),
            stream: Stream::default(),
            told: Told::default(),
        };
        Self { index, rank, load, kv: Mutex::new(kv), outbox }
    }

    pub fn apply(&self, batch: &Batch) {
        let kv = &mut *lock(&self.kv);
        kv.pairs |= batch.pairs;
        batch.events.iter().for_each(|event| kv.apply(event));
    }

    /// A request goes to the engine, of which this is predicted.
    pub fn begin(&self, flight: FlightId, expected: Option<Expected>, now: Instant) {
        let verifier = &mut lock(&self.kv).verifier;
        match expected {
            Some(expected) => verifier.begin(flight, expected, now),
            None => verifier.begin_blind(flight),
        }
    }

    /// Its answer ended.
    pub fn finished(&self, flight: FlightId, outcome: Outcome, now: Instant) {
        lock(&self.kv).verifier.finished(flight, outcome, now);
    }

    /// What the closed loop has to say since the last call.
    pub fn settle(&self, now: Instant) -> Settled {
        let kv = &mut *lock(&self.kv);
        let publisher = &kv.publisher;
        let verdicts = kv.verifier.settle(|hash| publisher.holds(hash), now);
        Settled { verdicts, media_trusted: kv.verifier.media_trusted() }
    }

    /// What it learnt of media since the last call.
    pub fn take_learnt(&self) -> Vec<Learnt> {
        lock(&self.kv).verifier.drain_learnt()
    }

    /// Divergences kept for people, the last one last.
    pub fn divergences(&self) -> Vec<Divergence> {
        lock(&self.kv).verifier.divergences().cloned().collect()
    }

    pub fn media_trusted(&self) -> bool {
        lock(&self.kv).verifier.media_trusted()
    }

    /// The engine hashes pairs of tokens.
    pub fn has_pairs(&self) -> bool {
        lock(&self.kv).pairs
    }

    /// Puts what changed since the last call into the outbox. True = there was something.
    pub fn flush(&self) -> bool {
        let kv = &mut *lock(&self.kv);
        let delta = kv.publisher.take_delta();
        if delta.is_empty() {
            return false;
        }
        let levels = delta.levels.map(|level| LevelDelta { removed: level.removed, stored: level.stored });
        lock(&self.outbox).push(self.index, levels);
        true
    }

    /// Everything known is void: a new epoch.
    pub fn reset(&self) {
        let kv = &mut *lock(&self.kv);
        kv.publisher.reset();
        (kv.regroup, kv.pairs) = (None, false);
        kv.verifier.reset();
        let mut outbox = lock(&self.outbox);
        let (before, _) = outbox.watermark(self.index).unwrap_or_default();
        outbox.reset(self.index, new_epoch(before));
    }

    /// Nobody follows the events any more: everything known is void, and the stream too.
    pub fn forget(&self) {
        self.reset();
        self.set_stream(Stream::default());
    }

    /// All that is published, with the epoch and seq it belongs to.
    pub fn snapshot(&self) -> Option<(u64, u64, [Vec<SequenceHash>; 3])> {
        let kv = lock(&self.kv);
        let (epoch, seq) = lock(&self.outbox).watermark(self.index)?;
        Some((epoch, seq, Tier::ALL.map(|level| kv.publisher.snapshot(level))))
    }

    /// Sums of the same.
    pub fn sums(&self) -> Option<(u64, u64, [SetSums; 3])> {
        let kv = lock(&self.kv);
        let (epoch, seq) = lock(&self.outbox).watermark(self.index)?;
        Some((epoch, seq, kv.publisher.sums().clone()))
    }

    /// True = it changed.
    pub fn set_stream(&self, stream: Stream) -> bool {
        let kv = &mut *lock(&self.kv);
        std::mem::replace(&mut kv.stream, stream) != stream
    }

    pub fn set_told(&self, told: Told) {
        lock(&self.kv).told = told;
    }

    pub fn stream(&self) -> Stream {
        lock(&self.kv).stream
    }

    pub fn facts(&self) -> WorkerFacts {
        let kv = lock(&self.kv);
        // The events show the size that blocks really have; a page may show another (hybrid models).
        let told = kv.told.block_size.saturating_mul(kv.settings.together(kv.told.block_size));
        let block_size = kv.publisher.block_size().unwrap_or(told);
        let capacity_blocks = kv.told.capacity_tokens.checked_div(block_size.into()).unwrap_or(0);
        WorkerFacts { dp_rank: self.rank, block_size, capacity_blocks, events: kv.stream.live }
    }

    pub fn is_hybrid(&self) -> bool {
        lock(&self.kv).publisher.is_hybrid()
    }

    pub fn figures(&self) -> (Gauges, Counters) {
        let kv = lock(&self.kv);
        (kv.publisher.gauges(), kv.publisher.counters())
    }

    /// Epoch and last seq put on the streams.
    pub fn sent(&self) -> (u64, u64) {
        lock(&self.outbox).watermark(self.index).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use fovea_gossip::outbox::RingLimits;
    use fovea_kv::event::Stored;
    use fovea_kv::{EngineHash, Tier};
    use tokio::sync::watch;

    use super::*;

    fn worker() -> Worker {
        let load = RankLoad::new(Arc::new(watch::channel(0).0));
        let outbox = Arc::new(Mutex::new(Outbox::new(&[1], RingLimits::default())));
        Worker::new(0, 0, load, outbox, Settings { publish: publish::Config::default(), tokens_min: 0 })
    }

    fn stored(hash: u64) -> Batch {
        let stored = KvEvent::Stored(Stored {
            hashes: vec![EngineHash::Int(hash)],
            parent: None,
            tokens: vec![1, 2],
            block_size: 2,
            tier: Tier::Gpu,
            lora: None,
            extra: Vec::new(),
            group: 0,
            attention: fovea_kv::event::Attention::Full,
            session: None,
        });
        Batch { events: vec![stored], ..Batch::default() }
    }

    #[test]
    fn a_snapshot_is_the_set_after_the_last_flush() {
        let worker = worker();
        worker.apply(&stored(7));
        assert_eq!(worker.snapshot().unwrap().2[0].len(), 0);
        assert!(worker.flush() && !worker.flush());
        let (epoch, seq, levels) = worker.snapshot().unwrap();
        assert_eq!((epoch, seq, levels[0].len()), (1, 1, 1));
        assert_eq!(worker.facts().block_size, 2);
    }

    #[test]
    fn a_reset_begins_a_higher_epoch_with_nothing() {
        let worker = worker();
        worker.apply(&stored(7));
        worker.flush();
        worker.reset();
        let (epoch, seq, levels) = worker.snapshot().unwrap();
        assert!(epoch > 1 && seq == 0 && levels[0].is_empty());
        assert!(!worker.flush());
        worker.apply(&stored(7));
        assert!(worker.flush());
        assert_eq!(worker.sent(), (epoch, 1));
    }

    #[test]
    fn a_worker_that_nobody_follows_holds_nothing_and_claims_nothing() {
        let worker = worker();
        worker.apply(&stored(7));
        worker.flush();
        worker.set_stream(Stream { live: true, complete: true, watermark: Some(3) });
        assert!(worker.facts().events);
        worker.forget();
        assert!(!worker.facts().events && worker.snapshot().unwrap().2[0].is_empty());
        assert_eq!(worker.stream(), Stream::default());
    }

    #[test]
    fn epochs_only_grow() {
        let first = new_epoch(0);
        assert!(new_epoch(first) > first && new_epoch(u64::MAX - 2) == u64::MAX - 1);
    }
}
