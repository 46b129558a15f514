//! The sidecar's decisions, without I/O: what is published of what the engine holds, and whether predictions came true.

pub mod publish;
pub mod verify;
