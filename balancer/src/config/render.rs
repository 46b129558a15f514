//! `render:` what engines' own renderers are asked, for models whose family has no image rule here.

use std::time::Duration;

use fovea_service::config::{Invalid, Validate, human_duration};
use serde::Deserialize;

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RenderConfig {
    /// Ask at all; without it such images end the view.
    pub enabled: bool,
    /// Most probes in any minute, all pools together.
    pub per_minute: u32,
    /// For one probe and its answer.
    #[serde(with = "human_duration")]
    pub timeout: Duration,
}

impl Default for RenderConfig {
    fn default() -> Self {
        Self { enabled: true, per_minute: 30, timeout: Duration::from_secs(5) }
    }
}

impl Validate for RenderConfig {
    fn validate(&self) -> Result<(), Invalid> {
        if !(1..=6000).contains(&self.per_minute) {
            return Err(Invalid::new("per_minute", "is 0 or more than 6000", "write 1 to 6000, or enabled: false"));
        }
        if self.timeout.is_zero() {
            return Err(Invalid::new("timeout", "is 0", "write a time such as 5s"));
        }
        Ok(())
    }
}
