//! Beside one engine: takes its requests, follows its KV events, and tells the balancers what it holds and how loaded it is.
//!
//! The shell around `fovea-kv`, `fovea-gossip`, `fovea-openai` and `fovea-sidecar-core`, which make every decision. Rooms:
//! [`engine`] (discovery, events), [`proxy`] (HTTP), [`gossip`] (streams to balancers); [`app`] wires them.

pub mod app;
pub mod body;
pub mod closed_loop;
pub mod config;
mod debug;
pub mod decode;
pub mod discover;
pub mod doctor;
pub mod encode;
pub mod engine;
pub mod gossip;
pub mod learnt;
pub mod links;
pub mod load;
pub mod metrics;
pub mod proxy;
pub mod state;
pub mod worker;
