//! Block streams to the balancers: one task per address that was found dials and feeds it.
//!
//! **Invariant:** nothing is kept for a balancer but its cursor; one that is slow or away costs no memory and gets a snapshot later.

pub mod link;
pub mod stream;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio_util::sync::CancellationToken;

use crate::config::GossipConfig;
use crate::discover::set::{Change, EndpointSet};
use crate::discover::{self, Entry};
use crate::metrics::{GossipMetrics, Refused, RefusedLabels};
use crate::state::State;
use crate::worker::lock;
use link::Credentials;
use stream::StreamError;

/// First pause before a new dial; it doubles up to `gossip.backoff_max`.
const BACKOFF_MIN: Duration = Duration::from_millis(100);

pub struct Gossip {
    pub balancers: Vec<Entry>,
    pub config: GossipConfig,
    pub credentials: Credentials,
    /// `listen` speaks TLS.
    pub https: bool,
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
        let mut set = EndpointSet::new(this.balancers.len(), this.config.balancers_max);
        let mut seen = discover::follow(&this.balancers, this.config.resolve_interval, &this.stop);
        while let Some(Some(sight)) = this.stop.run_until_cancelled(seen.recv()).await {
            let left_out = set.left_out();
            for change in set.see(sight) {
                match change {
                    Change::HangUp { address } => {
                        dialled.remove(&address).inspect(CancellationToken::cancel);
                    }
                    Change::Dial { address, source } => {
                        let host = this.balancers.get(source).map(Entry::host).unwrap_or_default();
                        dialled.insert(address, this.dial(address, host));
                    }
                }
            }
            if set.left_out() > left_out {
                let max = this.config.balancers_max;
                tracing::warn!(max, left_out = set.left_out(), "more balancers than gossip.balancers_max allows");
            }
        }
    }

    fn dial(self: &Arc<Self>, address: SocketAddr, host: String) -> CancellationToken {
        let stop = self.stop.child_token();
        let (this, stopped) = (Arc::clone(self), stop.clone());
        // Not among the tasks that a drain waits for: balancers are told of it until it is over.
        tokio::spawn(async move {
            stopped.run_until_cancelled(this.keep(address, &host)).await;
            lock(&this.state.streams).remove(&address);
        });
        stop
    }

    /// Dials, feeds, and dials again when the stream ends.
    async fn keep(&self, address: SocketAddr, host: &str) {
        let mut pause = BACKOFF_MIN;
        loop {
            match stream::run(self, address, host).await {
                Ok(never) => match never {},
                Err(error) => {
                    let cause = causes(&error);
                    if error.was_welcome() {
                        self.metrics.streams_failed.inc();
                        tracing::warn!(%address, %error, cause, "stream to a balancer ended");
                        pause = BACKOFF_MIN;
                    } else {
                        self.metrics.dials_failed.inc();
                        if let Some(refused) = Refused::of(&error) {
                            self.metrics.refused.get_or_create(&RefusedLabels { cause: refused }).inc();
                        }
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

/// Everything behind an error, in one line.
fn causes(error: &StreamError) -> String {
    let sources = std::iter::successors(std::error::Error::source(error), |&error| error.source());
    sources.map(ToString::to_string).collect::<Vec<_>>().join(": ")
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
