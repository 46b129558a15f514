//! `sidecar.yaml`: typed, closed, checked once before any port is bound. `docs/operate/sidecar.md` explains every field.

pub mod encoder;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fovea_gossip::message::EngineKind;
use fovea_service::config::{ByteSize, Invalid, KeyError, Validate, human_duration};
use fovea_service::secret::{Secret, shared_key};
use fovea_service::telemetry::LogConfig;
use fovea_service::tls::config::{ClientTlsConfig, ServerTlsConfig};
use http::Uri;
use serde::Deserialize;

use crate::discover::{BadEntry, Entry};

/// What the protocol allows.
const PREAMBLE_MAX: ByteSize = ByteSize(fovea_gossip::preamble::MAX_PREAMBLE_BYTES as u64);

/// Everything the sidecar can be told. Sizes and times carry their unit: `64MiB`, `250ms`.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Config {
    /// Where requests are taken.
    pub listen: SocketAddr,
    /// Where metrics, health and `/debug/state` are served.
    pub admin: SocketAddr,
    /// Base URL under which balancers reach `listen`. Empty = the local address of each balancer stream, and the port of `listen`.
    pub advertised_url: String,
    /// Block-stream addresses, `host:port`. A name is resolved again and again; each of its addresses gets a stream.
    pub balancers: Vec<String>,
    /// Certificates of `listen`; none = plain HTTP. With `client_auth: required` whoever shows one is taken for a balancer.
    pub tls: Option<ServerTlsConfig>,
    pub engine: EngineConfig,
    pub events: EventsConfig,
    pub model: ModelConfig,
    pub blocks: BlocksConfig,
    pub gossip: GossipConfig,
    pub limits: Limits,
    pub timeouts: Timeouts,
    pub trust: Trust,
    /// An encoder of one's own in front of the engine.
    pub encoder: encoder::EncoderConfig,
    /// Engine paths passed on besides the built-in ones, e.g. `/reset_prefix_cache`. Exact match.
    pub allow_paths: Vec<String>,
    pub log: LogConfig,
}

/// The engine's HTTP side.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EngineConfig {
    /// Base URL, `http://host:port`.
    pub url: String,
    /// Its family; `auto` = by the owner that it names in `/v1/models`.
    pub kind: Kind,
    /// Time between two looks at the engine's facts and load.
    #[serde(with = "human_duration")]
    pub check_interval: Duration,
    /// Limit of one discovery call.
    #[serde(with = "human_duration")]
    pub check_timeout: Duration,
}

/// Engine family.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    #[default]
    Auto,
    Vllm,
    Sglang,
    TrtLlm,
}

impl Kind {
    /// `None` = the engine is asked.
    pub fn known(self) -> Option<EngineKind> {
        match self {
            Self::Auto => None,
            Self::Vllm => Some(EngineKind::Vllm),
            Self::Sglang => Some(EngineKind::Sglang),
            Self::TrtLlm => Some(EngineKind::TrtLlm),
        }
    }
}

/// What the engine's pages do not say of its events, or say wrongly.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EventsConfig {
    /// ZMQ endpoint of rank 0's events, e.g. `tcp://127.0.0.1:5557`; rank r adds r to the port. Empty = ask the engine.
    pub endpoint: String,
    /// ZMQ endpoint of rank 0's replay. Empty = ask the engine.
    pub replay_endpoint: String,
    /// Topic prefix to subscribe to. Empty = all.
    pub topic: String,
    /// The engine connects to us (its endpoint has neither `*` nor `ipc://`): bind `endpoint` instead of connecting to it.
    pub bind: bool,
    /// Time between two polls of an engine whose events are fetched (TensorRT-LLM).
    #[serde(with = "human_duration")]
    pub poll_interval: Duration,
}

