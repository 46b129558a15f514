//! `queue:` requests that wait for a worker when all have enough.

use std::time::Duration;

use fovea_service::config::{Invalid, Validate, human_duration};
use serde::Deserialize;

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct QueueConfig {
    /// A worker with so many requests, running and waiting, is saturated; 0 = however many.
    pub requests_max: u32,
    /// A worker whose outstanding tokens are this multiple of what its KV cache holds is saturated; 0 = however many, as where the
    /// cache's size is not known.
    pub saturation: f64,
    /// Requests that wait in one pool's queue; more are refused.
    pub waiting_max: usize,
    /// Longest wait.
    #[serde(with = "human_duration")]
    pub wait_max: Duration,
    /// Status of the refusal: 503 or 429.
    pub status: u16,
}

impl Default for QueueConfig {
    fn default() -> Self {
        Self { requests_max: 0, saturation: 4.0, waiting_max: 1024, wait_max: Duration::from_secs(10), status: 503 }
    }
}

impl Validate for QueueConfig {
    fn validate(&self) -> Result<(), Invalid> {
        if !self.saturation.is_finite() || self.saturation < 0.0 {
            return Err(Invalid::new("saturation", "is no number of 0 or more", "write a number such as 4"));
        }
        if self.waiting_max > 1 << 20 {
            return Err(Invalid::new("waiting_max", "is more than 1048576", "write 0 to 1048576"));
        }
        if ![429, 503].contains(&self.status) {
            return Err(Invalid::new("status", "is neither 429 nor 503", "write 503 or 429"));
        }
        Ok(())
    }
}
