//! The simulated fleet bench: six routing policies on public traces and multimodal workloads, in virtual time. `tests/bench.sh fleet`
//! builds everything and starts this.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context as _, ensure};
use bench::fleet::case::{self, Cache, Case, Plan, Row, Traces, WORKLOADS};
use bench::fleet::policy::Policy;
use bench::fleet::{engine, plot, report};
use clap::Parser;
use fovea_balancer_core::choose::Settings;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

#[derive(Parser)]
#[command(about = "Compare routing policies on a simulated fleet")]
struct Args {
    /// One seed, small fleets, scarce caches.
    #[arg(long)]
    quick: bool,
    /// Figures are medians over this many seeds.
    #[arg(long, default_value_t = 5)]
    seeds: u64,
    /// Folder with conversation_trace.jsonl and synthetic_trace.jsonl (Mooncake); left out where they are not there.
    #[arg(long, default_value = "../shared/traces")]
    traces: PathBuf,
    /// Writes table, JSON and charts into the folder of --out.
    #[arg(long)]
    plots: bool,
    #[arg(long, default_value = "docs/operate/results")]
    out: PathBuf,
    /// Only these workloads.
    #[arg(long, value_delimiter = ',')]
    only: Vec<String>,
    #[arg(long, value_delimiter = ',')]
    workers: Vec<usize>,
    /// Also Fovea with the engines' true queues: what better knowledge of load would bring.
    #[arg(long)]
    true_load: bool,
    #[command(flatten)]
    tune: Tune,
}

/// In place of the defaults, to see what a weight does.
#[derive(clap::Args)]
struct Tune {
    #[arg(long)]
    work_weight: Option<f64>,
    #[arg(long)]
    decode_weight: Option<f64>,
    #[arg(long)]
    image_weight: Option<f64>,
    #[arg(long)]
    guard_factor: Option<f64>,
    #[arg(long)]
    guard_floor_tokens: Option<u64>,
    /// Of the engines: what encoding an image token takes, in prefill tokens.
    #[arg(long)]
    image_cost: Option<f64>,
    /// Of the engines: prompt tokens computed per second.
    #[arg(long)]
    prefill_per_s: Option<f64>,
}

impl Tune {
    fn choose(&self) -> Settings {
        let base = Settings::default();
        Settings {
            work_weight: self.work_weight.unwrap_or(base.work_weight),
            decode_weight: self.decode_weight.unwrap_or(base.decode_weight),
            image_weight: self.image_weight.unwrap_or(base.image_weight),
            guard_factor: self.guard_factor.unwrap_or(base.guard_factor),
            guard_floor_tokens: self.guard_floor_tokens.unwrap_or(base.guard_floor_tokens),
            ..base
        }
    }

    fn engine(&self) -> engine::Settings {
        let base = engine::Settings::default();
        engine::Settings {
            image_cost: self.image_cost.unwrap_or(base.image_cost),
            prefill_per_s: self.prefill_per_s.unwrap_or(base.prefill_per_s),
            ..base
        }
    }
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let traces = Traces::read(&args.traces)?;
    let plan = plan(&args, &traces);
    ensure!(!plan.cases.is_empty(), "no case is left: look at --only and --workers");
    if !traces.has("conversation") {
        eprintln!("{} has no traces: only the multimodal workloads run", args.traces.display());
    }
    let runs = plan.cases.len() as u64 * plan.seeds * plan.policies.len() as u64;
    let bar = ProgressBar::with_draw_target(Some(runs), ProgressDrawTarget::stderr());
    bar.set_style(ProgressStyle::with_template("{wide_bar} {pos}/{len} runs, {eta} left")?);
    bar.enable_steady_tick(Duration::from_millis(500));
    let rows = case::run_all(&plan, &traces, || bar.inc(1))?;
    bar.finish_and_clear();
    eprint!("{}", report::table(&rows));
    if args.plots {
        write(&args.out, &rows)?;
    }
    println!("{}", report::json(&rows));
    Ok(())
}

fn plan(args: &Args, traces: &Traces) -> Plan {
    let sizes: &[usize] = if args.quick { &[4, 16] } else { &[4, 16, 64] };
    let sizes = if args.workers.is_empty() { sizes } else { &args.workers };
    let caches: &[Cache] = if args.quick { &[Cache::Scarce] } else { &[Cache::Scarce, Cache::Ample] };
    let is_wanted =
        |name: &&str| (args.only.is_empty() || args.only.iter().any(|only| only == name)) && traces.has(name);
    let mut cases = Vec::new();
    for name in WORKLOADS.into_iter().filter(is_wanted) {
        for &workers in sizes.iter().filter(|workers| **workers > 0) {
            cases.extend(caches.iter().map(|&cache| Case { name, workers, cache }));
        }
    }
    let seeds = if args.quick { 1 } else { args.seeds.max(1) };
    let more = args.true_load.then_some(Policy::TrueLoad);
    let policies = Policy::ALL.into_iter().chain(more).collect();
    Plan { cases, policies, seeds, engine: args.tune.engine(), choose: args.tune.choose() }
}

fn write(folder: &Path, rows: &[Row]) -> anyhow::Result<()> {
    let mut files = plot::all(rows);
    files.push(("fleet.md".to_owned(), report::page(rows)));
    files.push(("fleet.json".to_owned(), format!("{:#}\n", report::json(rows))));
    std::fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    for (name, text) in files {
        let path = folder.join(name);
        std::fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}
