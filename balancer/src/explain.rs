//! `fovea-balancer explain`: what this balancer predicts for one request, without any engine.
//!
//! Request body on stdin, one JSON object on stdout, notes also on stderr. Stable: tests and users' scripts read it.

use std::io::{Read, Write};
use std::path::PathBuf;

use anyhow::Context;
use clap::{Parser, ValueEnum};
use fovea_gossip::message::{EngineFacts, EngineKind, HashScheme};
use fovea_kv::BlockSize;
use serde_json::{Value, json};

use crate::fetch_check::{media_config, with_fetcher};
use crate::prepare::{ApiPath, ClientUuid, MediaSource, Prepared, Preparer, Request, Target, ViewKind};

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
    let prepared =
        preparer.prepare(&request, Target { engine: &engine, block_size, lora, media: &media, pixels_max: u64::MAX });
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
    let (config, urls) = (media_config(args.config.as_ref())?, request.image_urls());
    let files = with_fetcher(&config, async |fetcher| fetcher.fetch_parts(&urls).await)?;
    let files = urls.iter().zip(files).map(|((_, url), file)| {
        ((*url).to_owned(), file.map(|file| file.bytes).map_err(|refused| refused.error.reason()))
    });
    Ok(MediaSource::Fetched { files: files.collect(), inline: false })
}

fn facts(args: &Args) -> EngineFacts {
    let Engine::Vllm = args.engine;
    EngineFacts {
        kind: EngineKind::Vllm,
        version: String::new(),
        engine_model: args.engine_model.clone().unwrap_or_else(|| args.model_dir.display().to_string()),
        served_names: Vec::new(),
        lora_names: args.lora.clone().into_iter().collect(),
        max_model_len: 0,
        exif: true,
        hash_scheme: HashScheme::Fovea1,
        hybrid: false,
    }
}

fn sheet(prepared: &Prepared, block_size: u32) -> Value {
    let (view, notes) = match &prepared.view {
        ViewKind::Exact => ("exact", Vec::new()),
        ViewKind::Prefix { reason } => {
            ("prefix", vec![format!("the view ends before the first unknown item: {reason}")])
        }
        ViewKind::None { reason } => ("none", vec![format!("nothing can be predicted: {reason}")]),
    };
    let media = prepared.media.iter().enumerate().map(|(index, item)| {
        json!({
            "index": index, "kind": "image", "id": item.id.to_string(), "width": item.width, "height": item.height,
            "tokens": item.tokens, "start": item.start,
        })
    });
    let hashes: Vec<_> = prepared.hashes.iter().map(ToString::to_string).collect();
    let mut sheet = json!({
        "view": view, "prompt_tokens": prepared.prompt_tokens, "block_size": block_size, "media": media.collect::<Vec<_>>(),
        "sequence_hashes": hashes, "notes": notes,
    });
    if !prepared.prompts.is_empty() {
        sheet["prompts"] = json!(prepared.prompts);
    }
    sheet
}
