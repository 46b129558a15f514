//! `quarantine:` requests under which engines die.

use std::time::Duration;

use fovea_balancer_core::quarantine::Settings;
use fovea_service::config::{Invalid, Validate, human_duration};
use serde::Deserialize;

/// 64 bytes each, with what finds them.
const ENTRIES_MAX: usize = 1 << 20;

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct QuarantineConfig {
    /// Requests remembered, the oldest death forgotten first; 0 = no quarantine.
    pub entries_max: usize,
    /// A request under which two engines died is refused for so long; one with one death is suspect for so long.
    #[serde(with = "human_duration")]
    pub ttl: Duration,
    /// A suspect request has a worker without other suspects for so long, or until its first byte.
    #[serde(with = "human_duration")]
    pub trial: Duration,
}

impl Default for QuarantineConfig {
    fn default() -> Self {
        let Settings { entries_max, ttl } = Settings::default();
        Self { entries_max, ttl, trial: Duration::from_secs(2) }
    }
}

impl From<QuarantineConfig> for Settings {
    fn from(config: QuarantineConfig) -> Self {
        let QuarantineConfig { entries_max, ttl, trial: _ } = config;
        Self { entries_max, ttl }
    }
}

impl Validate for QuarantineConfig {
    fn validate(&self) -> Result<(), Invalid> {
        if self.entries_max > ENTRIES_MAX {
            return Err(Invalid::new("entries_max", "is more than 1048576", "write 0 to 1048576"));
        }
        if self.ttl.is_zero() {
            return Err(Invalid::new("ttl", "is 0", "write a time such as 10m, or entries_max: 0"));
        }
        if self.trial.is_zero() {
            return Err(Invalid::new("trial", "is 0", "write a time such as 1s"));
        }
        Ok(())
    }
}
