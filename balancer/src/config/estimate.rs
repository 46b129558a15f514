//! `estimate:` llm-d's estimator, its keys unchanged ([`Estimate`]); also out of a config file of llm-d's own.

use std::path::PathBuf;

use fovea_media::estimate::Estimate;
use fovea_service::config::{ConfigError, Invalid, Validate, load};
use serde::Deserialize;

use super::BalancerConfig;

/// What tells llm-d's files from ours.
const PICKER: &str = "EndpointPickerConfig";
/// The plugin that estimates, and its older name.
const PRODUCERS: [&str; 2] = ["token-producer", "tokenizer"];

#[derive(Deserialize)]
struct Kind {
    kind: Option<String>,
}

/// A config file of llm-d, as far as its estimator goes.
#[derive(Deserialize)]
struct Picker {
    #[serde(default)]
    plugins: Vec<Plugin>,
}

#[derive(Deserialize)]
struct Plugin {
    #[serde(rename = "type")]
    plugin: String,
    parameters: Option<Parameters>,
}

#[derive(Deserialize)]
struct Parameters {
    estimate: Option<Estimate>,
}

impl Validate for Kind {
    fn validate(&self) -> Result<(), Invalid> {
        Ok(())
    }
}

impl Validate for Picker {
    fn validate(&self) -> Result<(), Invalid> {
        Ok(())
    }
}

/// The estimator's settings in `balancer.yaml`, or in an `EndpointPickerConfig` of llm-d: those of its first plugin that estimates.
///
/// # Errors
/// When the file cannot be used.
pub fn read(path: &PathBuf) -> Result<Estimate, ConfigError> {
    if load::<Kind>(path)?.kind.as_deref() != Some(PICKER) {
        return Ok(load::<BalancerConfig>(path)?.estimate);
    }
    let plugins =
        load::<Picker>(path)?.plugins.into_iter().filter(|plugin| PRODUCERS.contains(&plugin.plugin.as_str()));
    Ok(plugins.filter_map(|plugin| plugin.parameters?.estimate).next().unwrap_or_default())
}