/// Facts that HTTP does not reveal, or that must be overruled. Empty or 0 = as the engine says.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelConfig {
    /// Model string given to `vllm serve`: it enters the default image identity.
    pub engine_model: String,
    /// Names under which the base model is served.
    pub served_names: Vec<String>,
    /// Longest sequence in tokens.
    pub max_model_len: u32,
    /// Tokens per KV block.
    pub block_size: u32,
    /// KV capacity in blocks, per rank.
    pub capacity_blocks: u64,
    /// The model has attention groups other than full: depth is an upper bound.
    pub hybrid: bool,
    /// Images are transposed by EXIF orientation before they are measured. None = as the engine family does: vLLM yes, others no.
    pub exif: Option<bool>,
    /// The engine's model directory, whose tokenizer, template and configs balancers may read. None = `engine_model` where that is
    /// an absolute path.
    pub dir: Option<PathBuf>,
}

/// What is remembered of the engine's blocks.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BlocksConfig {
    /// Blocks remembered per rank, about 300 bytes each; more are not published.
    pub blocks_max: usize,
    /// Tokens of a published block, at least: smaller blocks of the engine (SGLang's pages of 1) are taken together.
    pub tokens_min: u32,
    /// With no event for this long since the last one, the engine is asked whether one was lost.
    #[serde(with = "human_duration")]
    pub audit_after: Duration,
}

/// Block streams to the balancers.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct GossipConfig {
    /// Limit of one dial.
    #[serde(with = "human_duration")]
    pub dial_timeout: Duration,
    /// A heartbeat goes out when nothing else did for this long.
    #[serde(with = "human_duration")]
    pub heartbeat: Duration,
    /// Engine events are gathered this long into one delta.
    #[serde(with = "human_duration")]
    pub flush_interval: Duration,
    /// Shortest time between two load messages.
    #[serde(with = "human_duration")]
    pub load_interval: Duration,
    /// Time between two digests of what is published.
    #[serde(with = "human_duration")]
    pub digest_interval: Duration,
    /// Time between two resolutions of the names in `balancers`.
    #[serde(with = "human_duration")]
    pub resolve_interval: Duration,
    /// Longest pause before the next dial; the first is a tenth of a second.
    #[serde(with = "human_duration")]
    pub backoff_max: Duration,
    /// A balancer that takes nothing for this long is dropped.
    #[serde(with = "human_duration")]
    pub write_timeout: Duration,
    /// Deltas kept for balancers that lag, in bytes per rank (8 a block); one that is further behind gets a snapshot.
    pub ring_max: ByteSize,
    /// Most addresses that all names together may give.
    pub balancers_max: usize,
    /// Certificates towards the balancers' sync ports; none = plain TCP.
    pub tls: Option<ClientTlsConfig>,
}

/// Memory bounds of the request path.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Largest request body; more is refused with 413.
    pub body_max: ByteSize,
    /// All bodies held at one moment together; a request waits `timeouts.budget` for room, then gets 503.
    pub bodies_max: ByteSize,
    /// Largest balancer record before a body.
    pub preamble_max: ByteSize,
    /// Connections at one moment; more are closed at once.
    pub connections_max: usize,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Timeouts {
    /// To the engine.
    #[serde(with = "human_duration")]
    pub connect: Duration,
    /// From a client: request head, and how long an idle connection is kept. Longer than balancers keep theirs (60 s).
    #[serde(with = "human_duration")]
    pub client_head: Duration,
    /// From a client: a body that is buffered, or a preamble.
    #[serde(with = "human_duration")]
    pub client_body: Duration,
    /// From the engine: response head.
    #[serde(with = "human_duration")]
    pub first_byte: Duration,
    /// From the engine: between two pieces of a response.
    #[serde(with = "human_duration")]
    pub stream_idle: Duration,
    /// Wait for room under `limits.bodies_max`.
    #[serde(with = "human_duration")]
    pub budget: Duration,
    /// Requests in flight at shutdown are waited for, at most this long.
    #[serde(with = "human_duration")]
    pub drain: Duration,
}

