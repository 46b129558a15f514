//! `balancer.yaml`: every field has a default and a unit; a typo is an error with its line. `docs/operate/balancer.md` is the reference.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::time::Duration;

use fovea_balancer_core::choose;
use fovea_balancer_core::fleet::Freshness;
use fovea_balancer_core::history::Recall;
use fovea_media::estimate::Estimate;
use fovea_service::config::{ByteSize, Invalid, Validate, human_duration};
use fovea_service::secret::Secret;
use fovea_service::telemetry::LogConfig;
use fovea_service::tls::config::{ClientTlsConfig, ServerTlsConfig};
use serde::Deserialize;

pub mod estimate;
pub mod health;
pub mod history;
pub mod media;
pub mod plain;
pub mod quarantine;
pub mod queue;
pub mod render;
pub mod tenants;

use health::HealthConfig;
use history::HistoryConfig;
use media::MediaConfig;
use plain::PlainConfig;
use quarantine::QuarantineConfig;
use queue::QueueConfig;
use render::RenderConfig;
use tenants::{AccessConfig, TenantConfig};

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BalancerConfig {
    /// Where clients connect.
    pub listen: SocketAddr,
    /// Metrics, health and debug pages; keep it away from clients.
    pub admin: SocketAddr,
    /// Where sidecars connect; keep it away from clients.
    pub sync: SocketAddr,
    /// Models whose tokenizer and template are known. Others are routed by load alone.
    pub models: Vec<ModelConfig>,
    /// Models without an entry are pulled from a worker, like entries without a directory.
    pub models_from_workers: bool,
    /// Engines without a sidecar.
    pub workers: Vec<PlainConfig>,
    pub mode: ModeConfig,
    pub limits: Limits,
    pub trust: Trust,
    /// Certificates of `listen`; none = plain HTTP.
    pub tls: Option<ServerTlsConfig>,
    /// Certificates of `sync`; none = plain TCP.
    pub sync_tls: Option<ServerTlsConfig>,
    /// Certificates towards sidecars that advertise https.
    pub sidecar_tls: Option<ClientTlsConfig>,
    /// Who may ask; empty = everybody.
    pub tenants: Vec<TenantConfig>,
    /// What becomes of API keys.
    pub access: AccessConfig,
    /// When `/ready` says yes.
    pub ready_when: ReadyWhen,
    /// Images and other media given by URL.
    pub media: MediaConfig,
    /// Images of models whose family has no rule.
    pub render: RenderConfig,
    /// Tokens of media in requests that are not predicted, by llm-d's estimator and its keys.
    pub estimate: Estimate,
    /// Tell clients which worker answered and why: `x-fovea-*` response headers.
    pub debug_headers: bool,
    /// Threads for the network; 0 = one per core. As many again prepare requests.
    pub threads: usize,
    /// Retries as a share of all requests, in percent.
    pub retry_percent: u8,
    pub timeouts: Timeouts,
    pub freshness: FreshnessConfig,
    /// What is remembered of the prompts sent to workers without events.
    pub history: HistoryConfig,
    /// When a worker is left out, and how a new one begins.
    pub health: HealthConfig,
    /// Requests under which engines die.
    pub quarantine: QuarantineConfig,
    /// Waiting for a worker when all have enough.
    pub queue: QueueConfig,
    pub choose: ChooseConfig,
    pub log: LogConfig,
}

impl Default for BalancerConfig {
    fn default() -> Self {
        Self {
            listen: (Ipv4Addr::UNSPECIFIED, 8080).into(),
            admin: (Ipv4Addr::LOCALHOST, 8081).into(),
            sync: (Ipv4Addr::UNSPECIFIED, 7400).into(),
            models: Vec::new(),
            models_from_workers: false,
            workers: Vec::new(),
            mode: ModeConfig::Precise,
            limits: Limits::default(),
            trust: Trust::default(),
            tls: None,
            sync_tls: None,
            sidecar_tls: None,
            tenants: Vec::new(),
            access: AccessConfig::default(),
            ready_when: ReadyWhen::Any,
            media: MediaConfig::default(),
            render: RenderConfig::default(),
            estimate: Estimate::default(),
            debug_headers: false,
            threads: 0,
            retry_percent: 10,
            timeouts: Timeouts::default(),
            freshness: FreshnessConfig::default(),
            history: HistoryConfig::default(),
            health: HealthConfig::default(),
            quarantine: QuarantineConfig::default(),
            queue: QueueConfig::default(),
            choose: ChooseConfig::default(),
            log: LogConfig::default(),
        }
    }
}

