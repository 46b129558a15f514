//! `health:` when a worker is left out for a while, and how a new one begins.

use std::time::Duration;

use fovea_balancer_core::health::Settings;
use fovea_service::config::{Invalid, Validate, human_duration};
use serde::Deserialize;

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HealthConfig {
    /// Failed connections and 5xx within `window` that eject a worker; 0 = none is ejected.
    pub failures_max: u32,
    #[serde(with = "human_duration")]
    pub window: Duration,
    /// An ejected worker gets nothing for so long, then one request as a probe.
    #[serde(with = "human_duration")]
    pub open_for: Duration,
    /// Most of a pool that is ejected at a time, in percent.
    pub ejected_percent_max: u8,
    /// A new worker's share of requests grows over this time; 0s = at once.
    #[serde(with = "human_duration")]
    pub slow_start: Duration,
}

impl Default for HealthConfig {
    fn default() -> Self {
        let Settings { failures_max, window, open_for, slow_start, .. } = Settings::default();
        Self { failures_max, window, open_for, ejected_percent_max: 30, slow_start }
    }
}

impl From<HealthConfig> for Settings {
    fn from(config: HealthConfig) -> Self {
        let HealthConfig { failures_max, window, open_for, ejected_percent_max, slow_start } = config;
        Self { failures_max, window, open_for, ejected_share_max: f64::from(ejected_percent_max) / 100.0, slow_start }
    }
}

impl Validate for HealthConfig {
    fn validate(&self) -> Result<(), Invalid> {
        if self.failures_max > 64 {
            return Err(Invalid::new("failures_max", "is more than 64", "write 0 to 64"));
        }
        if self.ejected_percent_max > 100 {
            return Err(Invalid::new("ejected_percent_max", "is more than 100", "write 0 to 100"));
        }
        if self.window.is_zero() || self.open_for.is_zero() {
            return Err(Invalid::new("window", "or open_for is 0", "write times such as 10s and 5s"));
        }
        Ok(())
    }
}
