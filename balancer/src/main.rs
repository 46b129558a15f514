//! `fovea-balancer`: routes requests to the workers that hold their KV blocks.

use std::path::PathBuf;

use anyhow::Context as _;
use clap::{Parser, Subcommand};
use fovea_balancer::config::BalancerConfig;
use fovea_balancer::{app, estimate, explain, fetch_check};

#[derive(Parser)]
#[command(version, about)]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Serves until SIGTERM. Prints one JSON line with its ports when it is ready.
    Run {
        /// `balancer.yaml`; without it every field has its default.
        #[arg(long)]
        config: Option<PathBuf>,
    },
    /// Prints what the balancer makes of one request: view, hashes, media.
    Explain(explain::Args),
    /// Prints what llm-d's estimator makes of one request: media tokens, block hashes.
    Estimate(estimate::Args),
    /// Prints what the balancer makes of one media URL: refused or not, size, identity.
    FetchCheck(fetch_check::Args),
}

fn main() -> anyhow::Result<()> {
    match Arguments::parse().command {
        Command::Run { config } => {
            let config = match config {
                Some(path) => fovea_service::config::load(&path).context("config")?,
                None => BalancerConfig::default(),
            };
            fovea_service::telemetry::init(&config.log)?;
            Ok(app::run(config)?)
        }
        Command::Explain(args) => explain::run(&args),
        Command::Estimate(args) => estimate::run(&args),
        Command::FetchCheck(args) => fetch_check::run(&args),
    }
}
