//! The cases: workloads × fleet sizes × cache sizes, each under every policy and several seeds.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use anyhow::Context as _;
use fovea_balancer_core::choose::Settings;
use serde::Serialize;

use super::engine;
use super::figures::Figures;
use super::media;
use super::policy::Policy;
use super::simulation::{Fleet, run};
use super::trace::{self, Line};
use super::workload::Workload;

/// Engines spend this share of their time on prefill and encoding under the oracle; all policies get the same arrivals.
pub const UTILISATION: f64 = 0.7;

/// How much the engines can keep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cache {
    /// All engines together hold half of the workload's distinct blocks, but each one 1024 blocks and four of the longest prompts.
    Scarce,
    /// Each engine holds all of them.
    Ample,
}

impl Cache {
    pub fn name(self) -> &'static str {
        match self {
            Self::Scarce => "scarce",
            Self::Ample => "ample",
        }
    }

    fn blocks(self, workload: &Workload, workers: usize) -> u32 {
        let (distinct, longest) = (workload.distinct_blocks() as u32, workload.blocks_max());
        match self {
            Self::Scarce => (distinct / 2 / workers as u32).max(1024).max(4 * longest),
            Self::Ample => distinct + distinct / 4 + 64 * longest,
        }
    }
}

/// Public traces, where they are there.
#[derive(Debug, Default)]
pub struct Traces(BTreeMap<&'static str, Vec<Line>>);

impl Traces {
    /// Reads `conversation_trace.jsonl` and `synthetic_trace.jsonl` of a folder; a missing file is left out.
    ///
    /// # Errors
    /// For a file that is there and cannot be read.
    pub fn read(folder: &Path) -> anyhow::Result<Self> {
        let mut traces = BTreeMap::new();
        for (name, file) in [("conversation", "conversation_trace.jsonl"), ("synthetic", "synthetic_trace.jsonl")] {
            let path = folder.join(file);
            if path.exists() {
                traces.insert(name, trace::read(&path)?);
            }
        }
        Ok(Self(traces))
    }

    /// The workload can be made: it is no trace, or the trace is there.
    pub fn has(&self, name: &str) -> bool {
        self.0.contains_key(name) || !["conversation", "synthetic"].contains(&name)
    }
}

/// Names of all workloads.
pub const WORKLOADS: [&str; 10] = [
    "conversation",
    "synthetic",
    "window",
    "photo",
    "documents",
    "reuse_0",
    "reuse_20",
    "reuse_50",
    "reuse_90",
    "system_prompt",
];

/// A workload for a fleet of that size; `None` for a trace that is not there or an unknown name.
pub fn workload(name: &str, workers: usize, seed: u64, traces: &Traces) -> Option<Workload> {
    let count = (60 * workers).clamp(800, 3840);
    match name {
        "window" => Some(media::window((8 * workers).max(30), seed)),
        "photo" => Some(media::photo(2 * count, workers, UTILISATION, seed)),
        "documents" => Some(media::documents(count, seed)),
        "reuse_0" => Some(media::reuse("reuse_0", count, 0, seed)),
        "reuse_20" => Some(media::reuse("reuse_20", count, 20, seed)),
        "reuse_50" => Some(media::reuse("reuse_50", count, 50, seed)),
        "reuse_90" => Some(media::reuse("reuse_90", count, 90, seed)),
        "system_prompt" => Some(media::system_prompt(count, seed)),
        _ => traces.0.get_key_value(name).map(|(name, lines)| trace::sample(name, lines, count, seed)),
    }
}

#[derive(Clone, Copy, Debug)]
pub struct Case {
    pub name: &'static str,
    pub workers: usize,
    pub cache: Cache,
}

/// What is varied from run to run of the whole bench.
#[derive(Clone, Debug)]
pub struct Plan {
    pub cases: Vec<Case>,
    pub policies: Vec<Policy>,
    pub seeds: u64,
    pub engine: engine::Settings,
    pub choose: Settings,
}

/// Medians over the seeds, by policy.
#[derive(Clone, Debug)]
pub struct Row {
    pub case: Case,
    pub figures: BTreeMap<Policy, Figures>,
    /// Medians of reused tokens / the oracle's in the same seed; 1 where the oracle reuses nothing.
    pub reuse_over_oracle: BTreeMap<Policy, f64>,
}

/// Runs all cases, as many at a time as there are cores; `done` is called after each run of one policy.
///
/// # Errors
/// When a case names a workload that cannot be made.
pub fn run_all(plan: &Plan, traces: &Traces, done: impl Fn() + Sync) -> anyhow::Result<Vec<Row>> {
    // The largest first, so that no core is left with one at the end.
    let mut order: Vec<usize> = (0..plan.cases.len()).collect();
    order.sort_by_key(|at| std::cmp::Reverse(plan.cases[*at].workers));
    let (next, rows) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get).min(order.len().max(1));
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some(at) = order.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let row = run_case(plan, plan.cases[*at], traces, &done);
                    rows.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push((*at, row));
                }
            });
        }
    });
    let mut rows = rows.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
    rows.sort_by_key(|(at, _)| *at);
    rows.into_iter().map(|(_, row)| row).collect()
}

