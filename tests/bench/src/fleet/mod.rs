//! A simulated fleet under virtual time: how much of the caches each routing policy finds, and what that costs in waiting.
//!
//! The decisions are those of the real cores (`fovea_balancer_core`: fleet, load, speculation, index, choice; `fovea_kv`: views and
//! hashes; `fovea_sidecar_core`: the publisher); engines, network and clients are models. One case is one thread of seeded events:
//! equal seeds give equal figures.
//!
//! What the engine model leaves out, beside the arithmetic of a real GPU: preemption (a request is admitted once its whole prompt
//! and answer have room) and the reuse of generated tokens by the next turn.

pub mod case;
pub mod encoder;
pub mod engine;
pub mod figures;
pub mod media;
pub mod plot;
pub mod policy;
pub mod pool;
pub mod random;
pub mod report;
pub mod sidecar;
pub mod simulation;
#[cfg(test)]
mod tests;
pub mod trace;
pub mod workload;

/// Virtual time, in microseconds since the start of a case.
pub type Micros = u64;
