//! The workers of one sidecar's stream: in the fleet while this lives, gone when it is dropped.

use std::sync::Arc;
use std::time::Instant;

use fovea_balancer_core::fleet::{Description, WorkerKey};
use fovea_balancer_core::index::WorkerIndex;
use fovea_balancer_core::load::Report;
use fovea_gossip::audit::{self, Remedy};
use fovea_gossip::inbox::Change;
use fovea_gossip::message::{BucketMask, Buckets, FromBalancer, Hello, Learnt, Load, WorkerFacts};
use fovea_kv::sums::Sums;
use fovea_kv::{SequenceHash, Tier};

use super::upstream::Upstream;
use crate::metrics::Metrics;
use crate::workers::{PoolFacts, PoolRef, Workers};

/// Hashes applied under one hold of an index lock: about 0.5 ms, so that other streams never wait long. Lookups do not wait.
const SLICE_HASHES: usize = 4096;

struct Seat {
    key: WorkerKey,
    about: Description<PoolRef>,
}

/// Seat i is worker i of the stream's messages.
pub struct Seats {
    workers: Arc<Workers>,
    metrics: Metrics,
    seats: Vec<Seat>,
}

impl Drop for Seats {
    fn drop(&mut self) {
        self.seats.drain(..).for_each(|seat| self.workers.remove(seat.key));
    }
}

impl Seats {
    pub fn new(workers: Arc<Workers>, metrics: Metrics) -> Self {
        Self { workers, metrics, seats: Vec::new() }
    }

    /// Takes a hello: workers come, change, move to another pool, or go.
    pub fn describe(&mut self, hello: &Hello, upstream: &Upstream, now: Instant) {
        while self.seats.len() > hello.workers.len() {
            self.seats.pop().into_iter().for_each(|gone| self.workers.remove(gone.key));
        }
        for (i, facts) in hello.workers.iter().enumerate() {
            let pool_facts =
                PoolFacts { encoder: hello.encoder_fingerprint, ..PoolFacts::new(&hello.engine, facts.block_size) };
            match self.seats.get_mut(i) {
                Some(seat) if seat.about.pool.facts == pool_facts => {
                    let (pool, index) = (Arc::clone(&seat.about.pool), seat.about.index);
                    seat.about = description(hello, facts, upstream, pool, index);
                    self.workers.describe(seat.key, seat.about.clone());
                }
                other => {
                    let pool = self.workers.new_pool(pool_facts);
                    let about = description(hello, facts, upstream, pool, WorkerIndex(0));
                    let (key, about) = self.workers.add(about, now);
                    let seat = Seat { key, about };
                    match other {
                        Some(moved) => self.workers.remove(std::mem::replace(moved, seat).key),
                        None => self.seats.push(seat),
                    }
                }
            }
        }
    }

    /// Something came from the sidecar.
    pub fn heard(&self, now: Instant) {
        self.workers.heard(self.seats.iter().map(|seat| seat.key), now);
    }

    /// What is held for the worker counts for nothing from here.
    pub fn void(&self, worker: u16) {
        if let Some(seat) = self.seat(worker) {
            seat.about.pool.index_mut().clear(seat.about.index);
        }
    }

    /// Applies one change to the index or the load.
    pub fn perform(&self, change: Change) {
        match change {
            Change::Begin { worker } => self.with_seat(worker, |seat| {
                seat.about.pool.index_mut().begin_snapshot(seat.about.index);
            }),
            Change::Live { worker, .. } => self.with_seat(worker, |seat| {
                seat.about.pool.index_mut().go_live(seat.about.index);
            }),
            Change::Removed { worker, level, hashes } => self.with_seat(worker, |seat| {
                for slice in hashes.chunks(SLICE_HASHES) {
                    seat.about.pool.index_mut().apply_removed(seat.about.index, level, slice);
                }
            }),
            Change::Stored { worker, level, hashes } => self.with_seat(worker, |seat| self.store(seat, level, &hashes)),
            Change::Load(load) => self.with_seat(load.worker, |seat| self.workers.report(seat.key, report(&load))),
            Change::Learnt(facts) => self.learn(facts),
            Change::Mend { worker, buckets } => self.with_seat(worker, |seat| self.mend(seat, &buckets)),
            Change::Repaired { hashes, .. } => _ = self.metrics.sync_repaired_hashes.inc_by(hashes),
            Change::Embeddings(held) => self.seats.iter().for_each(|seat| {
                self.workers.embedded(seat.key, held.first, &held.stored, &held.removed);
            }),
            Change::Hello(_) | Change::Resync { .. } | Change::Digest { .. } | Change::Buckets(_) => {
                debug_assert!(false, "the stream does these itself")
            }
        }
    }

