//! `history:` what is remembered of the prompts sent to workers whose events cannot be read.

use std::time::Duration;

use fovea_balancer_core::history::Recall;
use fovea_service::config::{Invalid, Validate, human_duration};
use serde::Deserialize;

/// Most blocks that one worker may be given: 200 MB.
const BLOCKS_MAX: usize = 4 << 20;

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HistoryConfig {
    /// A block sent this long ago is not believed to be there any more.
    #[serde(with = "human_duration")]
    pub ttl: Duration,
    /// Blocks per worker, about 50 bytes each; fewer where the worker's capacity is known to be smaller.
    pub blocks_max: usize,
}

impl Default for HistoryConfig {
    fn default() -> Self {
        let Recall { ttl, blocks_max, .. } = Recall::default();
        Self { ttl, blocks_max }
    }
}

impl HistoryConfig {
    /// `seed`: of tables whose keys come from clients.
    pub fn recall(self, seed: u64) -> Recall {
        Recall { ttl: self.ttl, blocks_max: self.blocks_max, seed }
    }
}

impl Validate for HistoryConfig {
    fn validate(&self) -> Result<(), Invalid> {
        if self.ttl < Duration::from_secs(1) {
            return Err(Invalid::new("ttl", "is shorter than a second", "write a time such as 120s"));
        }
        if self.blocks_max == 0 || self.blocks_max > BLOCKS_MAX {
            let remedy = format!("write 1 to {BLOCKS_MAX}, or `mode: load` to remember nothing");
            return Err(Invalid::new("blocks_max", format!("is {}", self.blocks_max), remedy));
        }
        Ok(())
    }
}
