//! The balancer: reads what a request means, knows what every worker holds, and sends the one to the other.

pub mod app;
pub mod config;
pub mod estimate;
pub mod explain;
pub mod fetch;
pub mod fetch_check;
pub mod front;
pub mod learnt;
pub mod memory;
pub mod metrics;
pub mod models;
pub mod prepare;
pub mod render;
pub mod sync;
pub mod workers;
