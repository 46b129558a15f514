//! Holds the balancer's predictions to what a real engine announced: `fovea-balancer explain` of every captured request against
//! `fovea-sidecar decode` of the captured events. `tests/vectors.sh` builds the programs and starts this. Captures without the bodies of
//! the requests are predicted from their expanded prompts ([`sglang`]) or held against each other ([`trtllm`]).

#[path = "vectors/sglang.rs"]
mod sglang;
#[path = "vectors/trtllm.rs"]
mod trtllm;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use anyhow::{Context, ensure};
use clap::Parser;
use e2e::bin_dir;
use e2e::capture::{self, Engine, Record};
use serde_json::{Value, json};

#[derive(Parser)]
struct Args {
    /// Folder of capture files. SGLang: of one version, or of a folder per version.
    dir: PathBuf,
    /// Folder that gives model, engines.json, images and earlier records; TensorRT-LLM: config.json.
    #[arg(long)]
    base: PathBuf,
    #[arg(long, default_value = "vllm")]
    engine: String,
}

#[derive(Default)]
struct Tally {
    exact: u64,
    supported: u64,
    unsupported: BTreeMap<&'static str, u64>,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let mut tally = Tally::default();
    match args.engine.as_str() {
        "sglang" => sglang::check(&args, &mut tally)?,
        "trtllm" => trtllm::check(&args, &mut tally)?,
        _ => check_runs(&args, &mut tally)?,
    }
    println!("{}", json!({"exact": tally.exact, "supported": tally.supported, "unsupported": tally.unsupported}));
    ensure!(tally.supported > 0, "no supported request in {}: nothing was compared", args.dir.display());
    ensure!(
        tally.exact == tally.supported,
        "{} of {} supported requests differ",
        tally.supported - tally.exact,
        tally.supported
    );
    Ok(())
}

/// Captures in the format of tests/vectors/vllm/README.md.
fn check_runs(args: &Args, tally: &mut Tally) -> anyhow::Result<()> {
    let runs = capture::load(&args.dir, &args.base)?;
    let engines = capture::engines(&args.base)?;
    let golden = args.base.join("golden_sequence_hashes.json");
    let golden: HashMap<String, Vec<String>> =
        if golden.exists() { serde_json::from_str(&std::fs::read_to_string(golden)?)? } else { HashMap::new() };
    for (run, records) in &runs {
        let engine = engines.get(run).cloned().unwrap_or_default();
        check_run(args, records, &engine, &golden, tally)?;
    }
    Ok(())
}

fn check_run(
    args: &Args,
    records: &[Record],
    engine: &Engine,
    golden: &HashMap<String, Vec<String>>,
    tally: &mut Tally,
) -> anyhow::Result<()> {
    let model_dir = args.base.join(engine.engine_model.trim_start_matches("./"));
    let block_size = capture::block_size(records).unwrap_or(32);
    let decoded = decode(args, records, &model_dir)?;
    let (mut stored, mut uuids) = (HashSet::new(), HashMap::new());
    for record in records {
        let seen = decoded.get(&record.name).with_context(|| format!("decode gave no line for {}", record.name))?;
        stored.extend(seen["stored"].as_array().into_iter().flatten().filter_map(Value::as_str).map(str::to_owned));
        for (body, status, prompt_tokens) in &record.requests {
            let reason = unsupported(&record.path, body, &mut uuids);
            if !record.wanted || *status != 200 || !is_inference(&record.path) {
                continue;
            }
            if let Some(reason) = reason {
                *tally.unsupported.entry(reason).or_default() += 1;
                continue;
            }
            let explained = explain(args, &record.path, body, engine, block_size, &model_dir)?;
            if has_options(body) && explained["view"] != "exact" {
                *tally.unsupported.entry("request processor kwargs").or_default() += 1;
                continue;
            }
            tally.supported += 1;
            match compare(&explained, &stored, *prompt_tokens, block_size, golden.get(&record.name)) {
                Ok(()) => tally.exact += 1,
                Err(why) => eprintln!("differs: {}: {why}; notes {}", record.name, explained["notes"]),
            }
        }
    }
    Ok(())
}

/// Options whose effect may be unknown.
fn has_options(body: &Value) -> bool {
    ["mm_processor_kwargs", "media_io_kwargs"].iter().any(|key| body[key].is_object())
}

fn is_inference(path: &str) -> bool {
    matches!(
        path,
        "/v1/chat/completions" | "/v1/completions" | "/inference/v1/generate" | "/v1/messages" | "/v1/responses"
    )
}

