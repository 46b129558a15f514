//! `fovea-balancer estimate`: what llm-d's estimator makes of one request, without any engine.
//!
//! Request body on stdin, one JSON object on stdout, notes on stderr. Stable: tests and users' scripts read it. The numbers are those of
//! llm-d-router ebab68792, except that no count is above [`TOKENS_MAX`] and that `audio_url` parts are told apart.

mod approximate;
mod body;
mod go_json;
mod stream;

use std::io::{Read as _, Write as _};
use std::path::PathBuf;

use anyhow::Context as _;
use clap::Parser;
use fovea_media::estimate::{TOKENS_MAX, VideoHints};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::config::estimate::read;
pub use approximate::{BLOCK_TOKENS, approximate};
pub use body::{Api, BodyError, Flat, Rules, flatten};
pub use stream::{Asset, Stream, chain};

/// Longest request that is read, in bytes.
const BODY_MAX: u64 = 256 << 20;
/// llm-d's `maxPrefixTokensToMatch`: what lies behind is not hashed.
const PREFIX_TOKENS_MAX: usize = 131_072;
/// llm-d raises every smaller block size to this.
const BLOCK_TOKENS_MIN: usize = 64;

#[derive(Debug, Parser)]
#[command(about = "Estimate media tokens and block hashes of the request on stdin, as llm-d does")]
pub struct Args {
    /// `balancer.yaml`, for its `estimate` section, or an `EndpointPickerConfig` of llm-d. Default: llm-d's defaults.
    #[arg(long)]
    pub config: Option<PathBuf>,
    /// Header of the request, `name=value`; `x-llm-d-video-*` are read. May be given several times.
    #[arg(long, value_parser = header)]
    pub header: Vec<(String, String)>,
    /// What the request is for.
    #[arg(long, value_enum, default_value = "chat")]
    pub api: Api,
    /// Tokens of a block; less than 64 counts as 64, as in llm-d.
    #[arg(long, default_value_t = BLOCK_TOKENS_MIN)]
    pub block_size: usize,
    /// Model name that enters the hashes. Default: `model` of the request.
    #[arg(long)]
    pub model: Option<String>,
    /// Cache salt that enters the hashes. Default: `cache_salt` of the request.
    #[arg(long)]
    pub cache_salt: Option<String>,
}

fn header(text: &str) -> Result<(String, String), String> {
    let (name, value) = text.split_once('=').ok_or("write it as name=value")?;
    Ok((name.trim().to_ascii_lowercase(), value.to_owned()))
}

/// What of a body enters its hashes besides the prompt.
#[derive(Default, Deserialize)]
struct Names {
    model: Option<String>,
    cache_salt: Option<String>,
}

/// Reads stdin, estimates, prints.
///
/// # Errors
/// A config that cannot be used, or a body that llm-d would not take.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let estimate = args.config.as_ref().map_or_else(|| Ok(Default::default()), read)?;
    let mut body = String::new();
    std::io::stdin().lock().take(BODY_MAX).read_to_string(&mut body).context("request body")?;
    let names: Names = serde_json::from_str(&body).context("request body")?;
    let videos = VideoHints::read(|name| {
        let header = args.header.iter().find(|(header, _)| header == name);
        header.map(|(_, value)| value.as_str())
    });
    let rules = Rules { estimate: &estimate, videos, tokens_max: PREFIX_TOKENS_MAX };
    let flat = flatten(args.api, &body, rules)?;
    let model = args.model.clone().or(names.model).unwrap_or_default();
    let salt = args.cache_salt.clone().or(names.cache_salt).unwrap_or_default();
    let sheet = sheet(&flat, &model, &salt, args.block_size.max(BLOCK_TOKENS_MIN));
    for note in sheet["notes"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        writeln!(std::io::stderr(), "{note}")?;
    }
    writeln!(std::io::stdout(), "{sheet}")?;
    Ok(())
}

fn sheet(flat: &Flat, model: &str, salt: &str, block_tokens: usize) -> Value {
    let assets = || flat.prompts.iter().flat_map(|prompt| &prompt.assets);
    let hashes = |prompt: &Stream| chain(model, salt, prompt.bytes(), block_tokens, PREFIX_TOKENS_MAX / block_tokens);
    let prompts = flat.prompts.iter().filter(|_| flat.whole);
    let hashes: Vec<_> = prompts.flat_map(hashes).map(|hash| hash.to_string()).collect();
    let media = assets().map(|asset| {
        json!({"modality": asset.modality, "hash": format!("{:x}", asset.hash), "offset": asset.offset, "length": asset.tokens})
    });
    let mut notes: Vec<_> = flat.notes.iter().map(ToString::to_string).collect();
    if assets().any(|asset| asset.tokens == TOKENS_MAX) {
        notes.push(format!(
            "a media item is counted for {TOKENS_MAX} tokens, the most that one can have here; llm-d has no limit"
        ));
    }
    json!({
        "tokens_per_media": assets().map(|asset| asset.tokens).collect::<Vec<_>>(), "block_hashes": hashes,
        "prompt_tokens": flat.prompts.iter().map(Stream::tokens).collect::<Vec<_>>(), "media": media.collect::<Vec<_>>(), "notes": notes,
    })
}
