//! Settings of one simulated engine; the command line of the program and the argument of [`crate::Sim::start`].

use crate::events::HashForm;
use crate::hash::Algorithm;
use crate::sglang::{Rules, Version};
use clap::Parser;
use std::path::PathBuf;

/// The engine family that is played.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum EngineKind {
    /// vLLM: block pool, `/kv_event_sources`, extra keys.
    Vllm,
    /// SGLang: radix tree of pages, `/server_info`, identity inside the tokens.
    Sglang,
    /// TensorRT-LLM: block tree, events by polling `/kv_cache_events`, media keys per block.
    Trtllm,
}

/// An engine without a model: real block accounting and KV events, made-up text.
#[derive(Parser, Clone, Debug)]
#[command(name = "engine-sim", version)]
pub struct SimConfig {
    /// Engine family: its paths, cache, hashes and events.
    #[arg(long, value_enum, default_value = "vllm")]
    pub engine_kind: EngineKind,
    /// Release that is played; default 0.32.0 (vllm), 0.5.23 (sglang), 1.3.0 (trtllm). SGLang's events change with it.
    #[arg(long)]
    pub engine_version: Option<String>,
    /// Address to bind.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// HTTP port; 0 = chosen by the system.
    #[arg(long, default_value_t = 0)]
    pub port: u16,
    /// Data-parallel ranks behind the one HTTP port (1 to 8): each has its own pool, scheduler and publisher. The
    /// request header `X-data-parallel-rank` pins a rank; without it the least loaded one is taken.
    #[arg(long, default_value_t = 1)]
    pub data_parallel_size: usize,
    /// ZMQ PUB port of rank 0, rank r has this plus r; 0 = chosen by the system.
    #[arg(long, default_value_t = 0)]
    pub events_port: u16,
    /// ZMQ ROUTER port for replay, likewise.
    #[arg(long, default_value_t = 0)]
    pub replay_port: u16,
    /// Folder with tokenizer.json, chat_template.json, preprocessor_config.json, config.json.
    #[arg(long, default_value = "tests/vectors/vllm/tiny-qwen3-vl")]
    pub model_dir: PathBuf,
    /// Served name.
    #[arg(long, default_value = "tiny-vl")]
    pub model_name: String,
    /// The model string given to the engine: vLLM's `root` in /v1/models and part of its default image identities,
    /// SGLang's `model_path`.
    #[arg(long, default_value = "./tiny-qwen3-vl")]
    pub engine_model: String,
    /// LoRA adapter, NAME=PATH; may be repeated (vllm).
    #[arg(long = "lora", value_parser = name_and_path)]
    pub loras: Vec<(String, String)>,
    /// Tokens per KV block or page; 1 is common with sglang.
    #[arg(long, visible_aliases = ["page-size", "tokens-per-block"], default_value_t = 16)]
    pub block_size: usize,
    /// Blocks in the pool, the null block included.
    #[arg(long, default_value_t = 1024)]
    pub blocks: usize,
    /// Blocks of a CPU tier that evicted blocks go to; 0 = none (vllm).
    #[arg(long, default_value_t = 0)]
    pub cpu_blocks: usize,
    /// Longest prompt plus answer, in tokens.
    #[arg(long, default_value_t = 4096)]
    pub max_model_len: usize,
    /// Images allowed in one prompt.
    #[arg(long, default_value_t = 8)]
    pub max_images: usize,
    /// Block hash algorithm (vllm).
    #[arg(long, value_enum, default_value = "sha256_cbor")]
    pub hash_algo: Algorithm,
    /// How events carry hashes (vllm).
    #[arg(long, value_enum, default_value = "int")]
    pub hash_form: HashForm,
    /// Stands for the image processor and its settings: image hashes are equal on engines of equal fingerprints
    /// (sglang).
    #[arg(long, default_value = "engine-sim")]
    pub processor_fingerprint: String,
    /// Give every image of every request a hash of its own, as SGLANG_MM_SKIP_COMPUTE_HASH does (sglang).
    #[arg(long)]
    pub random_media_hash: bool,
    /// Topic of events; default `kv@HOST:PORT@MODEL_NAME` (vllm), empty (sglang).
    #[arg(long)]
    pub topic: Option<String>,
    /// Batches kept for replay (vllm, sglang), events kept for the next poll (trtllm).
    #[arg(long, default_value_t = 10_000)]
    pub buffer_steps: usize,
    /// A page that answers 403: `/v1/chat/completions/render` does without `--enable-scale-out`, `/tokenize` behind some gateways. May be
    /// repeated (vllm).
    #[arg(long = "closed-path")]
    pub closed_paths: Vec<String>,
    /// Prefill speed in tokens per second.
    #[arg(long, default_value_t = 8000.0)]
    pub prefill_tps: f64,
    /// Encoder time per image token in ms.
    #[arg(long, default_value_t = 0.2)]
    pub encoder_ms_per_token: f64,
    /// Images whose encoder output is kept.
    #[arg(long, default_value_t = 64)]
    pub encoder_cache_images: usize,
    /// Time of a decode step in ms.
    #[arg(long, default_value_t = 5.0)]
    pub decode_ms: f64,
    /// Requests in one batch.
    #[arg(long, default_value_t = 64)]
    pub max_running: usize,
    /// Requests that may wait; more are refused with 503.
    #[arg(long, default_value_t = 4096)]
    pub max_waiting: usize,
    /// Tokens computed in one step.
    #[arg(long, default_value_t = 2048)]
    pub step_tokens: usize,
    /// Answer length when the request names none.
    #[arg(long, default_value_t = 32)]
    pub default_output: usize,
    /// Divides all waiting; 0 = no waiting at all.
    #[arg(long, default_value_t = 1.0)]
    pub speed: f64,
    /// Largest request body in bytes.
    #[arg(long, default_value_t = 64 << 20)]
    pub body_bytes_max: usize,
}

