//! Steady load with churn on real programs, and what it does to their memory and file descriptors.

mod churn;
mod load;
mod watch;

use std::sync::Arc;
use std::time::Duration;

use e2e::{Fleet, FleetConfig, Mode};
use serde::Serialize;
use tokio::time::Instant;

pub use watch::Found;

/// Engines, each with its sidecar. The first pair is never killed.
const WORKERS: usize = 4;

/// What is run.
#[derive(Clone, Copy, Debug)]
pub struct Plan {
    pub length: Duration,
    /// Between two requests.
    pub pause: Duration,
    pub kill_every: Duration,
    pub seed: u64,
}

/// The figures of a run.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Totals {
    pub requests: u64,
    /// Neither a whole answer, nor a cut that a kill explains.
    pub errors: u64,
    /// Streams that had begun on a program that was killed.
    pub cut: u64,
    /// Given up by the client itself.
    pub left: u64,
    pub kills: u64,
    pub rss_growth_ratio: f64,
    pub fd_growth: i64,
}

/// Runs the plan on a fresh fleet.
///
/// # Errors
/// When a program does not start, or ends by itself.
pub async fn run(plan: &Plan) -> anyhow::Result<Found> {
    let mut config = FleetConfig::tiny(WORKERS, Mode::Precise);
    config.engine_args = ["--speed", "20", "--block-size", "32", "--blocks", "2000"].map(str::to_owned).to_vec();
    let mut fleet = Fleet::start(config).await?;
    let until = Instant::now() + plan.length;
    let tally = Arc::new(load::Tally::default());
    let watcher = watch::Watcher::new(&fleet)?;
    let load = tokio::spawn(load::send(fleet.client.clone(), fleet.chat_url()?, *plan, until, Arc::clone(&tally)));
    let samples = tokio::spawn(watcher.watch(until));
    churn::churn(&mut fleet, plan, until, &tally).await?;
    load.await??;
    let samples = samples.await??;
    Ok(Found::new(samples, &tally))
}
