//! The real programs on loopback: start, wait for a state, talk, stop. Used by the end-to-end tests, the demo and the benches.
//!
//! **Invariant:** a program started here is killed and waited for when its handle is dropped; ports are always 0 and read back.

pub mod capture;
pub mod certs;
pub mod client;
mod fleet;
pub mod origin;
mod program;
pub mod workload;

pub use fleet::{Fleet, FleetConfig, Mode, tiny_model};
pub use program::{Program, bin_dir, eventually};
