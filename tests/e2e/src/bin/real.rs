//! Real engines behind sidecars and a balancer: is what was predicted what the engine reused? `tests/real_vllm.sh` and
//! `tests/real_sglang.sh` start the engines and this.
//!
//! Each standard request (the captured ones that need nothing special) goes through the balancer twice, one after another.
//! Where identities must be learnt first (SGLang), a first sight may end its view before the image: then no more than what is
//! reused may be promised, and the repeat must be exact.

use std::path::PathBuf;
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
    /// Tokens per block.
    #[arg(long, default_value_t = 32)]
    block: u64,
    /// Tokens per page of the engine, where a block is several: it may reuse a part of the block after those promised.
    #[arg(long)]
    page: Option<u64>,
    /// Media identities are learnt from the engine: a view may end before an image that was not seen yet.
    #[arg(long)]
    learns: bool,
    /// Only requests without adapters.
    #[arg(long)]
    base_only: bool,
}

#[derive(Default)]
struct Tally {
    sent: u64,
    exact: u64,
    /// Views that ended before an image of unknown identity, and promised no more than was reused.
    unlearnt: u64,
    refused: u64,
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
    for (name, path, body) in standard_requests(&args)? {
        let url = format!("{}{path}", fleet.url()?);
        let rule = Rule { block: args.block, page: args.page.unwrap_or(args.block), learns: args.learns };
        let Some(first) = send(&fleet, &url, &body, &name, rule, &mut tally).await? else { continue };
        let Some(second) = send(&fleet, &url, &body, &name, rule, &mut tally).await? else { continue };
        tally.repeats += 1;
        // Without a full block there is nothing to return to.
        let no_block = second.header("x-fovea-overlap").starts_with("0/");
        if no_block || first.header("x-fovea-worker") == second.header("x-fovea-worker") {
            tally.same_worker += 1;
        } else {
            eprintln!("{name}: the repeat went to another worker");
        }
    }
    let verdicts = fleet.judged(tally.sent + tally.refused).await?;
    println!(
        "{}",
        json!({"requests": tally.sent, "exact": tally.exact, "unlearnt": tally.unlearnt, "refused": tally.refused, "repeats": tally.repeats, "same_worker": tally.same_worker,
            "reused_tokens": tally.reused_tokens, "verdicts": verdicts})
    );
    ensure!(verdicts.keys().all(|verdict| !verdict.starts_with("diverged")), "the closed loop found divergences");
    ensure!(
        tally.exact + tally.unlearnt == tally.sent && tally.same_worker == tally.repeats,
        "predictions differ: see above"
    );
    Ok(())
}

#[derive(Clone, Copy)]
struct Rule {
    /// Tokens per block.
    block: u64,
    /// Tokens per page.
    page: u64,
    /// The view may end before an image, and the engine is no whole one: what it refuses is left out.
    learns: bool,
}

/// Sends one request and compares the engine's `cached_tokens` with the prediction in the response headers.
async fn send(
    fleet: &Fleet,
    url: &str,
    body: &Value,
    name: &str,
    rule: Rule,
    tally: &mut Tally,
) -> anyhow::Result<Option<Answer>> {
    quiet(fleet).await?;
    let answer = fleet.client.post(url, body.to_string()).await?;
    if rule.learns && answer.status.as_u16() == 400 {
        tally.refused += 1;
        return Ok(None);
    }
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
    let predicted = held.min(prompt.saturating_sub(1) / rule.block) * rule.block;
    tally.sent += 1;
    tally.reused_tokens += cached;
    let exact = answer.header("x-fovea-view").split(';').next() == Some("exact");
    let beyond = rule.block - rule.page;
    if exact && predicted <= cached && cached - predicted <= beyond {
        tally.exact += 1;
    } else if rule.learns && !exact && predicted <= cached {
        tally.unlearnt += 1;
    } else {
        eprintln!("{name}: view {}, predicted {predicted}, cached {cached} of {prompt}", answer.header("x-fovea-view"));
    }
    Ok(Some(answer))
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
fn standard_requests(args: &Args) -> anyhow::Result<Vec<(String, String, Value)>> {
    let runs = capture::load(&args.vectors, &args.vectors)?;
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
            let adapter = body["model"] != "tiny-vl";
            if *status == 200 && !(args.base_only && adapter) && !special.iter().any(|word| text.contains(word)) {
                requests.push((record.name.clone(), record.path.clone(), body.clone()));
            }
        }
    }
    ensure!(!requests.is_empty(), "no usable request in {}", args.vectors.display());
    Ok(requests)
}