fn run_case(plan: &Plan, case: Case, traces: &Traces, done: &(impl Fn() + Sync)) -> anyhow::Result<Row> {
    let make = |seed| {
        workload(case.name, case.workers, seed, traces).with_context(|| format!("there is no workload {}", case.name))
    };
    let mut all: BTreeMap<Policy, Vec<Figures>> = BTreeMap::new();
    let mut ratios: BTreeMap<Policy, Vec<f64>> = BTreeMap::new();
    let mut gap = None;
    for seed in 1..=plan.seeds {
        let workload = make(seed)?;
        let mut fleet = Fleet {
            workers: case.workers,
            blocks: case.cache.blocks(&workload, case.workers),
            engine: plan.engine,
            choose: plan.choose,
            gap: 0.0,
        };
        fleet.gap = *gap.get_or_insert_with(|| calibrate(&workload, Fleet { choose: Settings::default(), ..fleet }));
        let oracle = Figures::of(&run(&workload, &fleet, Policy::Oracle), case.workers);
        for policy in &plan.policies {
            let figures = match policy {
                Policy::Oracle => oracle,
                _ => Figures::of(&run(&workload, &fleet, *policy), case.workers),
            };
            let ratio = if oracle.reused_tokens > 0.0 { figures.reused_tokens / oracle.reused_tokens } else { 1.0 };
            all.entry(*policy).or_default().push(figures);
            ratios.entry(*policy).or_default().push(ratio);
            done();
        }
    }
    let median = |values: &mut Vec<f64>| {
        values.sort_by(f64::total_cmp);
        super::figures::quantile(values, 0.5)
    };
    Ok(Row {
        case,
        figures: all.iter().map(|(policy, figures)| (*policy, Figures::median(figures))).collect(),
        reuse_over_oracle: ratios.iter_mut().map(|(policy, values)| (*policy, median(values))).collect(),
    })
}

/// The mean time between requests, in microseconds, at which the oracle with the default weights reaches [`UTILISATION`].
fn calibrate(workload: &Workload, mut fleet: Fleet) -> f64 {
    let tokens: f64 = workload.requests.iter().map(|request| f64::from(request.prompt_tokens())).sum();
    let per_request = tokens / workload.requests.len().max(1) as f64 / fleet.engine.prefill_per_s * 1e6;
    fleet.gap = per_request / (fleet.workers as f64 * UTILISATION);
    for _ in 0..3 {
        let utilisation = run(workload, &fleet, Policy::Oracle).utilisation;
        fleet.gap *= utilisation / UTILISATION;
    }
    fleet.gap
}
