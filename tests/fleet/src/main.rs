//! Sweeps seeds, traces one, or runs the large fleet; the last line is a JSON record.

use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, bail};
use clap::Parser;
use fleet::plan::Plan;
use fleet::{Break, Outcome};

#[derive(Parser)]
struct Arguments {
    /// Sweep these seeds, `A..B`.
    #[arg(long)]
    seeds: Option<String>,
    /// Run this seed.
    #[arg(long)]
    seed: Option<u64>,
    /// Print what happens.
    #[arg(long)]
    trace: bool,
    /// A thousand sidecars, four balancers, one of which comes back cold.
    #[arg(long)]
    scale: bool,
    /// Blocks per worker with --scale.
    #[arg(long, default_value_t = 5000)]
    blocks: u64,
    /// Balancers with --scale.
    #[arg(long, default_value_t = 4)]
    balancers: usize,
    /// Put a fault of ours in: the sweep must find it.
    #[arg(long = "break", value_enum)]
    broken: Option<Break>,
}

fn main() -> anyhow::Result<()> {
    let arguments = Arguments::parse();
    if arguments.scale {
        let Arguments { blocks, balancers, .. } = arguments;
        println!("{}", fleet::scale::run(fleet::scale::Size { sidecars: 1000, balancers, blocks, seconds: 5 })?);
        return Ok(());
    }
    if let Some(seed) = arguments.seed {
        return one(seed, arguments.broken, arguments.trace);
    }
    let range = arguments.seeds.as_deref().unwrap_or("0..256");
    let (from, to) = range.split_once("..").context("--seeds: write A..B")?;
    sweep(from.parse().context("--seeds: A")?..to.parse().context("--seeds: B")?, arguments.broken)
}

fn one(seed: u64, broken: Option<Break>, trace: bool) -> anyhow::Result<()> {
    let plan = Plan::new(seed);
    if trace {
        println!("{plan:#?}");
        fleet::trace(&plan, broken).iter().for_each(|line| println!("{line}"));
    }
    match fleet::run(&plan, broken, false) {
        Ok(outcome) => println!("{outcome:?}"),
        Err(failure) => {
            explain(seed, &failure.what, broken);
            bail!("seed {seed} fails");
        }
    }
    Ok(())
}

/// The shortest way there is found to the failure.
fn explain(seed: u64, what: &str, broken: Option<Break>) {
    eprintln!("seed {seed}: {what}");
    let short = fleet::shrink(&Plan::new(seed), broken);
    eprintln!("shrunk to {short:#?}");
    fleet::trace(&short, broken).iter().for_each(|line| eprintln!("  {line}"));
}

fn sweep(seeds: std::ops::Range<u64>, broken: Option<Break>) -> anyhow::Result<()> {
    // A failure may be a panic of a core: it is reported once, shrunk.
    std::panic::set_hook(Box::new(|_| {}));
    let next = AtomicU64::new(seeds.start);
    let worker = || {
        let (mut sum, mut failed) = (Outcome::default(), Vec::new());
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return (sum, failed);
            }
            match fleet::run(&Plan::new(seed), broken, false) {
                Ok(outcome) => sum = plus(sum, outcome),
                Err(failure) => failed.push((seed, failure)),
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let (mut sum, mut failed) = (Outcome::default(), Vec::new());
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..threads).map(|_| scope.spawn(worker)).collect();
        for (of, failures) in running.into_iter().filter_map(|thread| thread.join().ok()) {
            sum = plus(sum, of);
            failed.extend(failures);
        }
    });
    failed.sort_by_key(|(seed, _)| *seed);
    if let Some((seed, failure)) = failed.first() {
        explain(*seed, &failure.what, broken);
    }
    let divergences = failed.iter().filter(|(_, failure)| failure.is_divergence).count();
    eprintln!("{sum:?}");
    let record = serde_json::json!({
        "seeds": seeds.end - seeds.start,
        "divergences": divergences,
        "invariant_breaks": failed.len() - divergences,
        "first_failing_seed": failed.first().map(|(seed, _)| seed),
    });
    println!("{record}");
    if failed.is_empty() { Ok(()) } else { bail!("{} seeds fail", failed.len()) }
}

fn plus(a: Outcome, b: Outcome) -> Outcome {
    Outcome {
        routed: a.routed + b.routed,
        resyncs: a.resyncs + b.resyncs,
        snapshots: a.snapshots + b.snapshots,
        digests: a.digests + b.digests,
        mismatches: a.mismatches + b.mismatches,
        repaired: a.repaired + b.repaired,
        partial: a.partial + b.partial,
    }
}
