//! Block streams to the balancers: one task resolves their names, one per address dials and feeds it.
//!
//! **Invariant:** nothing is kept for a balancer but its cursor; one that is slow or away costs no memory and gets a snapshot later.

mod stream;

use std::collections::{BTreeSet, HashMap};
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::config::GossipConfig;
use crate::metrics::GossipMetrics;
use crate::state::State;
use crate::worker::lock;

/// First pause before a new dial; it doubles up to `gossip.backoff_max`.
const BACKOFF_MIN: Duration = Duration::from_millis(100);

pub struct Gossip {
    pub balancers: Vec<String>,
    pub config: GossipConfig,
    /// Port of our `listen`, for an advertised URL made from the stream's local address.
    pub http_port: u16,
    pub state: Arc<State>,
    pub metrics: GossipMetrics,
    /// Ends the streams: after the drain, so that balancers learn of it.
    pub stop: CancellationToken,
}

impl Gossip {
    /// Keeps one stream to each address that the names give, until the stop.
    pub async fn run(self) {
        let this = Arc::new(self);
        let mut dialled: HashMap<SocketAddr, CancellationToken> = HashMap::new();
        let mut ticks = tokio::time::interval(this.config.resolve_interval);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = this.stop.cancelled() => return,
                _ = ticks.tick() => {}
            }
            let Some(found) = this.stop.run_until_cancelled(this.resolve()).await else { return };
            // A name that cannot be resolved at this moment keeps its streams: they tell by themselves when they end.
            if let Some(found) = found {
                dialled.retain(|address, stop| {
                    let keep = found.contains(address);
                    if !keep {
                        stop.cancel();
                    }
                    keep
                });
                for address in found {
                    dialled.entry(address).or_insert_with(|| this.dial(address));
                }
            }
        }
    }

    /// All addresses of all names; `None` when a name gives none.
    async fn resolve(&self) -> Option<BTreeSet<SocketAddr>> {
        let mut found = BTreeSet::new();
        for name in &self.balancers {
            let looked_up = tokio::net::lookup_host(name.as_str());
            match tokio::time::timeout(self.config.resolve_interval, looked_up).await {
                Ok(Ok(addresses)) => found.extend(addresses),
                Ok(Err(error)) => {
                    tracing::warn!(name, %error, "cannot resolve a balancer's name");
                    return None;
                }
                Err(_) => {
                    tracing::warn!(name, "resolving a balancer's name took too long");
                    return None;
                }
            }
        }
        if found.len() > self.config.balancers_max {
            tracing::warn!(found = found.len(), max = self.config.balancers_max, "more balancers than allowed");
        }
        Some(found.into_iter().take(self.config.balancers_max).collect())
    }

    fn dial(self: &Arc<Self>, address: SocketAddr) -> CancellationToken {
        let stop = self.stop.child_token();
        let (this, stopped) = (Arc::clone(self), stop.clone());
        // Not among the tasks that a drain waits for: balancers are told of it until it is over.
        tokio::spawn(async move {
            stopped.run_until_cancelled(this.keep(address)).await;
            lock(&this.state.streams).remove(&address);
        });
        stop
    }

    /// Dials, feeds, and dials again when the stream ends.
    async fn keep(&self, address: SocketAddr) {
        let mut pause = BACKOFF_MIN;
        loop {
            match stream::run(self, address).await {
                Ok(never) => match never {},
                Err(error) => {
                    let cause = std::error::Error::source(&error).map(ToString::to_string);
                    if error.was_welcome() {
                        self.metrics.streams_failed.inc();
                        tracing::warn!(%address, %error, cause, "stream to a balancer ended");
                        pause = BACKOFF_MIN;
                    } else {
                        self.metrics.dials_failed.inc();
                        if error.was_connected() && pause == BACKOFF_MIN {
                            tracing::warn!(%address, %error, cause, "a balancer does not take this sidecar");
                        } else {
                            tracing::debug!(%address, %error, cause, "cannot reach a balancer");
                        }
                    }
                }
            }
            tokio::time::sleep(jittered(pause)).await;
            pause = (pause * 2).min(self.config.backoff_max);
        }
    }
}

/// Between half and all of it, so that sidecars do not dial a returning balancer in step.
fn jittered(pause: Duration) -> Duration {
    use std::hash::{BuildHasher, RandomState};
    let share = RandomState::new().hash_one(0u8) % 512;
    pause / 2 + pause.mul_f64(share as f64 / 1024.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jitter_stays_between_half_and_whole() {
        let pause = Duration::from_millis(100);
        for _ in 0..1000 {
            let jittered = jittered(pause);
            assert!(jittered >= pause / 2 && jittered <= pause, "{jittered:?}");
        }
    }
}
