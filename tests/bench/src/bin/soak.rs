//! The real programs under steady load with churn, for as long as one likes: `tests/soak.sh`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::ensure;
use bench::soak::{Plan, run};
use clap::Parser;

#[derive(Parser)]
struct Args {
    /// Length of the run.
    #[arg(long, default_value_t = 30.0)]
    minutes: f64,
    /// Requests per second.
    #[arg(long, default_value_t = 200.0)]
    rate: f64,
    /// Time between two kills.
    #[arg(long, default_value_t = 20.0)]
    kill_every_s: f64,
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Writes a chart of memory and file descriptors.
    #[arg(long)]
    plot: Option<PathBuf>,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let plan = Plan {
        length: Duration::from_secs_f64(args.minutes * 60.0),
        pause: Duration::from_secs_f64(1.0 / args.rate),
        kill_every: Duration::from_secs_f64(args.kill_every_s),
        seed: args.seed,
    };
    let found = run(&plan).await?;
    if let Some(path) = &args.plot {
        tokio::fs::write(path, found.chart()).await?;
    }
    println!("{}", serde_json::to_string(&found.totals)?);
    ensure!(found.totals.errors == 0, "there were unexpected errors: see above");
    Ok(())
}
