//! Looks at the engine again and again: keeps facts, load figures and followers up to date.

use std::sync::Arc;

use fovea_gossip::message::EngineFacts;
use fovea_service::shutdown::Shutdown;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

use super::discover::{DiscoverError, Discovered, EngineClient, Rank, Source, discover};
use super::events::ZmqSource;
use super::follow::{Follower, Pace};
use super::poll::Poller;
use crate::config::Config;
use crate::metrics::{Metrics, RankLabels};
use crate::proxy::budget::Budget;
use crate::state::State;
use crate::worker::{Told, Worker, lock};

/// Looks in a row that may be too slow before the engine counts as gone: its server answers late while it prepares large requests.
const SLOW_LOOKS_MAX: u32 = 3;

/// The looks that failed since the last one that succeeded.
#[derive(Debug, Default)]
struct Failures {
    slow: u32,
    told: bool,
}

impl Failures {
    /// One more. True = the engine counts as gone.
    fn add(&mut self, error: &DiscoverError) -> bool {
        self.slow = if error.is_slow() { self.slow + 1 } else { SLOW_LOOKS_MAX };
        self.slow >= SLOW_LOOKS_MAX
    }
}

pub struct Watch {
    pub client: EngineClient,
    pub config: Arc<Config>,
    pub state: Arc<State>,
    pub metrics: Metrics,
    pub budget: Budget,
    pub shutdown: Shutdown,
}

/// A follower that runs, and what it follows.
struct Followed {
    source: Option<Source>,
    stop: CancellationToken,
    task: JoinHandle<()>,
}

/// By socket or by request.
enum Reader {
    Follower(Box<Follower<ZmqSource>>),
    Poller(Box<Poller>),
}

