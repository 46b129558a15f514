//! Engines without a sidecar, by URL: asked for their health, in the fleet while they answer, and out of it at once when they do not.
//!
//! Nothing is seen of their caches and queues: they are routed by what this balancer sent there, and by its own requests in flight.
//! **Invariants:** they get no preamble, no `x-fovea-*` header and no key of the sidecars'; and no uuid of a client's, which is cut here
//! because no sidecar does it.

mod probe;

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use fovea_balancer_core::fleet::{Description, WorkerKey};
use fovea_balancer_core::index::WorkerIndex;
use fovea_gossip::message::{EngineFacts, HashScheme};
use fovea_gossip::preamble::Preamble;
use fovea_openai::edit::Edits;
use fovea_service::snake_case_labels;
use http::HeaderValue;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;
use tokio::time::{MissedTickBehavior, interval};
use tokio_util::sync::CancellationToken;

use crate::config::plain::{PlainConfig, PlainMode};
use crate::workers::{PoolFacts, PoolRef, Workers};
use probe::{Failure, Prober, Served};

/// From one question to the next: less than the default of `freshness.stale_after`.
const PROBE_EVERY: Duration = Duration::from_millis(500);
/// An engine that is busy may be slow to answer: this many in a row.
const SLOW_MAX: u32 = 3;

/// How a question for health ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProbeEnd {
    Healthy,
    /// No address, no connection, or it broke.
    Unreachable,
    /// Any status but 200, or an answer that cannot be read.
    Unhealthy,
    Slow,
}

snake_case_labels!(ProbeEnd);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ProbeLabels {
    pub end: ProbeEnd,
}

#[derive(Clone, Debug, Default)]
pub struct PlainMetrics {
    probes: Family<ProbeLabels, Counter>,
}

impl PlainMetrics {
    /// Makes all families and registers them; `registry` carries the program's prefix.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let help = "Questions for the health of engines without a sidecar, by how they ended";
        registry.register("plain_probes", help, metrics.probes.clone());
        metrics
    }

    fn count(&self, end: ProbeEnd) {
        self.probes.get_or_create(&ProbeLabels { end }).inc();
    }
}

/// The body for an engine without a sidecar: what a client must not set is cut.
///
/// `None` = it cannot be made, and nothing may be sent.
pub fn body(record: &Preamble, body: &Bytes) -> Option<Bytes> {
    if record.cuts.is_empty() {
        return Some(body.clone());
    }
    let place = |at: u64| usize::try_from(at).ok().filter(|at| *at <= body.len());
    let cuts = record.cuts.iter().map(|(start, length)| Some(place(*start)?..place(start.checked_add(*length)?)?));
    let edits = Edits::new(cuts.collect::<Option<Vec<_>>>()?, []).ok()?;
    Some(edits.apply(body).into())
}

/// Follows one engine until stopped.
/// `key` = `authorization` that engines want, if they do.
pub async fn follow(
    config: PlainConfig,
    key: Option<HeaderValue>,
    workers: Arc<Workers>,
    metrics: PlainMetrics,
    stop: CancellationToken,
) {
    let mut engine = Engine { config, workers, seat: None, slow: 0 };
    let mut prober = Prober::new(key);
    let mut tick = interval(PROBE_EVERY);
    tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
    while stop.run_until_cancelled(tick.tick()).await.is_some() {
        let asked = prober.ask(&engine.config);
        let Some(answer) = stop.run_until_cancelled(asked).await else { break };
        metrics.count(answer.as_ref().map_or_else(Failure::end, |_| ProbeEnd::Healthy));
        engine.take(answer, Instant::now());
    }
    engine.leave("this balancer stops");
}

struct Seat {
    key: WorkerKey,
    served: Served,
}

struct Engine {
    config: PlainConfig,
    workers: Arc<Workers>,
    seat: Option<Seat>,
    /// Questions in a row that were not answered in time.
    slow: u32,
}

impl Engine {
    fn take(&mut self, answer: Result<Served, Failure>, now: Instant) {
        match answer {
            Ok(served) => {
                self.slow = 0;
                match &self.seat {
                    Some(seat) if seat.served == served => self.workers.heard(std::iter::once(seat.key), now),
                    _ => self.join(served, now),
                }
            }
            Err(Failure::Slow) if self.slow < SLOW_MAX => {
                self.slow += 1;
                // Slow is not gone: it keeps its place until the limit.
                self.workers.heard(self.seat.iter().map(|seat| seat.key), now);
            }
            Err(failure) => self.leave(&failure.to_string()),
        }
    }

    fn join(&mut self, served: Served, now: Instant) {
        self.leave("it serves other models than before");
        let about = description(&self.config, &served, &self.workers);
        let (key, about) = self.workers.add(about, now);
        tracing::info!(worker = %about.name, models = ?served.names, "engine without a sidecar answers");
        self.seat = Some(Seat { key, served });
    }

    fn leave(&mut self, why: &str) {
        if let Some(seat) = self.seat.take() {
            tracing::warn!(worker = self.config.url, why, "engine without a sidecar left");
            self.workers.remove(seat.key);
        }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        self.leave("this balancer stops");
    }
}

fn description(config: &PlainConfig, served: &Served, workers: &Workers) -> Description<PoolRef> {
    let engine = EngineFacts {
        kind: config.engine.into(),
        version: String::new(),
        engine_model: served.root.clone(),
        served_names: Vec::new(),
        lora_names: Vec::new(),
        max_model_len: served.max_model_len,
        exif: true,
        hash_scheme: HashScheme::Fovea1,
        hybrid: false,
    };
    Description {
        pool: workers.new_pool(PoolFacts { is_plain: true, ..PoolFacts::new(&engine, 0) }),
        index: WorkerIndex(0),
        name: config.authority().unwrap_or_default().into(),
        url: format!("http://{}", served.address).into(),
        dp_rank: 0,
        served_names: served.names.clone().into(),
        lora_names: [].into(),
        events: false,
        draining: false,
        by_load: config.mode == PlainMode::Load,
        capacity_tokens: u64::from(config.capacity_blocks) * u64::from(config.block_size),
        media_trusted: true,
    }
}

#[cfg(test)]
mod tests;
