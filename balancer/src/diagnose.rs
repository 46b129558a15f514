//! Watches each pool for the mismatches that nobody notices. What they are is decided in `fovea_balancer_core::diagnosis`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

use fovea_balancer_core::diagnosis::{Finding, FirstBlocks, Sight, Tally, Watch};
use fovea_kv::SequenceHash;
use fovea_service::label::{Snake, write_snake_case};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};

use crate::workers::{PoolRef, Workers};

/// What was seen of one pool's requests.
#[derive(Debug, Default)]
pub struct Watched {
    answered: AtomicU64,
    without_files: AtomicU64,
    predicted: AtomicU64,
    repeats: AtomicU64,
    hits: AtomicU64,
    first_blocks: Mutex<FirstBlocks>,
    watch: Mutex<(Watch, Option<Finding>)>,
}

impl Watched {
    /// An engine began to answer a request. `first` = its first full block, where the engine looks it up; `confirmed` = blocks that its
    /// worker was known to hold.
    pub fn answered(&self, without_files: bool, first: Option<SequenceHash>, confirmed: u32, now: Instant) {
        let count = |counter: &AtomicU64, one: bool| counter.fetch_add(one.into(), Ordering::Relaxed);
        count(&self.answered, true);
        count(&self.without_files, without_files);
        count(&self.predicted, first.is_some());
        count(&self.hits, confirmed > 0);
        let mut blocks = self.first_blocks.lock().unwrap_or_else(PoisonError::into_inner);
        let repeats = first.is_some_and(|first| blocks.repeats(first.0, now));
        drop(blocks);
        count(&self.repeats, repeats);
    }

    fn tally(&self) -> Tally {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Tally {
            answered: get(&self.answered),
            without_files: get(&self.without_files),
            predicted: get(&self.predicted),
            repeats: get(&self.repeats),
            hits: get(&self.hits),
        }
    }

    pub fn finding(&self) -> Option<Finding> {
        self.watch.lock().unwrap_or_else(PoisonError::into_inner).1
    }

    /// For people.
    pub fn page(&self) -> Value {
        let Tally { answered, without_files, predicted, repeats, hits } = self.tally();
        let finding = self.finding();
        json!({
            "finding": finding.map(name), "likely_cause": finding.map(Finding::cause),
            "answered": answered, "without_files": without_files, "predicted": predicted, "repeats": repeats, "hits": hits,
        })
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct FindingLabels {
    pub finding: Snake<Finding>,
}

/// Pools by what is wrong with them.
#[derive(Clone, Debug)]
pub struct DiagnosisMetrics {
    pools: Family<FindingLabels, Gauge>,
}

impl DiagnosisMetrics {
    pub fn register(r: &mut Registry) -> Self {
        let metrics = Self { pools: Family::default() };
        r.register("pool_findings", "Pools whose requests are not routed by cache, by why", metrics.pools.clone());
        metrics
    }
}

/// Judges all pools; says so once where a judgement changes.
pub fn look(workers: &Workers, metrics: &DiagnosisMetrics, now: Instant) {
    let mut counts: BTreeMap<Finding, i64> = Finding::ALL.map(|finding| (finding, 0)).into();
    for pool in workers.pools() {
        let sight = sight(workers, &pool, now);
        let mut watch = pool.watched.watch.lock().unwrap_or_else(PoisonError::into_inner);
        let (before, finding) = (watch.1, watch.0.look(&sight));
        watch.1 = finding;
        drop(watch);
        finding.into_iter().for_each(|finding| *counts.entry(finding).or_default() += 1);
        let engine_model = &pool.facts.engine.engine_model;
        match finding {
            Some(finding) if before != Some(finding) => {
                let (finding, cause) = (name(finding), finding.cause());
                tracing::warn!(engine_model, finding, cause, "requests of a pool are not routed by its cache");
            }
            None if before.is_some() => {
                tracing::info!(engine_model, "requests of a pool are routed by its cache again")
            }
            _ => {}
        }
    }
    for (finding, count) in counts {
        metrics.pools.get_or_create(&FindingLabels { finding: Snake(finding) }).set(count);
    }
}

fn name(finding: Finding) -> String {
    let mut name = String::new();
    // Writing to a string never fails.
    let _ = write_snake_case(&finding, &mut name);
    name
}

fn sight(workers: &Workers, pool: &PoolRef, now: Instant) -> Sight {
    let mut with_events = 0;
    workers.each(now, |worker, _| {
        with_events += usize::from(std::sync::Arc::ptr_eq(&worker.about.pool, pool) && worker.about.events);
    });
    let (tally, blocks_held) = (pool.watched.tally(), pool.index().entries());
    Sight { tally, blocks_held, with_events, media_trusted: workers.media_trusted(pool) }
}
