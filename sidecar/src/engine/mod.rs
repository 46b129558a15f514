//! The engine beside this sidecar: what it is, how loaded it is, and its KV events.

pub mod dialect;
pub mod discover;
pub mod endpoint;
pub mod events;
pub mod follow;
pub mod metrics_text;
pub mod poll;
pub mod version;
pub mod watch;
