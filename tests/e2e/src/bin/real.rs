//! Real engines behind sidecars and a balancer: is what was predicted what the engine reused? `tests/real_vllm.sh` starts the engines and this.
//!
//! Each standard request (the captured ones that need nothing special) goes through the balancer twice, one after another.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, ensure};
use clap::Parser;
use e2e::capture::{self, Record};
use e2e::client::Answer;
use e2e::{Fleet, FleetConfig, Mode};
use serde_json::{Value, json};

/// Readings of the balancer's block counts that must agree, 10 ms apart, before nothing more is expected from the engines.
const QUIET_READINGS: u32 = 40;

#[derive(Parser)]
struct Args {
    /// Base URLs of running engines.
    #[arg(required = true)]
    engines: Vec<String>,
    /// Folder of captures whose requests are sent.
    #[arg(long)]
    vectors: PathBuf,
    /// Model directory for the balancer.
    #[arg(long)]
    model_dir: PathBuf,
}

#[derive(Default)]
struct Tally {
    sent: u64,
    exact: u64,
    repeats: u64,
    same_worker: u64,
    reused_tokens: u64,
}

#[tokio::main]
async fn main() -> anyhow::Result<()> {
    let args = Args::parse();
    let mut config = FleetConfig::tiny(0, Mode::Precise);
    config.model_dir.clone_from(&args.model_dir);
    let mut fleet = Fleet::without_workers(config).await?;
    fleet.attach(&args.engines).await?;
    let mut tally = Tally::default();
    for (name, path, body) in standard_requests(&args.vectors)? {
        let url = format!("{}{path}", fleet.url()?);
        let first = send(&fleet, &url, &body, &name, &mut tally).await?;
        let second = send(&fleet, &url, &body, &name, &mut tally).await?;
        tally.repeats += 1;
        // Without a full block there is nothing to return to.
        let no_block = second.header("x-fovea-overlap").starts_with("0/");
        if no_block || first.header("x-fovea-worker") == second.header("x-fovea-worker") {
            tally.same_worker += 1;
        } else {
            eprintln!("{name}: the repeat went to another worker");
        }
    }
    let verdicts = fleet.judged(tally.sent).await?;
    println!(
        "{}",
        json!({"requests": tally.sent, "exact": tally.exact, "repeats": tally.repeats, "same_worker": tally.same_worker,
            "reused_tokens": tally.reused_tokens, "verdicts": verdicts})
    );
    ensure!(verdicts.keys().all(|verdict| !verdict.starts_with("diverged")), "the closed loop found divergences");
    ensure!(tally.exact == tally.sent && tally.same_worker == tally.repeats, "predictions differ: see above");
    Ok(())
}

/// Sends one request and compares the engine's `cached_tokens` with the prediction in the response headers.
async fn send(fleet: &Fleet, url: &str, body: &Value, name: &str, tally: &mut Tally) -> anyhow::Result<Answer> {
    quiet(fleet).await?;
    let answer = fleet.client.post(url, body.to_string()).await?;
    ensure!(answer.status.is_success(), "{name}: {} {:?}", answer.status, answer.body);
    let usage = &answer.json()?["usage"];
    let (prompt, cached) =
        (&usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap_or_default());
    let prompt = prompt.as_u64().with_context(|| format!("{name}: no usage"))?;
    let overlap = answer.header("x-fovea-overlap").to_owned();
    let held: u64 = overlap
        .split('/')
        .next()
        .unwrap_or_default()
        .parse()
        .with_context(|| format!("{name}: x-fovea-overlap {overlap:?}"))?;
    let block = 32;
    let predicted = held.min(prompt.saturating_sub(1) / block) * block;
    tally.sent += 1;
    tally.reused_tokens += cached;
    if answer.header("x-fovea-view") == "exact" && predicted == cached {
        tally.exact += 1;
    } else {
        eprintln!("{name}: view {}, predicted {predicted}, cached {cached} of {prompt}", answer.header("x-fovea-view"));
    }
    Ok(answer)
}

/// Waits until the balancer's block counts stay as they are.
async fn quiet(fleet: &Fleet) -> anyhow::Result<()> {
    let mut last = (0, 0);
    for _ in 0..1000 {
        let entries = fleet.index_entries().await?;
        last = if entries == last.0 { (entries, last.1 + 1) } else { (entries, 0) };
        if last.1 >= QUIET_READINGS {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    anyhow::bail!("the engines never come to rest")
}

/// (name, path, body) of the captured requests that any engine of the same flags serves alike.
fn standard_requests(vectors: &Path) -> anyhow::Result<Vec<(String, String, Value)>> {
    let runs = capture::load(vectors, vectors)?;
    let records = runs.get("main").context("the captures have a run `main`")?;
    let usable = |record: &&Record| matches!(record.path.as_str(), "/v1/chat/completions" | "/v1/completions");
    let mut requests = Vec::new();
    for record in records.iter().filter(usable) {
        for (body, status, _) in &record.requests {
            let text = body.to_string();
            let special = [
                "\"uuid\"",
                "_embeds",
                "_kwargs",
                "http://",
                "\"prompt\":[\"",
                "null",
                "vllm_xargs",
                "\"stream\":true",
                "\"n\":",
            ];
            if *status == 200 && !special.iter().any(|word| text.contains(word)) {
                requests.push((record.name.clone(), record.path.clone(), body.clone()));
            }
        }
    }
    ensure!(!requests.is_empty(), "no usable request in {}", vectors.display());
    Ok(requests)
}
