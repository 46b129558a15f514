//! What both programs need around their cores: config files, logs, the admin port, metric labels, ordered shutdown, TLS.
//!
//! **Invariant:** nothing here knows of requests, engines or blocks.

pub mod admin;
pub mod config;
pub mod label;
pub mod ready;
pub mod secret;
pub mod shutdown;
pub mod telemetry;
pub mod tls;
