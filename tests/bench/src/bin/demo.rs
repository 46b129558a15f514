//! The demo: four simulated engines, three policies, one table. `deploy/demo.sh` builds everything and starts this.

use anyhow::ensure;
use bench::{measure, report};
use clap::Parser;
use e2e::workload::Shape;
use e2e::{Fleet, FleetConfig, Mode};
use serde_json::json;

/// Policies in the order of the table.
const POLICIES: [(&str, &str, Mode); 3] = [
    ("round_robin", "round robin", Mode::RoundRobin),
    ("session", "session affinity", Mode::Session),
    ("fovea", "Fovea", Mode::Precise),
];

/// Four engines that prefill 10 000 tokens a second and hold 600 blocks of 32 tokens each: caching matters, as on a busy fleet.
const ENGINE: &[&str] = &[
    "--block-size",
    "32",
    "--blocks",
    "600",
    "--max-model-len",
    "8192",
    "--prefill-tps",
    "10000",
    "--encoder-ms-per-token",
    "0.05",
    "--decode-ms",
    "5",
    "--max-running",
    "8",
];

#[derive(Parser)]
#[command(about = "Compare round robin, session affinity and Fovea on simulated engines")]
struct Args {
    /// Fewer requests.
    #[arg(long)]
    short: bool,
    /// Print one JSON object on stdout in place of the table.
    #[arg(long)]
    json: bool,
    /// Leave the fleet running after the comparison, until Ctrl-C.
    #[arg(long)]
    serve: bool,
    #[arg(long, default_value_t = 4)]
    workers: usize,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    tokio::select! {
        result = run(&args) => result,
        _ = tokio::signal::ctrl_c() => Ok(()),
    }
}

async fn run(args: &Args) -> anyhow::Result<()> {
    let shape = if args.short { Shape::SHORT } else { Shape::FULL };
    let (mut comparison, mut last) = (measure::Comparison::new(), None);
    for (key, title, mode) in POLICIES {
        drop(last.take());
        let mut config = FleetConfig::tiny(args.workers, mode);
        config.engine_args = ENGINE.iter().map(|&arg| arg.to_owned()).collect();
        let (fleet, figures) = measure::run(title, config, shape).await?;
        comparison.insert(key, figures);
        last = Some(fleet);
    }
    let fleet = last.expect("the list of policies is not empty");
    let repeat = measure::repeat(&fleet).await?;
    let failed: u64 = comparison.values().map(|figures| figures.failed).sum();
    let order: Vec<_> = POLICIES.iter().map(|(key, title, _)| (*key, *title)).collect();
    let sheet = format!("\n{}\n{}\n", report::table(&order, &comparison), report::repeat(&repeat));
    if args.json {
        eprint!("{sheet}");
        let mut object = json!(comparison);
        object["repeat"] = json!(repeat);
        object["failed"] = json!(failed);
        println!("{object}");
    } else {
        print!("{sheet}");
    }
    ensure!(failed == 0, "{failed} requests failed");
    if args.serve {
        serve(&fleet).await?;
    }
    Ok(())
}

async fn serve(fleet: &Fleet) -> anyhow::Result<()> {
    let (url, admin) = (fleet.url()?, fleet.balancer.addr("admin")?);
    println!(
        "balancer  {url}/v1/chat/completions\nmetrics   http://{admin}/metrics\nworkers   http://{admin}/debug/workers\nlogs      {}",
        fleet.dir().display()
    );
    println!(
        "\ncurl -i {url}/v1/chat/completions -H 'content-type: application/json' -d '{{\"model\":\"tiny-vl\",\"max_tokens\":8,\"messages\":[{{\"role\":\"user\",\"content\":\"hello\"}}]}}'\n\nCtrl-C ends everything."
    );
    tokio::signal::ctrl_c().await?;
    Ok(())
}