    /// Compares a digest with the index: what to ask for where they differ.
    pub fn audit(&self, worker: u16, theirs: &[Sums; 3]) -> Option<FromBalancer> {
        let seat = self.seat(worker)?;
        let ours = seat.about.pool.index_mut().digest(seat.about.index)?;
        self.metrics.sync_digests.inc();
        if ours == *theirs {
            return None;
        }
        self.metrics.sync_digest_mismatches.inc();
        tracing::warn!(worker = %seat.about.name, "what is held is not what the sidecar publishes, asking for the difference");
        Some(FromBalancer::AskBuckets { worker })
    }

    /// Which part of it is to be sent again.
    pub fn compare(&self, theirs: &Buckets) -> Option<FromBalancer> {
        let (worker, seat) = (theirs.worker, self.seat(theirs.worker)?);
        let ours = seat.about.pool.index_mut().sums(seat.about.index)?;
        match audit::remedy(&ours, theirs) {
            Remedy::Nothing => None,
            Remedy::Repair(buckets) => Some(FromBalancer::AskRepair { worker, buckets }),
            Remedy::Snapshot => Some(FromBalancer::Resync { worker }),
        }
    }

    fn mend(&self, seat: &Seat, buckets: &[BucketMask; 3]) {
        let keep = |level: Tier, hash| !audit::is_in(&buckets[usize::from(level.index())], hash);
        if let Err(error) = seat.about.pool.index_mut().begin_repair(seat.about.index, keep) {
            self.metrics.index_full.inc();
            tracing::warn!(worker = %seat.about.name, %error, "raise limits.index_entries_max");
        }
    }

    /// One engine: one pool, except while a change of its facts is under way.
    fn learn(&self, facts: Vec<Learnt>) {
        if let Some(seat) = self.seats.first() {
            facts.into_iter().for_each(|fact| seat.about.pool.learnt.put(fact));
        }
    }

    fn store(&self, seat: &Seat, level: Tier, hashes: &[SequenceHash]) {
        for slice in hashes.chunks(SLICE_HASHES) {
            let stored = seat.about.pool.index_mut().apply_stored(seat.about.index, level, slice);
            if let Err(error) = stored {
                self.metrics.index_full.inc();
                tracing::warn!(worker = %seat.about.name, %error, "raise limits.index_entries_max");
                return;
            }
        }
        if level == Tier::Gpu {
            self.workers.measure(seat.key, &seat.about.pool, seat.about.index);
        }
    }

    fn with_seat(&self, worker: u16, act: impl FnOnce(&Seat)) {
        if let Some(seat) = self.seat(worker) {
            act(seat);
        }
    }

    fn seat(&self, worker: u16) -> Option<&Seat> {
        self.seats.get(usize::from(worker))
    }
}

fn report(load: &Load) -> Report {
    Report {
        running: load.running,
        waiting: load.waiting,
        prefill_tokens: load.prefill_tokens,
        decode_tokens: load.decode_tokens,
    }
}

fn description(
    hello: &Hello,
    facts: &WorkerFacts,
    upstream: &Upstream,
    pool: PoolRef,
    index: WorkerIndex,
) -> Description<PoolRef> {
    let name = match hello.workers.len() {
        1 => upstream.name.clone(),
        _ => format!("{}#{}", upstream.name, facts.dp_rank),
    };
    Description {
        pool,
        index,
        name: name.into(),
        url: upstream.url.as_str().into(),
        dp_rank: facts.dp_rank,
        served_names: hello.engine.served_names.clone().into(),
        lora_names: hello.engine.lora_names.clone().into(),
        events: facts.events && facts.block_size > 0,
        draining: hello.draining,
        by_load: false,
        capacity_tokens: facts.capacity_blocks.saturating_mul(u64::from(facts.block_size)),
        media_trusted: hello.media_trusted,
    }
}
