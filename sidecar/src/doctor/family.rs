//! What differs between engine families: a table of texts and limits each, and what their pages say beyond discovery.

use fovea_gossip::message::EngineKind;

use super::ask::Ask;
use super::{sglang, trtllm, vllm};
use crate::config::Config;
use crate::engine::version::Version;

/// One family. Remedies name the exact option.
pub struct Family {
    pub name: &'static str,
    /// How this version is known: `Ok` = it was run or read, `Err` = what was instead.
    pub known: fn(Version) -> Result<&'static str, &'static str>,
    pub traps: fn(&Traps<'_>) -> Vec<Trap>,
    pub events_on: &'static str,
    pub replay_on: &'static str,
    /// What makes an engine bind its event socket that does not.
    pub bind_on: &'static str,
    pub caching_on: &'static str,
    pub usage_on: &'static str,
    pub block_size: &'static str,
    /// What is said of hashes where the engine does not tell.
    pub hashes: &'static str,
    pub dangers: &'static [Danger],
    /// Paths that must never be in `allow_paths`.
    pub forbidden: &'static [&'static str],
}

/// What an engine's own pages say. `None` = they say nothing of it.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Told {
    /// A page that would tell of event sockets exists.
    pub tells_events: bool,
    /// Event endpoints as the engine was given them, by rank.
    pub endpoints: Vec<(u32, String)>,
    /// The engine binds them whatever they look like.
    pub forced_bind: bool,
    /// Batches kept for replay.
    pub buffer_steps: Option<u64>,
    pub prefix_caching: Option<bool>,
    /// Block hashes or the form of events, in words.
    pub hashes: Option<String>,
    /// Answers tell cached tokens.
    pub usage: Option<bool>,
    pub takes_images: Option<bool>,
    pub model_type: String,
    /// A request's `session_id` comes back on its events, and means nothing else.
    pub sessions: bool,
}

/// What traps depend on.
pub struct Traps<'a> {
    pub version: Option<Version>,
    pub told: &'a Told,
    pub config: &'a Config,
}

/// Something of this version that bites. `remedy` is there when it bites as things are set.
#[derive(Debug, PartialEq, Eq)]
pub struct Trap {
    pub what: String,
    pub remedy: Option<&'static str>,
}

impl Trap {
    /// Good to know; Fovea copes.
    pub fn note(what: impl Into<String>) -> Self {
        Self { what: what.into(), remedy: None }
    }

    pub fn fault(what: impl Into<String>, remedy: &'static str) -> Self {
        Self { what: what.into(), remedy: Some(remedy) }
    }
}

/// A path that clients must not reach.
pub struct Danger {
    pub path: &'static str,
    pub there: There,
    pub what: &'static str,
}

/// How it is known whether a path exists. None that has an effect is asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum There {
    /// Every release has it.
    Always,
    /// GET only reads.
    ByGet,
    /// It takes POST; OPTIONS has no effect.
    ByOptions,
}

pub fn family(kind: EngineKind) -> &'static Family {
    match kind {
        EngineKind::Vllm => &vllm::FAMILY,
        EngineKind::Sglang => &sglang::FAMILY,
        EngineKind::TrtLlm => &trtllm::FAMILY,
    }
}

/// Reads the family's own pages. A page that is missing or of another shape says nothing.
pub async fn told(kind: EngineKind, ask: &Ask, version: Option<Version>) -> Told {
    match kind {
        EngineKind::Vllm => vllm::told(ask, version).await,
        EngineKind::Sglang => sglang::told(ask, version).await,
        EngineKind::TrtLlm => trtllm::told(),
    }
}

/// Whether a publisher binds this endpoint, as vLLM and SGLang decide it; any other form connects.
pub fn binds(endpoint: &str) -> bool {
    ["*", "::", "0.0.0.0"].iter().any(|any| endpoint.contains(any))
        || endpoint.starts_with("ipc://")
        || endpoint.starts_with("inproc://")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_with_a_concrete_host_connect() {
        for (endpoint, expect) in [
            ("tcp://*:5557", true),
            ("tcp://[::]:5557", true),
            ("ipc:///run/kv", true),
            ("tcp://127.0.0.1:5557", false),
            ("tcp://balancer:5557", false),
        ] {
            assert_eq!(binds(endpoint), expect, "{endpoint}");
        }
    }
}
