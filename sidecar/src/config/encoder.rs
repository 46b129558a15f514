//! Section `encoder`: a vision encoder of one's own in front of the engine. Off by default, and then it costs nothing.

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use fovea_service::config::{ByteSize, Invalid, Validate, human_duration};
use serde::Deserialize;

/// What makes the rows, and how they reach the engine.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct EncoderConfig {
    pub backend: Backend,
    pub python: PythonSection,
    pub batching: BatchingConfig,
    pub images: ImagesConfig,
    /// Rows kept, with their book-keeping.
    pub cache_bytes: ByteSize,
    /// Longest wait for another request that encodes the same image.
    #[serde(with = "human_duration")]
    pub join_timeout: Duration,
    pub handoff: HandOffConfig,
}

/// What makes the rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Backend {
    /// Images reach the engine as they are.
    #[default]
    Off,
    /// Rows made of a hash of the image's bytes; for tests and trials.
    Passthrough,
    Python,
}

/// The Python process.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PythonSection {
    /// `pkg.module:Class`.
    pub class: String,
    /// Handed to the class's `build`.
    pub model: String,
    pub interpreter: PathBuf,
    pub python_path: Vec<PathBuf>,
    /// None = as the sidecar sees them.
    pub cuda_visible_devices: Option<String>,
    /// Part of the fingerprint.
    pub revision: Option<String>,
    /// None = the class's own.
    pub preprocess_concurrency: Option<u32>,
    /// None = `/dev/shm`, else the system's.
    pub transfer_dir: Option<PathBuf>,
    #[serde(with = "human_duration")]
    pub start_timeout: Duration,
    #[serde(with = "human_duration")]
    pub preprocess_timeout: Duration,
    #[serde(with = "human_duration")]
    pub forward_timeout: Duration,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct BatchingConfig {
    /// Cost that may wait for a forward pass, in the encoder's unit; more is answered by 503.
    pub max_queued_cost: u64,
    /// Images under way together; more are answered by 503.
    pub max_pending_images: u64,
    /// None = the encoder's own bound.
    pub max_batch_items: Option<NonZeroU32>,
}

/// What is taken of a request, checked before anything is decoded.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ImagesConfig {
    /// Per request.
    pub count_max: usize,
    /// Of one image's file.
    pub bytes_max: ByteSize,
    /// Width × height of one image, by its header.
    pub pixels_max: u64,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct HandOffConfig {
    pub mode: Mode,
    /// The engine's `shared_storage_path`.
    pub path: PathBuf,
    /// Of files in `path` together.
    pub bytes: ByteSize,
    /// The engine's command line, argument by argument. Hand-offs that no request can probe need it.
    pub engine_args: Vec<String>,
    /// Files of a request whose answer broke off stay this long: the engine may not know yet that nobody waits.
    #[serde(with = "human_duration")]
    pub grace: Duration,
}

/// How rows reach the engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
pub enum Mode {
    /// `vllm-ec-shm` when `engine_args` show its flag, else `vllm-image-embeds`.
    #[default]
    #[serde(rename = "auto")]
    Auto,
    #[serde(rename = "vllm-ec-shm")]
    EcShm,
    #[serde(rename = "vllm-image-embeds")]
    ImageEmbeds,
}

impl Default for EncoderConfig {
    fn default() -> Self {
        Self {
            backend: Backend::Off,
            python: PythonSection::default(),
            batching: BatchingConfig::default(),
            images: ImagesConfig::default(),
            cache_bytes: ByteSize::mib(2048),
            join_timeout: Duration::from_secs(60),
            handoff: HandOffConfig::default(),
        }
    }
}

impl Default for PythonSection {
    fn default() -> Self {
        Self {
            class: String::new(),
            model: String::new(),
            interpreter: "python3".into(),
            python_path: Vec::new(),
            cuda_visible_devices: None,
            revision: None,
            preprocess_concurrency: None,
            transfer_dir: None,
            start_timeout: Duration::from_secs(600),
            preprocess_timeout: Duration::from_secs(30),
            forward_timeout: Duration::from_secs(60),
        }
    }
}

impl Default for BatchingConfig {
    fn default() -> Self {
        Self { max_queued_cost: 65_536, max_pending_images: 1024, max_batch_items: None }
    }
}

impl Default for ImagesConfig {
    fn default() -> Self {
        Self { count_max: 64, bytes_max: ByteSize::mib(20), pixels_max: 50_000_000 }
    }
}

impl Default for HandOffConfig {
    fn default() -> Self {
        Self {
            mode: Mode::Auto,
            path: "/dev/shm/fovea-ec".into(),
            bytes: ByteSize::mib(8192),
            engine_args: Vec::new(),
            grace: Duration::from_secs(10),
        }
    }
}

impl EncoderConfig {
    pub fn is_on(&self) -> bool {
        self.backend != Backend::Off
    }
}

impl Validate for EncoderConfig {
    fn validate(&self) -> Result<(), Invalid> {
        let invalid = |field: &str, problem: &str, remedy: &str| Err(Invalid::new(field, problem, remedy));
        if !self.is_on() {
            return Ok(());
        }
        if self.backend == Backend::Python && self.python.class.is_empty() {
            return invalid("python.class", "is empty though backend is python", "write `pkg.module:Class`");
        }
        if self.handoff.mode == Mode::EcShm && self.handoff.engine_args.is_empty() {
            let remedy =
                "write the engine's command line as a list: without the flag --ec-transfer-config it ends at an image";
            return invalid("handoff.engine_args", "is empty though handoff.mode is vllm-ec-shm", remedy);
        }
        if !self.handoff.path.is_absolute() {
            return invalid("handoff.path", "is not absolute", "write a path such as `/dev/shm/fovea-ec`");
        }
        let zero = self.images.count_max == 0
            || self.images.bytes_max.as_u64() == 0
            || self.images.pixels_max == 0
            || self.handoff.bytes.as_u64() == 0
            || self.batching.max_queued_cost == 0
            || self.batching.max_pending_images == 0;
        let python = &self.python;
        let times = [self.join_timeout, python.start_timeout, python.preprocess_timeout, python.forward_timeout];
        if zero || times.iter().any(Duration::is_zero) {
            return invalid("images, batching, handoff.bytes or a time", "is 0", "write a number above 0");
        }
        Ok(())
    }
}
