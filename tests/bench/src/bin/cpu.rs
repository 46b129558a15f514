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
    let turn8 = last_turn(&fleet, 150).await?;
    println!(
        "{}",
        json!({
            "turn8_us": turn8, "turn8_over_words400": round(turn8 as f64 / words400.max(1) as f64),
            "words400_us": words400, "words4000_us": words4000, "image640k_us": image,
            "balancer_rss_mb": balancer_rss, "sidecar_rss_mb": sidecar_rss,
        })
    );
    Ok(())
}

/// CPU µs of the balancer per request, over `count` requests made by `parts`.
async fn measure(fleet: &Fleet, count: u64, parts: impl Fn(u64) -> Vec<Value>) -> anyhow::Result<u64> {
    let body = |i: u64| request(&[json!({"role": "user", "content": parts(i)})]);
    send(fleet, (0..5).map(|i| body((1 << 40) + i))).await?;
    let bodies: Vec<String> = (0..count).map(body).collect();
    let before = cpu_micros(&fleet.balancer)?;
    send(fleet, bodies).await?;
    Ok(cpu_micros(&fleet.balancer)?.saturating_sub(before) / count)
}

/// CPU µs of the balancer for the eighth turn of a conversation whose seven others it has seen: 400 words a turn, answers of 50.
async fn last_turn(fleet: &Fleet, conversations: u64) -> anyhow::Result<u64> {
    let turn = |conversation: u64, turns: u64| {
        let messages = (0..2 * turns - 1).map(|i| {
            let (role, count) = if i % 2 == 0 { ("user", 400) } else { ("assistant", 50) };
            json!({"role": role, "content": words((conversation << 8) + i + (1 << 41), count)})
        });
        request(&messages.collect::<Vec<_>>())
    };
    for turns in 1..8 {
        send(fleet, (0..conversations).map(|conversation| turn(conversation, turns))).await?;
    }
    let last: Vec<String> = (0..conversations).map(|conversation| turn(conversation, 8)).collect();
    let before = cpu_micros(&fleet.balancer)?;
    send(fleet, last).await?;
    Ok(cpu_micros(&fleet.balancer)?.saturating_sub(before) / conversations)
}

fn request(messages: &[Value]) -> String {
    json!({"model": "tiny-vl", "max_tokens": 1, "messages": messages}).to_string()
}

async fn send(fleet: &Fleet, bodies: impl IntoIterator<Item = String>) -> anyhow::Result<()> {
    let url = fleet.chat_url()?;
    for body in bodies {
        let answer = fleet.client.post(&url, body).await?;
        ensure!(answer.status.is_success(), "{}: {:?}", answer.status, answer.body);
        ensure!(answer.header("x-fovea-view") == "exact", "the view is {:?}", answer.header("x-fovea-view"));
    }
    Ok(())
}

/// Two decimals.
fn round(ratio: f64) -> f64 {
    (ratio * 100.0).round() / 100.0
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

/// CPU time of all threads: nanoseconds of each where the kernel keeps them, else ticks of 10 ms.
fn cpu_micros(program: &Program) -> anyhow::Result<u64> {
    let pid = program.pid().context("the program has ended")?;
    let mut nanos = 0;
    for task in std::fs::read_dir(format!("/proc/{pid}/task"))? {
        // A thread may end meanwhile.
        let text = std::fs::read_to_string(task?.path().join("schedstat")).unwrap_or_default();
        nanos += text.split_whitespace().next().and_then(|time| time.parse::<u64>().ok()).unwrap_or(0);
    }
    Ok(if nanos > 0 { nanos / 1000 } else { cpu_ticks(program)? * (1_000_000 / TICKS) })
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
