//! Settings of one simulated engine; the command line of the program and the argument of [`crate::Sim::start`].

use crate::events::HashForm;
use crate::hash::Algorithm;
use clap::Parser;
use std::path::PathBuf;

/// A vLLM-shaped engine without a model: real block accounting and KV events, made-up text.
#[derive(Parser, Clone, Debug)]
#[command(name = "engine-sim", version)]
pub struct SimConfig {
    /// Address to bind.
    #[arg(long, default_value = "127.0.0.1")]
    pub host: String,
    /// HTTP port; 0 = chosen by the system.
    #[arg(long, default_value_t = 0)]
    pub port: u16,
    /// ZMQ PUB port; 0 = chosen by the system.
    #[arg(long, default_value_t = 0)]
    pub events_port: u16,
    /// ZMQ ROUTER port for replay; 0 = chosen by the system.
    #[arg(long, default_value_t = 0)]
    pub replay_port: u16,
    /// Folder with tokenizer.json, chat_template.json, preprocessor_config.json, config.json.
    #[arg(long, default_value = "tests/vectors/vllm/tiny-qwen3-vl")]
    pub model_dir: PathBuf,
    /// Served name.
    #[arg(long, default_value = "tiny-vl")]
    pub model_name: String,
    /// The model string given to `vllm serve`: `root` in /v1/models, and part of default image identities.
    #[arg(long, default_value = "./tiny-qwen3-vl")]
    pub engine_model: String,
    /// LoRA adapter, NAME=PATH; may be repeated.
    #[arg(long = "lora", value_parser = name_and_path)]
    pub loras: Vec<(String, String)>,
    /// Tokens per KV block.
    #[arg(long, default_value_t = 16)]
    pub block_size: usize,
    /// Blocks in the pool, the null block included.
    #[arg(long, default_value_t = 1024)]
    pub blocks: usize,
    /// Blocks of a CPU tier that evicted blocks go to; 0 = none.
    #[arg(long, default_value_t = 0)]
    pub cpu_blocks: usize,
    /// Longest prompt plus answer, in tokens.
    #[arg(long, default_value_t = 4096)]
    pub max_model_len: usize,
    /// Images allowed in one prompt.
    #[arg(long, default_value_t = 8)]
    pub max_images: usize,
    /// Block hash algorithm.
    #[arg(long, value_enum, default_value = "sha256_cbor")]
    pub hash_algo: Algorithm,
    /// How events carry hashes.
    #[arg(long, value_enum, default_value = "int")]
    pub hash_form: HashForm,
    /// Topic of events; default `kv@HOST:PORT@MODEL_NAME`.
    #[arg(long)]
    pub topic: Option<String>,
    /// Batches kept for replay.
    #[arg(long, default_value_t = 10_000)]
    pub buffer_steps: usize,
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
        let usable = self.blocks.saturating_sub(1);
        if usable * self.block_size < self.max_model_len {
            let (max_model_len, block_size) = (self.max_model_len, self.block_size);
            return Err(ConfigError::PoolTooSmall { max_model_len, usable, block_size });
        }
        Ok(())
    }
}