/// What memory and connections may grow to.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Largest request body; more is refused with 413.
    pub body_max: ByteSize,
    /// All request bodies in memory together; beyond it requests wait, then get 503.
    pub bodies_max: ByteSize,
    /// Client connections at a time; more wait to be accepted.
    pub connections_max: usize,
    /// Streams of sidecars at a time; more are closed at once.
    pub sync_streams_max: usize,
    /// (block, worker) pairs that one pool's index may hold; 20 to 40 bytes each.
    pub index_entries_max: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_max: ByteSize::mib(64),
            bodies_max: ByteSize::mib(512),
            connections_max: 10_000,
            sync_streams_max: 2_000,
            index_entries_max: 16 << 20,
        }
    }
}

/// Who is believed what. Without a key, sidecars take this balancer's requests only where they trust its address.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Trust {
    /// Key that the sidecars know. Empty = the one in the environment variable `FOVEA_SHARED_KEY`, if any.
    pub shared_key: Secret,
    /// File that holds the key (white space around it is cut). Wins over `shared_key`.
    pub shared_key_file: Option<PathBuf>,
    /// Clients may send embeddings (`image_embeds`, `prompt_embeds`). One of wrong sides ends an engine.
    pub client_embeddings: bool,
}

/// A model that is predicted.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// A name under which engines serve the model.
    pub name: String,
    /// Its directory: `config.json`, `tokenizer.json`, `tokenizer_config.json`, chat template, preprocessor config. None = these are
    /// pulled from a worker.
    pub dir: Option<PathBuf>,
    /// Clients may count on it: without a worker it is out of service, not unknown.
    #[serde(default = "yes")]
    pub declared: bool,
}

fn yes() -> bool {
    true
}

/// How many models must have a worker that takes requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReadyWhen {
    /// One, whichever.
    Any,
    /// All that are declared, and one at least.
    AllDeclared,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ModeConfig {
    /// By what the workers' caches hold, and load.
    Precise,
    /// By what was sent where, and load.
    Approximate,
    /// By load alone.
    Load,
    /// One after another.
    RoundRobin,
    /// By hash of the session key or user.
    Session,
}

#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Timeouts {
    /// To open a connection to a sidecar.
    #[serde(with = "human_duration")]
    pub connect: Duration,
    /// From a request's first byte to the end of its headers.
    #[serde(with = "human_duration")]
    pub client_headers: Duration,
    /// A connection without a request is closed after this.
    #[serde(with = "human_duration")]
    pub client_idle: Duration,
    /// From the headers to the end of the request body.
    #[serde(with = "human_duration")]
    pub client_body: Duration,
    /// To the first response byte of a streamed answer.
    #[serde(with = "human_duration")]
    pub first_byte: Duration,
    /// Between two pieces of an answer.
    #[serde(with = "human_duration")]
    pub stream_idle: Duration,
    /// To the first response byte of an answer that is not streamed.
    #[serde(with = "human_duration")]
    pub total: Duration,
    /// A client that takes no bytes for this long is gone.
    #[serde(with = "human_duration")]
    pub client_write: Duration,
    /// Longest wait for room in the body budget or for a thread, then 503.
    #[serde(with = "human_duration")]
    pub queue: Duration,
    /// Longest wait for requests in flight at shutdown.
    #[serde(with = "human_duration")]
    pub drain: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            connect: Duration::from_millis(500),
            client_headers: Duration::from_secs(10),
            client_idle: Duration::from_secs(60),
            client_body: Duration::from_secs(60),
            first_byte: Duration::from_secs(300),
            stream_idle: Duration::from_secs(120),
            total: Duration::from_secs(600),
            client_write: Duration::from_secs(60),
            queue: Duration::from_secs(10),
            drain: Duration::from_secs(300),
        }
    }
}