/// SGLang's release when none is named.
const SGLANG_DEFAULT: &str = "0.5.23";
/// Data-parallel ranks of one engine.
const RANKS_MAX: usize = 8;

fn name_and_path(text: &str) -> Result<(String, String), String> {
    let (name, path) = text.split_once('=').ok_or("write it as NAME=PATH")?;
    Ok((name.to_owned(), path.to_owned()))
}

impl Default for SimConfig {
    fn default() -> Self {
        Self::parse_from(["engine-sim"])
    }
}

/// A setting that cannot work.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The pool must hold the longest request, else it would wait for ever.
    #[error(
        "max_model_len {max_model_len} needs more than {usable} usable blocks of {block_size} tokens; raise blocks"
    )]
    PoolTooSmall { max_model_len: usize, usable: usize, block_size: usize },
    /// Not a release of this family.
    #[error("engine_version {text:?} is no release; write it like 0.5.23")]
    Version { text: String },
    /// A setting of another family.
    #[error("{field} is simulated for vllm only; leave it out")]
    VllmOnly { field: &'static str },
    /// There are too many ranks, or none.
    #[error("data_parallel_size must be 1 to {RANKS_MAX}, is {ranks}")]
    Ranks { ranks: usize },
    /// The ranks' ports overlap.
    #[error("events_port {events} and replay_port {replay} are closer than the {ranks} ranks; move one")]
    PortsOverlap { events: u16, replay: u16, ranks: usize },
    /// A number that must be above zero is not.
    #[error("{field} must be above 0")]
    Zero { field: &'static str },
}

impl SimConfig {
    /// Checks what the types cannot.
    ///
    /// # Errors
    /// Names the field and the remedy.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let sizes = [
            ("block_size", self.block_size),
            ("max_running", self.max_running),
            ("step_tokens", self.step_tokens),
            ("default_output", self.default_output),
        ];
        for (field, value) in sizes {
            if value == 0 {
                return Err(ConfigError::Zero { field });
            }
        }
        if self.prefill_tps <= 0.0 {
            return Err(ConfigError::Zero { field: "prefill_tps" });
        }
        self.validate_kind()?;
        let ranks = self.data_parallel_size;
        if !(1..=RANKS_MAX).contains(&ranks) {
            return Err(ConfigError::Ranks { ranks });
        }
        let (events, replay) = (self.events_port, self.replay_port);
        if events > 0 && replay > 0 && usize::from(events.abs_diff(replay)) < ranks {
            return Err(ConfigError::PortsOverlap { events, replay, ranks });
        }
        let usable = self.blocks.saturating_sub(1);
        if usable * self.block_size < self.max_model_len {
            let (max_model_len, block_size) = (self.max_model_len, self.block_size);
            return Err(ConfigError::PoolTooSmall { max_model_len, usable, block_size });
        }
        Ok(())
    }

    fn validate_kind(&self) -> Result<(), ConfigError> {
        let text = self.version();
        if Version::parse(text).is_none() {
            return Err(ConfigError::Version { text: text.to_owned() });
        }
        if self.engine_kind != EngineKind::Vllm {
            for (field, set) in [("lora", !self.loras.is_empty()), ("cpu_blocks", self.cpu_blocks > 0)] {
                if set {
                    return Err(ConfigError::VllmOnly { field });
                }
            }
        }
        Ok(())
    }

    /// The release that is played.
    pub fn version(&self) -> &str {
        self.engine_version.as_deref().unwrap_or(match self.engine_kind {
            EngineKind::Vllm => "0.32.0",
            EngineKind::Sglang => SGLANG_DEFAULT,
            EngineKind::Trtllm => "1.3.0",
        })
    }

    /// SGLang's rules at this release.
    pub fn rules(&self) -> Rules {
        let version = Version::parse(self.version()).or(Version::parse(SGLANG_DEFAULT));
        Rules::of(version.unwrap_or(Version(0, 5, 23)))
    }
}