/// Who may send a preamble. Either is enough.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Trust {
    /// Peers whose address is loopback. For tries on one machine: behind a proxy of a service mesh every peer is loopback.
    pub loopback: bool,
    /// Shared key: balancers prove it when a stream opens, and send it with requests in `x-fovea-key`. Empty = the one in the
    /// environment variable `FOVEA_SHARED_KEY`, if any.
    pub shared_key: Secret,
    /// File that holds the key (white space around it is cut). Wins over `shared_key`.
    pub shared_key_file: Option<PathBuf>,
    /// Clients may send embeddings (`image_embeds`, `prompt_embeds`). One of wrong sides ends the engine.
    pub client_embeddings: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([0, 0, 0, 0], 8000)),
            admin: SocketAddr::from(([127, 0, 0, 1], 8001)),
            advertised_url: String::new(),
            balancers: Vec::new(),
            tls: None,
            engine: EngineConfig::default(),
            events: EventsConfig::default(),
            model: ModelConfig::default(),
            blocks: BlocksConfig::default(),
            gossip: GossipConfig::default(),
            limits: Limits::default(),
            timeouts: Timeouts::default(),
            trust: Trust::default(),
            encoder: encoder::EncoderConfig::default(),
            allow_paths: Vec::new(),
            log: LogConfig::default(),
        }
    }
}

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            url: "http://127.0.0.1:8200".into(),
            kind: Kind::Auto,
            check_interval: Duration::from_secs(2),
            check_timeout: Duration::from_secs(2),
        }
    }
}

impl Default for EventsConfig {
    fn default() -> Self {
        Self {
            endpoint: String::new(),
            replay_endpoint: String::new(),
            topic: String::new(),
            bind: false,
            poll_interval: Duration::from_millis(50),
        }
    }
}

impl Default for BlocksConfig {
    fn default() -> Self {
        Self { blocks_max: 1 << 20, tokens_min: 16, audit_after: Duration::from_secs(5) }
    }
}

impl Default for GossipConfig {
    fn default() -> Self {
        Self {
            dial_timeout: Duration::from_millis(500),
            heartbeat: Duration::from_millis(250),
            flush_interval: Duration::from_millis(10),
            load_interval: Duration::from_millis(50),
            digest_interval: Duration::from_secs(2),
            resolve_interval: Duration::from_secs(3),
            backoff_max: Duration::from_millis(800),
            write_timeout: Duration::from_secs(5),
            ring_max: ByteSize::mib(2),
            balancers_max: 16,
            tls: None,
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_max: ByteSize::mib(64),
            bodies_max: ByteSize::mib(256),
            preamble_max: PREAMBLE_MAX,
            connections_max: 4096,
        }
    }
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_millis(500),
            client_head: Duration::from_secs(75),
            client_body: Duration::from_secs(60),
            first_byte: Duration::from_secs(300),
            stream_idle: Duration::from_secs(120),
            budget: Duration::from_secs(5),
            drain: Duration::from_secs(300),
        }
    }
}

/// `http://host:port` without path: the only form of base URL that is taken for an engine.
pub fn base_url(text: &str) -> Option<Uri> {
    url_of("http", text)
}

fn url_of(scheme: &str, text: &str) -> Option<Uri> {
    let uri: Uri = text.parse().ok()?;
    let plain = uri.scheme_str() == Some(scheme) && matches!(uri.path(), "" | "/") && uri.query().is_none();
    (plain && uri.authority().is_some_and(|authority| !authority.as_str().contains('@'))).then_some(uri)
}

