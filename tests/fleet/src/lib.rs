//! The whole fleet in one thread under a virtual clock: the real replica, publisher, outbox, codec, inbox, index, fleet and choice, a model
//! of the engine, and every fault by seed. A tick is 10 ms.
//!
//! What it cannot see: sockets, TLS, HTTP, and whatever the shells do beside moving data.

mod balancer;
mod check;
mod engine;
mod mirror;
pub mod plan;
mod prompt;
mod random;
mod requests;
pub mod scale;
mod sidecar;
mod stream;
mod world;

use std::panic::{AssertUnwindSafe, catch_unwind};

use plan::Plan;
use world::World;

/// Virtual time, in ticks of 10 ms.
pub type Tick = u64;

/// A fault of ours that the simulation must find.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Break {
    /// A balancer leaves out the last hash of each removal.
    SkipRemoval,
    /// A sidecar leaves out the last hash of each removal.
    LoseRemoval,
    /// A cancelled request keeps its booking.
    LeakBooking,
    /// A sidecar waits up to 2 s between two dials: longer than a returned balancer may be without it.
    SlowDial,
}

/// What a run that held counted.
#[derive(Clone, Copy, Debug, Default)]
pub struct Outcome {
    pub routed: u64,
    pub resyncs: u64,
    pub snapshots: u64,
    pub digests: u64,
    pub mismatches: u64,
    pub repaired: u64,
    /// Sidecars that said at the end that their history was lost.
    pub partial: u64,
}

/// A run that did not hold.
#[derive(Clone, Debug)]
pub struct Failure {
    pub what: String,
    /// Two ends differ, rather than a rule broken on the way.
    pub is_divergence: bool,
    pub trace: Vec<String>,
}

/// Runs one plan.
///
/// # Errors
/// When something that must hold did not.
pub fn run(plan: &Plan, broken: Option<Break>, trace: bool) -> Result<Outcome, Failure> {
    let mut world = World::new(plan.clone(), broken, trace);
    let done = catch_unwind(AssertUnwindSafe(|| world.run()));
    let what = match done {
        Ok(Ok(())) => return Ok(outcome(&world)),
        Ok(Err(what)) => what,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            format!("tick {}: panic: {}", world.now, text.unwrap_or_default())
        }
    };
    let trace = world.trace.take().unwrap_or_default();
    Err(Failure { is_divergence: what.starts_with("at rest"), what, trace })
}

/// The trace of a run, whether it holds or not.
pub fn trace(plan: &Plan, broken: Option<Break>) -> Vec<String> {
    let mut world = World::new(plan.clone(), broken, true);
    let end = world.run();
    let mut lines = world.trace.take().unwrap_or_default();
    lines.push(end.map_or_else(|what| what, |()| format!("{:?}", outcome(&world))));
    lines
}

/// Fewer faults, and an earlier end of them, with which it still fails.
pub fn shrink(plan: &Plan, broken: Option<Break>) -> Plan {
    let mut best = plan.clone();
    let fails = |plan: &Plan| run(plan, broken, false).is_err();
    let mut size = best.faults.len().div_ceil(2).max(1);
    loop {
        let mut at = 0;
        while at < best.faults.len() {
            let mut less = best.clone();
            less.faults.drain(at..(at + size).min(best.faults.len()));
            if fails(&less) {
                best = less;
            } else {
                at += size;
            }
        }
        if size == 1 {
            break;
        }
        size = size.div_ceil(2);
    }
    for ticks in [best.ticks / 4, best.ticks / 2, best.ticks * 3 / 4] {
        let mut shorter = Plan { ticks, ..best.clone() };
        shorter.faults.retain(|fault| fault.at < ticks);
        if shorter.faults.len() == best.faults.len() && fails(&shorter) {
            return shorter;
        }
    }
    best
}

fn outcome(world: &World) -> Outcome {
    let figures = world.figures();
    let partial = world.sidecars.iter().filter(|sidecar| !sidecar.replica.is_complete()).count() as u64;
    Outcome {
        routed: world.routed,
        resyncs: figures.resyncs,
        snapshots: figures.snapshots,
        digests: figures.digests,
        mismatches: figures.mismatches,
        repaired: figures.repaired,
        partial,
    }
}
