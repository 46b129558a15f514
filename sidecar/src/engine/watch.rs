//! Looks at the engine again and again: keeps facts, load figures and followers up to date.

use std::sync::Arc;

use fovea_service::shutdown::Shutdown;
use tokio_util::sync::CancellationToken;

use super::discover::{Discovered, EngineClient, Rank, Source, discover};
use super::events::ZmqSource;
use super::follow::{Follower, Pace};
use crate::config::Config;
use crate::metrics::{Metrics, RankLabels};
use crate::proxy::budget::Budget;
use crate::state::State;
use crate::worker::{Told, Worker};

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
        let mut followed = Vec::new();
        let mut ticks = tokio::time::interval(self.config.engine.check_interval);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            let found = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                found = discover(&self.client, &self.config) => found,
            };
            match found {
                Ok(found) => self.found(found, &mut followed),
                Err(error) => {
                    self.metrics.engine.checks_failed.inc();
                    self.metrics.engine.up.set(0);
                    if self.state.is_up() || self.state.facts().is_none() {
                        let cause = std::error::Error::source(&error).map(ToString::to_string);
                        tracing::warn!(%error, cause, "cannot look at the engine");
                    }
                    self.state.set_down();
                }
            }
            self.show();
        }
    }

    fn found(&self, found: Discovered, followed: &mut Vec<Followed>) {
        let ranks: Vec<u32> = found.ranks.iter().map(|rank| rank.rank).collect();
        if !self.state.workers().iter().map(|worker| worker.rank).eq(ranks.iter().copied()) {
            followed.clear();
            self.state.rebuild(&ranks);
        }
        for (index, (worker, rank)) in self.state.workers().into_iter().zip(&found.ranks).enumerate() {
            worker.set_told(Told { block_size: rank.block_size, capacity_blocks: rank.capacity_blocks });
            worker.load.set_kv_usage(rank.gauges.kv_usage_permille);
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
        if followed.len() > index {
            // Events of another source say nothing of what this one held.
            worker.reset();
        }
        let stop = self.shutdown.token().child_token();
        let new = Followed { source: rank.source.clone(), stop: stop.clone() };
        match followed.get_mut(index) {
            Some(old) => *old = new,
            None => followed.push(new),
        }
        let Some(source) = rank.source.clone() else {
            tracing::warn!(rank = rank.rank, "the engine publishes no kv events; start it with --kv-events-config");
            return;
        };
        let pace =
            Pace { flush_interval: self.config.gossip.flush_interval, audit_after: self.config.blocks.audit_after };
        let (state, metrics) = (Arc::clone(&self.state), self.metrics.events.clone());
        self.shutdown.spawn(Follower::new(ZmqSource::new(source), worker, state, metrics, pace).run(stop));
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