/// Why a request cannot be predicted; also remembers which bytes each uuid stood for.
fn unsupported(path: &str, body: &Value, uuids: &mut HashMap<String, String>) -> Option<&'static str> {
    match path {
        "/inference/v1/generate" => return Some("generate"),
        "/v1/messages" => return Some("messages"),
        "/v1/responses" => return Some("responses"),
        _ => {}
    }
    if !body["prompt_embeds"].is_null() {
        return Some("embeddings");
    }
    let parts = body["messages"].as_array().into_iter().flatten().filter_map(|m| m["content"].as_array()).flatten();
    let mut reason = None;
    for part in parts {
        match part["type"].as_str() {
            Some("image_embeds" | "prompt_embeds") => reason = Some("embeddings"),
            Some("image_url") if part["image_url"].is_null() => reason = Some("null images"),
            Some("image_url") => {
                let url = part["image_url"]["url"].as_str().or(part["image_url"].as_str()).unwrap_or_default();
                if let Some(uuid) = part["uuid"].as_str()
                    && uuids.entry(uuid.to_owned()).or_insert_with(|| url.to_owned()) != url
                {
                    reason = reason.or(Some("one uuid reused for other bytes"));
                }
            }
            _ => {}
        }
    }
    reason
}

fn compare(
    explained: &Value,
    stored: &HashSet<String>,
    prompt_tokens: Option<u64>,
    block_size: u64,
    golden: Option<&Vec<String>>,
) -> Result<(), String> {
    let list = |key: &str| explained[key].as_array().cloned().unwrap_or_default();
    let hashes: Vec<String> = list("sequence_hashes").iter().filter_map(|h| h.as_str().map(str::to_owned)).collect();
    let predicted = explained["prompt_tokens"].as_u64();
    if explained["view"] != "exact" {
        return Err(format!("view {}", explained["view"]));
    }
    if prompt_tokens.is_some() && predicted != prompt_tokens {
        return Err(format!("{predicted:?} prompt tokens predicted, {prompt_tokens:?} counted by the engine"));
    }
    // A list of prompts is as many engine requests: full blocks count in each.
    let prompts: Vec<u64> = list("prompts").iter().filter_map(Value::as_u64).collect();
    let prompts = if prompts.is_empty() { vec![predicted.unwrap_or_default()] } else { prompts };
    let blocks: u64 = prompts.iter().map(|tokens| tokens / block_size).sum();
    if hashes.len() as u64 != blocks {
        return Err(format!("{} hashes for {blocks} full blocks", hashes.len()));
    }
    if let Some(position) = hashes.iter().position(|hash| !stored.contains(hash)) {
        return Err(format!("block {position} of {} was never stored", hashes.len()));
    }
    match golden {
        Some(golden) if *golden != hashes => Err("not the golden hashes".to_owned()),
        _ => Ok(()),
    }
}

fn explain(
    args: &Args,
    path: &str,
    body: &Value,
    engine: &Engine,
    block_size: u64,
    model_dir: &Path,
) -> anyhow::Result<Value> {
    let mut command = Command::new(bin_dir()?.join("fovea-balancer"));
    command.args([
        "explain",
        "--client-uuid",
        "keep",
        "--path",
        path,
        "--engine",
        &args.engine,
        "--engine-model",
        &engine.engine_model,
    ]);
    command
        .args(["--block-size", &block_size.to_string()])
        .arg("--model-dir")
        .arg(model_dir)
        .arg("--media-root")
        .arg(args.base.join("images"));
    if let Some(lora) = body["model"].as_str().filter(|model| engine.loras.iter().any(|lora| lora == model)) {
        command.args(["--lora", lora]);
    }
    let output = feed(command, &body.to_string())?;
    serde_json::from_slice(&output).context("explain prints one JSON object")
}

fn decode(args: &Args, records: &[Record], model_dir: &Path) -> anyhow::Result<HashMap<String, Value>> {
    let capture: String = records.iter().map(|record| record.line.clone() + "\n").collect();
    let named = |line: Value| Ok((line["name"].as_str().context("a line has a name")?.to_owned(), line));
    decode_file(args, model_dir, &capture)?.into_iter().map(named).collect()
}

/// The lines that `fovea-sidecar decode` gives for the text of a capture, in its order.
fn decode_file(args: &Args, model_dir: &Path, text: &str) -> anyhow::Result<Vec<Value>> {
    let mut command = Command::new(bin_dir()?.join("fovea-sidecar"));
    command.args(["decode", "--engine", &args.engine, "--model-dir"]).arg(model_dir);
    let output = String::from_utf8(feed(command, text)?)?;
    output.lines().map(|line| Ok(serde_json::from_str(line)?)).collect()
}

/// Runs a command with `input` and gives its stdout.
fn feed(mut command: Command, input: &str) -> anyhow::Result<Vec<u8>> {
    let mut child = command
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("{command:?}"))?;
    let mut stdin = child.stdin.take().context("stdin is piped")?;
    let input = input.to_owned();
    let writer = std::thread::spawn(move || stdin.write_all(input.as_bytes()));
    let output = child.wait_with_output()?;
    // A program that ends early closes the pipe; its exit status says why.
    let _ = writer.join();
    ensure!(output.status.success(), "{command:?}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr));
    Ok(output.stdout)
}
