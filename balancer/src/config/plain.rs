//! `workers:` engines that have no sidecar, by URL.

use fovea_gossip::message::EngineKind;
use fovea_service::config::Invalid;
use serde::Deserialize;

/// Engines that one balancer asks for their health.
const WORKERS_MAX: usize = 1024;

/// One engine without a sidecar. It is asked for its health; its caches and queues are not seen.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PlainConfig {
    /// `http://host:port`.
    pub url: String,
    /// Names it is to be asked for; empty = all that its `/v1/models` lists.
    #[serde(default)]
    pub models: Vec<String>,
    /// What it is.
    #[serde(default)]
    pub engine: PlainEngine,
    /// KV blocks that it keeps; 0 = not known, so that `history.blocks_max` alone bounds what is remembered of it.
    #[serde(default)]
    pub capacity_blocks: u32,
    /// Tokens of such a block.
    #[serde(default = "block_size")]
    pub block_size: u32,
    #[serde(default)]
    pub mode: PlainMode,
}

fn block_size() -> u32 {
    16
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlainEngine {
    #[default]
    Vllm,
    Sglang,
    Trtllm,
}

impl From<PlainEngine> for EngineKind {
    fn from(engine: PlainEngine) -> Self {
        match engine {
            PlainEngine::Vllm => Self::Vllm,
            PlainEngine::Sglang => Self::Sglang,
            PlainEngine::Trtllm => Self::TrtLlm,
        }
    }
}

/// How it is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum PlainMode {
    /// By what was sent there, and load.
    #[default]
    Approximate,
    /// By load alone.
    Load,
}

impl PlainConfig {
    /// Host and port.
    pub fn authority(&self) -> Option<String> {
        let uri: http::Uri = self.url.parse().ok()?;
        let authority = uri.authority()?;
        let is_plain = uri.scheme_str() == Some("http") && matches!(uri.path(), "" | "/") && uri.query().is_none();
        let is_named = authority.port_u16().is_some() && !authority.as_str().contains('@');
        (is_plain && is_named).then(|| authority.as_str().to_owned())
    }
}

/// Checks all of them.
///
/// # Errors
/// Names the field.
pub fn validate(workers: &[PlainConfig]) -> Result<(), Invalid> {
    if workers.len() > WORKERS_MAX {
        let remedy = "put sidecars beside them: a sidecar reports by itself";
        return Err(Invalid::new("workers", format!("has more than {WORKERS_MAX} entries"), remedy));
    }
    for (index, worker) in workers.iter().enumerate() {
        let field = |name: &str| format!("workers[{index}].{name}");
        if worker.authority().is_none() {
            let problem = format!("`{}` is not of the form http://host:port", worker.url);
            return Err(Invalid::new(field("url"), problem, "write the address of the engine's API"));
        }
        if workers[..index].iter().any(|before| before.authority() == worker.authority()) {
            return Err(Invalid::new(field("url"), format!("`{}` stands twice", worker.url), "leave one of them out"));
        }
        if worker.models.iter().any(String::is_empty) {
            let remedy = "write the name that clients put in `model`";
            return Err(Invalid::new(field("models"), "has an empty name", remedy));
        }
        if worker.block_size == 0 {
            return Err(Invalid::new(field("block_size"), "is 0", "write the engine's block size, or leave it out"));
        }
    }
    Ok(())
}
