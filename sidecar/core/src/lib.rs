//! The sidecar's decisions, without I/O: what is published of what the engine holds.

pub mod publish;
