//! The balancer: reads what a request means, knows what every worker holds, and sends the one to the other.

pub mod app;
pub mod config;
pub mod diagnose;
pub mod estimate;
pub mod explain;
pub mod fetch;
pub mod fetch_check;
pub mod front;
pub mod learnt;
pub mod links;
pub mod memory;
pub mod metrics;
pub mod models;
pub mod plain;
pub mod prepare;
pub mod render;
pub mod secure;
pub mod sync;
pub mod tenants;
pub mod workers;