impl Validate for Config {
    fn validate(&self) -> Result<(), Invalid> {
        let invalid = |field: &str, problem: &str, remedy: &str| Err(Invalid::new(field, problem, remedy));
        self.log.validate().map_err(|wrong| wrong.within("log"))?;
        if base_url(&self.engine.url).is_none() {
            return invalid("engine.url", "is no base url", "write one such as `http://127.0.0.1:8200`");
        }
        self.validate_links()?;
        self.encoder.validate().map_err(|wrong| wrong.within("encoder"))?;
        if self.encoder.is_on() && self.trust.client_embeddings {
            return invalid("trust.client_embeddings", "is set beside an encoder", "leave it out");
        }
        if self.events.bind && self.events.endpoint.is_empty() {
            return invalid(
                "events.endpoint",
                "is empty though events.bind is set",
                "write what to bind, e.g. `tcp://127.0.0.1:5557`",
            );
        }
        if self.allow_paths.iter().any(|path| !path.starts_with('/')) {
            return invalid("allow_paths", "has an entry that is no path", "begin each with `/`");
        }
        if self.limits.body_max.as_u64() == 0 || self.limits.body_max > self.limits.bodies_max {
            return invalid("limits.body_max", "is 0 or above limits.bodies_max", "write a size such as `64MiB`");
        }
        if self.limits.bodies_max > ByteSize::tib(1) {
            return invalid("limits.bodies_max", "is above 1TiB", "write a size such as `256MiB`");
        }
        if self.limits.preamble_max.as_u64() == 0 || self.limits.preamble_max > PREAMBLE_MAX {
            return invalid("limits.preamble_max", "is 0 or above 4MiB", "write a size such as `4MiB`");
        }
        if self.limits.connections_max == 0
            || self.blocks.blocks_max == 0
            || self.blocks.tokens_min == 0
            || self.gossip.balancers_max == 0
            || self.gossip.ring_max.as_u64() == 0
        {
            return invalid(
                "limits.connections_max, blocks.blocks_max, blocks.tokens_min, gossip.balancers_max or gossip.ring_max",
                "is 0",
                "write a number above 0",
            );
        }
        if self.times().iter().any(Duration::is_zero) {
            return invalid("timeouts, gossip or engine", "has a time of 0", "write a time such as `500ms`");
        }
        Ok(())
    }
}

impl Config {
    /// Where balancers are, where we are, and how both are proven.
    fn validate_links(&self) -> Result<(), Invalid> {
        let invalid = |field: &str, problem: &str, remedy: &str| Err(Invalid::new(field, problem, remedy));
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        if !self.advertised_url.is_empty() && url_of(scheme, &self.advertised_url).is_none() {
            let problem = format!("is no base url of {scheme}, which `tls` decides");
            let remedy = format!("write one such as `{scheme}://10.0.0.7:8000`, or leave it out");
            return invalid("advertised_url", &problem, &remedy);
        }
        match self.balancers.iter().find_map(|text| Entry::parse(text).err()) {
            None => {}
            Some(BadEntry::NoPort) => {
                let remedy = "write each as `host:port`, e.g. `127.0.0.1:7400`";
                return invalid("balancers", "has an entry without port", remedy);
            }
            Some(BadEntry::NoService) => {
                let remedy = "write `kubernetes://namespace/service:port`";
                return invalid("balancers", "has an entry that names no Kubernetes service", remedy);
            }
            Some(BadEntry::NoFeature) => {
                let remedy = "build with `--features kube`, or write the name of a headless service, `host:port`";
                return invalid("balancers", "has a Kubernetes service, which this build does not know", remedy);
            }
        }
        self.tls.as_ref().map_or(Ok(()), Validate::validate).map_err(|wrong| wrong.within("tls"))?;
        self.gossip.tls.as_ref().map_or(Ok(()), Validate::validate).map_err(|wrong| wrong.within("gossip.tls"))
    }

    fn times(&self) -> [Duration; 18] {
        let (t, g, e) = (&self.timeouts, &self.gossip, &self.engine);
        [
            t.connect,
            t.client_head,
            t.client_body,
            t.first_byte,
            t.stream_idle,
            t.budget,
            g.dial_timeout,
            g.heartbeat,
            g.flush_interval,
            g.load_interval,
            g.digest_interval,
            g.resolve_interval,
            g.backoff_max,
            g.write_timeout,
            e.check_interval,
            e.check_timeout,
            self.blocks.audit_after,
            self.events.poll_interval,
        ]
    }
}

impl Trust {
    /// The key in force, `None` without one.
    ///
    /// # Errors
    /// The key file cannot be read, or is empty.
    pub fn key(&self) -> Result<Option<Vec<u8>>, KeyError> {
        shared_key(&self.shared_key, self.shared_key_file.as_deref())
    }
}

/// Reads, parses and checks the file.
///
/// # Errors
/// As `fovea_service::config::load`.
pub fn load(path: &Path) -> Result<Config, fovea_service::config::ConfigError> {
    fovea_service::config::load(path)
}

#[cfg(test)]
mod tests;