/// How long a silent sidecar is believed; it speaks every 250 ms at least.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct FreshnessConfig {
    /// Silent this long: its overlap counts for nothing.
    #[serde(with = "human_duration")]
    pub stale_after: Duration,
    /// Silent this long: it gets no request.
    #[serde(with = "human_duration")]
    pub excluded_after: Duration,
    /// A routed prompt is assumed to be in its worker's cache for this long at most, until events tell.
    #[serde(with = "human_duration")]
    pub speculative_ttl: Duration,
}

impl Default for FreshnessConfig {
    fn default() -> Self {
        let Freshness { stale_after, excluded_after, speculative_ttl } = Freshness::default();
        Self { stale_after, excluded_after, speculative_ttl }
    }
}

impl From<FreshnessConfig> for Freshness {
    fn from(config: FreshnessConfig) -> Self {
        let FreshnessConfig { stale_after, excluded_after, speculative_ttl } = config;
        Self { stale_after, excluded_after, speculative_ttl }
    }
}

/// Weights of the choice; costs are in tokens of prefill.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ChooseConfig {
    /// Cost of a token of the request's own work, in tokens that wait before it.
    pub work_weight: f64,
    /// Cost of one prompt token of a running request.
    pub decode_weight: f64,
    /// Cost of encoding one image token.
    pub image_weight: f64,
    /// What a reused token saves, by where it lies: GPU, CPU, storage.
    pub tier_weights: [f64; 3],
    /// A worker with more than this × the mean of outstanding tokens loses its affinity …
    pub guard_factor: f64,
    /// … once it is also this many tokens above the mean.
    pub guard_floor_tokens: u64,
}

impl Default for ChooseConfig {
    fn default() -> Self {
        let choose::Settings {
            mode: _,
            decode_weight,
            image_weight,
            work_weight,
            tier_weights,
            guard_factor,
            guard_floor_tokens,
        } = choose::Settings::default();
        Self { work_weight, decode_weight, image_weight, tier_weights, guard_factor, guard_floor_tokens }
    }
}

impl BalancerConfig {
    pub fn choose_settings(&self) -> choose::Settings {
        let mode = match self.mode {
            ModeConfig::Precise => choose::Mode::Precise,
            ModeConfig::Approximate => choose::Mode::Approximate,
            ModeConfig::Load => choose::Mode::Load,
            ModeConfig::RoundRobin => choose::Mode::RoundRobin,
            ModeConfig::Session => choose::Mode::Session,
        };
        let ChooseConfig { work_weight, decode_weight, image_weight, tier_weights, guard_factor, guard_floor_tokens } =
            self.choose;
        choose::Settings {
            mode,
            decode_weight,
            image_weight,
            work_weight,
            tier_weights,
            guard_factor,
            guard_floor_tokens,
        }
    }

    /// What is remembered of workers without events, with a seed of this process.
    pub fn recall(&self) -> Recall {
        self.history.recall(std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), "history"))
    }

    /// Threads for the network.
    pub fn thread_count(&self) -> usize {
        match self.threads {
            0 => std::thread::available_parallelism().map_or(1, usize::from),
            threads => threads,
        }
    }
}