impl Drop for Followed {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

impl Watch {
    /// Looks at once, then each `engine.check_interval`, until the stop.
    pub async fn run(self) {
        let stop = self.shutdown.token();
        let (mut followed, mut failures) = (Vec::new(), Failures::default());
        let mut ticks = tokio::time::interval(self.config.engine.check_interval);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
                () = self.state.look_wanted() => {}
            }
            let found = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                found = discover(&self.client, &self.config) => found,
            };
            match found {
                Ok(found) => {
                    failures = Failures::default();
                    self.found(found, &mut followed);
                }
                Err(error) => self.failed(&error, &mut failures),
            }
            self.show();
        }
    }

    fn failed(&self, error: &DiscoverError, failures: &mut Failures) {
        self.metrics.engine.checks_failed.inc();
        if !std::mem::replace(&mut failures.told, true) {
            let cause = std::error::Error::source(error).map(ToString::to_string);
            tracing::warn!(%error, cause, "cannot look at the engine");
        }
        if failures.add(error) {
            self.metrics.engine.up.set(0);
            self.state.set_down();
        }
    }

    fn found(&self, found: Discovered, followed: &mut Vec<Followed>) {
        let ranks: Vec<u32> = found.ranks.iter().map(|rank| rank.rank).collect();
        let name = |facts: &EngineFacts| (facts.kind, facts.version.clone(), facts.engine_model.clone());
        let other = self.state.facts().is_some_and(|facts| name(&facts) != name(&found.facts));
        if other {
            // How it keys media is to be learnt anew.
            lock(&self.state.learnt).clear();
        }
        if other || !self.state.workers().iter().map(|worker| worker.rank).eq(ranks.iter().copied()) {
            followed.clear();
            self.state.rebuild(&ranks, found.facts.kind);
        }
        for (index, (worker, rank)) in self.state.workers().into_iter().zip(&found.ranks).enumerate() {
            worker.set_told(Told { block_size: rank.block_size, capacity_tokens: rank.capacity_tokens });
            worker.load.set_kv_usage(rank.kv_usage_permille);
            self.follow(index, worker, rank, followed);
        }
        if !self.state.is_up() {
            tracing::info!(model = found.facts.engine_model, version = found.facts.version, "the engine is up");
        }
        self.metrics.engine.up.set(1);
        if self.state.set_facts(found.facts) {
            self.metrics.engine.facts_changed.inc();
        }
    }

    /// Starts a follower for this place, unless one follows the same source.
    fn follow(&self, index: usize, worker: Arc<Worker>, rank: &Rank, followed: &mut Vec<Followed>) {
        if followed.get(index).is_some_and(|old| old.source == rank.source) {
            return;
        }
        if rank.source.is_none() {
            tracing::warn!(
                rank = rank.rank,
                "the engine publishes no kv events; `fovea-sidecar doctor` says how to switch them on"
            );
        }
        let stop = self.shutdown.token().child_token();
        let before = (index < followed.len()).then(|| followed.remove(index));
        let (state, stopped) = (Arc::clone(&self.state), stop.clone());
        let reader = rank.source.clone().map(|source| self.reader(source, rank.block_size, Arc::clone(&worker)));
        let task = self.shutdown.spawn(async move {
            if let Some(mut before) = before {
                before.stop.cancel();
                // It may be in the middle of a batch; a panic in it is told by the runtime.
                let _ = (&mut before.task).await;
                // Events of another source say nothing of what that one held.
                worker.forget();
                state.announce();
                state.refresh_hello();
            }
            match reader {
                Some(Reader::Follower(follower)) => follower.run(stopped).await,
                Some(Reader::Poller(poller)) => poller.run(stopped).await,
                None => {}
            }
        });
        followed.insert(index, Followed { source: rank.source.clone(), stop, task });
    }

    /// What reads events of this source.
    fn reader(&self, source: Source, block_size: u32, worker: Arc<Worker>) -> Reader {
        let (state, metrics) = (Arc::clone(&self.state), self.metrics.events.clone());
        let (gossip, blocks) = (&self.config.gossip, &self.config.blocks);
        match source {
            Source::Zmq(link) => {
                let pace = Pace { flush_interval: gossip.flush_interval, audit_after: blocks.audit_after };
                let wire = link.wire;
                Reader::Follower(Box::new(Follower::new(ZmqSource::new(link), wire, worker, state, metrics, pace)))
            }
            Source::Pull(media) => Reader::Poller(Box::new(Poller {
                client: self.client.clone(),
                base: self.config.engine.url.clone(),
                media,
                block_size,
                interval: self.config.events.poll_interval,
                worker,
                state,
                metrics,
            })),
        }
    }

    /// Figures that are not kept up to date by steps.
    fn show(&self) {
        for worker in self.state.workers() {
            let (gauges, counters) = worker.figures();
            self.metrics.events.show(worker.rank, &gauges, &counters);
            let (labels, load) = (RankLabels { rank: worker.rank }, worker.load.message(worker.index));
            let proxy = &self.metrics.proxy;
            proxy.running.get_or_create(&labels).set(load.running.into());
            proxy.waiting.get_or_create(&labels).set(load.waiting.into());
            proxy.prefill_tokens.get_or_create(&labels).set(i64::try_from(load.prefill_tokens).unwrap_or(i64::MAX));
        }
        let free = i64::try_from(self.budget.free_bytes()).unwrap_or(i64::MAX);
        self.metrics.proxy.bodies_free_bytes.set(free);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn an_engine_is_gone_at_once_when_nobody_is_there_and_after_some_looks_when_it_is_slow() {
        let slow = DiscoverError::TooSlow { path: "/health", limit: Duration::from_secs(2) };
        let absent = DiscoverError::Unreachable { path: "/health", source: "refused".into() };
        let mut failures = Failures::default();
        assert_eq!([(); 3].map(|()| failures.add(&slow)), [false, false, true]);
        assert!(failures.add(&slow));
        let mut failures = Failures::default();
        assert!(failures.add(&absent) && failures.add(&slow));
    }
}
