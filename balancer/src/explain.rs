//! `fovea-balancer explain`: what this balancer predicts for one request, without any engine.
//!
//! Request body on stdin, one JSON object on stdout, notes also on stderr. Stable: tests and users' scripts read it.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};

use anyhow::Context;
use clap::{Parser, ValueEnum};
use fovea_gossip::message::{EngineFacts, EngineKind, HashScheme, LearntValue};
use fovea_kv::{BlockSize, MediaId, MediaKey};
use serde_json::{Value, json};

use crate::fetch_check::{media_config, with_fetcher};
use crate::prepare::{ApiPath, ClientUuid, LearntMedia, MediaSource, Prepared, Preparer, Request, Target, ViewKind};

/// Longest request that is read, in bytes.
const BODY_MAX: u64 = 256 << 20;

#[derive(Debug, Parser)]
#[command(about = "Predict tokens, images and block hashes of the request on stdin")]
pub struct Args {
    /// Folder with the model's config.json, tokenizer.json, chat template and preprocessor_config.json.
    #[arg(long)]
    pub model_dir: PathBuf,
    /// Whose rules to follow.
    #[arg(long, value_enum, default_value = "vllm")]
    pub engine: Engine,
    /// Version of the engine: what its events tell depends on it. Default: a new one.
    #[arg(long, default_value = "")]
    pub engine_version: String,
    /// Engine with EAGLE: it caches pairs of tokens (SGLang).
    #[arg(long)]
    pub pairs: bool,
    /// File of what engines were seen to use for media, one JSON object a line: `{"key":HEX,"tokens":N,"pads":[…]}`, or `"id":HEX` in
    /// place of pads. Keys are those of `slots` in the output.
    #[arg(long)]
    pub learnt: Option<PathBuf>,
    /// Predict videos by a rule that no engine was seen to follow.
    #[arg(long)]
    pub unmeasured_videos: bool,
    /// Tokens per KV block.
    #[arg(long)]
    pub block_size: u32,
    /// Model string that the engine was started with; it enters image identities. Default: the model folder as given.
    #[arg(long)]
    pub engine_model: Option<String>,
    /// LoRA adapter that the request asks for by its model name.
    #[arg(long)]
    pub lora: Option<String>,
    /// End point the request is meant for.
    #[arg(long, value_parser = api_path, default_value = "/v1/chat/completions")]
    pub path: ApiPath,
    /// What becomes of uuids in the request.
    #[arg(long, value_enum, default_value = "replace")]
    pub client_uuid: Uuid,
    /// Folder whose files stand in for http(s) images with the same last path segment.
    #[arg(long)]
    pub media_root: Option<PathBuf>,
    /// Fetch http(s) images, as `fetch-check` does.
    #[arg(long, conflicts_with = "media_root")]
    pub fetch: bool,
    /// `balancer.yaml`, for its `media` section.
    #[arg(long, requires = "fetch")]
    pub config: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Engine {
    Vllm,
    Sglang,
    Trtllm,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
pub enum Uuid {
    Replace,
    Keep,
}

fn api_path(text: &str) -> Result<ApiPath, String> {
    ApiPath::parse(text)
        .ok_or_else(|| format!("`{text}` is not predicted: use /v1/chat/completions or /v1/completions"))
}

/// Reads stdin, predicts, prints.
///
/// # Errors
/// A model folder that cannot be loaded, or a request that no engine would take.
pub fn run(args: &Args) -> anyhow::Result<()> {
    let block_size =
        BlockSize::new(args.block_size).context("--block-size is 0: give the engine's tokens per block")?;
    let uuid = match args.client_uuid {
        Uuid::Replace => ClientUuid::Replace,
        Uuid::Keep => ClientUuid::Keep,
    };
    let mut body = Vec::new();
    std::io::stdin().lock().take(BODY_MAX).read_to_end(&mut body)?;
    let engine = facts(args);
    let request = Request::parse(args.path, &body)?;
    let (preparer, media) = (Preparer::load(&args.model_dir, uuid)?, source(args, &request)?);
    let lora = args.lora.as_deref().unwrap_or_default();
    let learnt = args.learnt.as_deref().map_or_else(|| Ok(HashMap::new()), read_learnt)?;
    let target = Target {
        engine: &engine,
        block_size,
        lora,
        media: &media,
        pixels_max: u64::MAX,
        learnt: &learnt,
        media_trusted: true,
        unmeasured_videos: args.unmeasured_videos,
        isolation: None,
        encoder: None,
    };
    let prepared = preparer.prepare(&request, target);
    let output = sheet(&prepared, args.block_size);
    for note in output["notes"].as_array().into_iter().flatten().filter_map(Value::as_str) {
        writeln!(std::io::stderr(), "{note}")?;
    }
    writeln!(std::io::stdout(), "{output}")?;
    Ok(())
}

fn source(args: &Args, request: &Request<'_>) -> anyhow::Result<MediaSource> {
    if !args.fetch {
        return Ok(args.media_root.clone().map_or(MediaSource::EngineOnly, MediaSource::Folder));
    }
    let (config, urls) = (media_config(args.config.as_ref())?, request.media_urls(true));
    let urls: Vec<_> = urls.into_iter().map(|(place, _, url)| (place, url)).collect();
    let files = with_fetcher(&config, async |fetcher| fetcher.fetch_parts(&urls).await)?;
    let files = urls.iter().zip(files).map(|((_, url), file)| {
        ((*url).to_owned(), file.map(|file| file.bytes).map_err(|refused| refused.error.reason()))
    });
    Ok(MediaSource::Fetched { files: files.collect(), inline: false })
}

fn facts(args: &Args) -> EngineFacts {
    let kind = match args.engine {
        Engine::Vllm => EngineKind::Vllm,
        Engine::Sglang => EngineKind::Sglang,
        Engine::Trtllm => EngineKind::TrtLlm,
    };
    EngineFacts {
        kind,
        version: args.engine_version.clone(),
        engine_model: args.engine_model.clone().unwrap_or_else(|| args.model_dir.display().to_string()),
        served_names: Vec::new(),
        lora_names: args.lora.clone().into_iter().collect(),
        max_model_len: 0,
        exif: kind == EngineKind::Vllm,
        hash_scheme: if args.pairs { HashScheme::Fovea1Pairs } else { HashScheme::Fovea1 },
        hybrid: false,
    }
}

fn read_learnt(path: &Path) -> anyhow::Result<HashMap<MediaKey, LearntMedia>> {
    let text = std::fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines.map(|(at, line)| fact(line).with_context(|| format!("{} line {}", path.display(), at + 1))).collect()
}

fn fact(line: &str) -> anyhow::Result<(MediaKey, LearntMedia)> {
    let fact: Value = serde_json::from_str(line)?;
    let hex = |name: &str| fact[name].as_str().and_then(MediaId::from_hex);
    let number = |value: &Value| value.as_u64().and_then(|number| u32::try_from(number).ok());
    let key = hex("key").context("`key` is not 64 lower-case hex digits")?;
    let value = match &fact["pads"] {
        Value::Null => LearntValue::Id(hex("id").context("neither `pads` nor an `id` of 64 lower-case hex digits")?),
        pads => {
            let pads = pads.as_array().and_then(|pads| pads.iter().map(number).collect::<Option<Vec<_>>>());
            let pads = pads.filter(|pads| matches!(pads.len(), 1 | 4));
            LearntValue::Pads(pads.context("`pads` are not 1 or 4 tokens of 32 bits")?)
        }
    };
    let tokens = number(&fact["tokens"]).context("`tokens` is not a number of positions")?;
    Ok((MediaKey(key.0), LearntMedia { tokens, value }))
}

fn sheet(prepared: &Prepared, block_size: u32) -> Value {
    let (view, notes) = match &prepared.view {
        ViewKind::Exact => ("exact", Vec::new()),
        ViewKind::Learnt => ("exact", vec!["media as an engine was seen to use it".to_owned()]),
        ViewKind::Rendered => ("exact", vec!["media as an engine's renderer showed it".to_owned()]),
        ViewKind::Prefix { reason } => {
            ("prefix", vec![format!("the view ends before the first unknown item: {reason}")])
        }
        ViewKind::None { reason } => ("none", vec![format!("nothing can be predicted: {reason}")]),
    };
    let media = prepared.media.iter().enumerate().map(|(index, item)| {
        json!({
            "index": index, "kind": format!("{:?}", item.kind).to_lowercase(), "id": item.id.map(|id| id.to_string()), "width": item.width, "height": item.height,
            "tokens": item.tokens, "start": item.start,
        })
    });
    let hashes: Vec<_> = prepared.hashes.iter().map(ToString::to_string).collect();
    let slots =
        prepared.preamble.slots.iter().map(
            |slot| json!({"start": slot.start, "len": slot.len, "key": slot.key.to_string(), "known": slot.known}),
        );
    let mut sheet = json!({
        "view": view, "prompt_tokens": prepared.prompt_tokens, "block_size": block_size, "media": media.collect::<Vec<_>>(),
        "slots": slots.collect::<Vec<_>>(), "sequence_hashes": hashes, "notes": notes,
    });
    if !prepared.prompts.is_empty() {
        sheet["prompts"] = json!(prepared.prompts);
    }
    sheet
}