impl Validate for BalancerConfig {
    fn validate(&self) -> Result<(), Invalid> {
        self.limits.validate().map_err(|invalid| invalid.within("limits"))?;
        self.media.validate().map_err(|invalid| invalid.within("media"))?;
        self.render.validate().map_err(|invalid| invalid.within("render"))?;
        if self.threads > 1024 {
            return Err(Invalid::new("threads", "is more than 1024", "write 0 for one per core"));
        }
        if self.retry_percent > 100 {
            return Err(Invalid::new("retry_percent", "is more than 100", "write 0 to 100"));
        }
        if self.freshness.excluded_after < self.freshness.stale_after {
            let remedy = "make it at least freshness.stale_after";
            return Err(Invalid::new("freshness.excluded_after", "is shorter than stale_after", remedy));
        }
        self.validate_tls()?;
        self.history.validate().map_err(|invalid| invalid.within("history"))?;
        self.health.validate().map_err(|invalid| invalid.within("health"))?;
        self.quarantine.validate().map_err(|invalid| invalid.within("quarantine"))?;
        self.queue.validate().map_err(|invalid| invalid.within("queue"))?;
        plain::validate(&self.workers)?;
        self.validate_models()?;
        tenants::validate(&self.tenants, &self.access)?;
        self.validate_weights()?;
        self.log.validate().map_err(|invalid| invalid.within("log"))
    }
}

impl Validate for Limits {
    fn validate(&self) -> Result<(), Invalid> {
        let positive = [
            ("connections_max", self.connections_max),
            ("sync_streams_max", self.sync_streams_max),
            ("index_entries_max", self.index_entries_max),
        ];
        if let Some((field, _)) = positive.into_iter().find(|(_, value)| *value == 0) {
            return Err(Invalid::new(field, "is 0", "write 1 or more, or leave it out"));
        }
        if self.body_max.as_u64() == 0 || self.body_max.as_u64() > 4 << 30 {
            return Err(Invalid::new("body_max", "is 0 or more than 4GiB", "write a size such as 64MiB"));
        }
        if self.bodies_max < self.body_max {
            let remedy = "make it at least limits.body_max, better eight times that";
            return Err(Invalid::new("bodies_max", "is smaller than body_max", remedy));
        }
        Ok(())
    }
}

impl BalancerConfig {
    fn validate_tls(&self) -> Result<(), Invalid> {
        for (block, tls) in [("tls", &self.tls), ("sync_tls", &self.sync_tls)] {
            tls.as_ref().map_or(Ok(()), Validate::validate).map_err(|invalid| invalid.within(block))?;
        }
        let sidecars = self.sidecar_tls.as_ref().map_or(Ok(()), Validate::validate);
        sidecars.map_err(|invalid| invalid.within("sidecar_tls"))
    }

    fn validate_models(&self) -> Result<(), Invalid> {
        for (index, model) in self.models.iter().enumerate() {
            let field = format!("models[{index}].name");
            if model.name.is_empty() {
                return Err(Invalid::new(field, "is empty", "write the name that clients put in `model`"));
            }
            if self.models[..index].iter().any(|before| before.name == model.name) {
                return Err(Invalid::new(field, format!("`{}` stands twice", model.name), "leave one of them out"));
            }
        }
        Ok(())
    }

    fn validate_weights(&self) -> Result<(), Invalid> {
        let ChooseConfig { work_weight, decode_weight, image_weight, tier_weights, guard_factor, .. } = self.choose;
        let [gpu, cpu, storage] = tier_weights;
        if !(0.0..=1.0).contains(&storage) || !(storage..=1.0).contains(&cpu) || !(cpu..=1.0).contains(&gpu) {
            let remedy = "write three numbers from 0 to 1, none larger than the one before: [gpu, cpu, storage]";
            return Err(Invalid::new("choose.tier_weights", format!("is {tier_weights:?}"), remedy));
        }
        let weights = [
            ("work_weight", work_weight, 0.0),
            ("decode_weight", decode_weight, 0.0),
            ("image_weight", image_weight, 0.0),
            ("guard_factor", guard_factor, 1.0),
        ];
        match weights.into_iter().find(|(_, weight, least)| !weight.is_finite() || weight < least) {
            Some((field, weight, least)) => {
                let remedy = format!("write a number of {least} or more");
                Err(Invalid::new(format!("choose.{field}"), format!("is {weight}"), remedy))
            }
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests;
