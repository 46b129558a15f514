//! CPU time of the balancer per request, and resident memory. `tests/bench.sh cpu` builds everything and starts this.
//!
//! Requests go one after another over one connection; CPU time is what the kernel booked on the process (user + system), so waiting
//! and neighbours do not count. Every request is new: no tokenizer cache and no image memo helps.

use std::path::{Path, PathBuf};

use anyhow::{Context, ensure};
use clap::Parser;
use e2e::workload::{data_url, image_part, noise_png, text_part, words};
use e2e::{Fleet, FleetConfig, Mode, Program, tiny_model};
use serde_json::{Value, json};

/// Clock ticks per second of /proc/PID/stat on Linux.
const TICKS: u64 = 100;

#[derive(Parser)]
struct Args {
    /// tokenizer.json of a Qwen model.
    #[arg(long)]
    tokenizer: PathBuf,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let tiny = Fleet::start(FleetConfig::tiny(1, Mode::Precise)).await?;
    let (balancer_rss, sidecar_rss) = (resident_mb(&tiny.balancer)?, resident_mb(&tiny.sidecars[0])?);
    drop(tiny);
    let model = tempfile::tempdir()?;
    write_model(&args.tokenizer, model.path())?;
    let mut config = FleetConfig::tiny(1, Mode::Precise);
    config.model_dir = model.path().to_owned();
    config.engine_args.extend(["--max-model-len".to_owned(), "32768".to_owned()]);
    let fleet = Fleet::start(config).await?;
    let text = |seed: u64, count: usize| vec![text_part(&words(seed, count))];
    let words400 = measure(&fleet, 400, |i| text(i, 400)).await?;
    let words4000 = measure(&fleet, 150, |i| text(1000 + i, 4000)).await?;
    // 400 × 400 RGB noise: 480 kB as PNG, 640 kB as base64.
    let image = measure(&fleet, 100, |i| {
        vec![image_part(&data_url("image/png", &noise_png(i, 400, 400))), text_part(&words(i, 20))]
    })
    .await?;
    println!(
        "{}",
        json!({
            "words400_us": words400, "words4000_us": words4000, "image640k_us": image,
            "balancer_rss_mb": balancer_rss, "sidecar_rss_mb": sidecar_rss,
        })
    );
    Ok(())
}

/// CPU µs of the balancer per request, over `count` requests made by `parts`.
async fn measure(fleet: &Fleet, count: u64, parts: impl Fn(u64) -> Vec<Value>) -> anyhow::Result<u64> {
    let url = fleet.chat_url()?;
    let body = |i: u64| {
        json!({"model": "tiny-vl", "max_tokens": 1, "messages": [{"role": "user", "content": parts(i)}]}).to_string()
    };
    for i in 0..5 {
        let answer = fleet.client.post(&url, body((1 << 40) + i)).await?;
        ensure!(answer.status.is_success(), "{}: {:?}", answer.status, answer.body);
        ensure!(answer.header("x-fovea-view") == "exact", "the view is {:?}", answer.header("x-fovea-view"));
    }
    let bodies: Vec<String> = (0..count).map(body).collect();
    let before = cpu_ticks(&fleet.balancer)?;
    for body in bodies {
        let answer = fleet.client.post(&url, body).await?;
        ensure!(answer.status.is_success(), "{}: {:?}", answer.status, answer.body);
    }
    let ticks = cpu_ticks(&fleet.balancer)? - before;
    Ok(ticks * (1_000_000 / TICKS) / count)
}

/// A Qwen3-VL model directory around a real tokenizer: the tiny model's template and image rules, the tokenizer's own ids.
fn write_model(tokenizer: &Path, dir: &Path) -> anyhow::Result<()> {
    let tokenizer_json: Value = serde_json::from_slice(&std::fs::read(tokenizer)?)?;
    let added = tokenizer_json["added_tokens"].as_array().context("tokenizer.json has added_tokens")?;
    let id = |text: &str| added.iter().find(|token| token["content"] == text).and_then(|token| token["id"].as_u64());
    let mut config: Value = serde_json::from_slice(&std::fs::read(tiny_model().join("config.json"))?)?;
    for (key, text) in [
        ("image_token_id", "<|image_pad|>"),
        ("video_token_id", "<|video_pad|>"),
        ("vision_start_token_id", "<|vision_start|>"),
        ("vision_end_token_id", "<|vision_end|>"),
    ] {
        config[key] = json!(id(text).with_context(|| format!("the tokenizer has {text}"))?);
    }
    std::fs::write(dir.join("config.json"), config.to_string())?;
    std::fs::copy(tokenizer, dir.join("tokenizer.json"))?;
    let beside = tokenizer.with_file_name("tokenizer_config.json");
    if beside.exists() {
        // The template of a text model would drop images: the tiny model's own is used.
        let mut settings: Value = serde_json::from_slice(&std::fs::read(beside)?)?;
        settings.as_object_mut().context("tokenizer_config.json is an object")?.remove("chat_template");
        std::fs::write(dir.join("tokenizer_config.json"), settings.to_string())?;
    }
    for name in ["chat_template.json", "preprocessor_config.json"] {
        std::fs::copy(tiny_model().join(name), dir.join(name))?;
    }
    Ok(())
}

fn proc_file(program: &Program, name: &str) -> anyhow::Result<String> {
    let pid = program.pid().context("the program has ended")?;
    Ok(std::fs::read_to_string(format!("/proc/{pid}/{name}"))?)
}

fn cpu_ticks(program: &Program) -> anyhow::Result<u64> {
    let stat = proc_file(program, "stat")?;
    // The name in brackets may hold spaces; user and system time are fields 14 and 15.
    let rest = stat.rsplit_once(')').context("stat has a name")?.1;
    let times = rest.split_whitespace().skip(11).take(2).map(str::parse::<u64>);
    Ok(times.collect::<Result<Vec<_>, _>>()?.iter().sum())
}

fn resident_mb(program: &Program) -> anyhow::Result<u64> {
    let status = proc_file(program, "status")?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).context("status has VmRSS")?;
    let kilobytes: u64 = line.trim().trim_end_matches("kB").trim().parse()?;
    Ok(kilobytes.div_ceil(1024))
}
