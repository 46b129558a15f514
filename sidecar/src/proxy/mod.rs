//! The HTTP side: takes requests, edits what must be edited, streams both ways.
//!
//! **Invariant:** nothing outlives its client: the stack holds every guard in futures and bodies, which hyper drops when the
//! connection ends.

pub mod answer;
pub mod budget;
pub mod drain;
mod flight;
pub mod forward;
pub mod headers;
pub mod model_files;
pub mod paths;
pub mod prepare;
pub mod refusal;
pub mod serve;
mod speaking;
pub mod splice;
pub mod stack;
mod step;
mod usage;
mod whole;
