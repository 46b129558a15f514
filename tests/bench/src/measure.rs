//! One workload under one policy on a fresh fleet.

use std::collections::BTreeMap;
use std::sync::Arc;

use anyhow::{Context, ensure};
use e2e::client::Streamed;
use e2e::workload::{Shape, four_pictures};
use e2e::{Fleet, FleetConfig};
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use serde_json::Value;
use tokio::task::JoinSet;

/// What a policy achieved. Tokens are the engines' own counts, from `usage`.
#[derive(Clone, Debug, Serialize)]
pub struct Figures {
    /// Cached prompt tokens / all prompt tokens.
    pub reused_tokens_ratio: f64,
    pub ttft_ms_p50: f64,
    pub ttft_ms_p90: f64,
    pub requests_per_worker: Vec<u64>,
    #[serde(skip)]
    pub failed: u64,
}

/// What a repeated request showed.
#[derive(Clone, Debug, Serialize)]
pub struct Repeat {
    pub overlap_blocks: u64,
    pub prompt_blocks: u64,
    pub same_worker: bool,
}

/// Starts a fleet, runs `shape` on it and gives both.
pub async fn run(name: &str, config: FleetConfig, shape: Shape) -> anyhow::Result<(Fleet, Figures)> {
    let fleet = Fleet::start(config).await?;
    let bar = progress(name, shape.requests());
    let url: Arc<str> = fleet.chat_url()?.into();
    let mut users = JoinSet::new();
    for user in 0..shape.users {
        let (client, url, bar) = (fleet.client.clone(), Arc::clone(&url), bar.clone());
        users.spawn(async move {
            let mut answers = Vec::new();
            for request in shape.user(user) {
                tokio::time::sleep(request.think).await;
                answers.push(client.stream(&url, request.body).await);
                bar.inc(1);
            }
            answers
        });
    }
    let answers: Vec<_> = users.join_all().await.into_iter().flatten().collect();
    bar.finish();
    let figures = figures(&fleet, answers).await?;
    Ok((fleet, figures))
}

async fn figures(fleet: &Fleet, answers: Vec<anyhow::Result<Streamed>>) -> anyhow::Result<Figures> {
    let (mut prompt, mut cached, mut failed, mut first_tokens) = (0, 0, 0, Vec::new());
    for answer in answers {
        match answer {
            Ok(answer) if answer.status.is_success() && answer.tokens().0 > 0 => {
                prompt += answer.tokens().0;
                cached += answer.tokens().1;
                first_tokens.push(answer.first_token.as_secs_f64() * 1e3);
            }
            Ok(answer) => {
                failed += 1;
                eprintln!("failed: {} {}", answer.status, answer.text.chars().take(200).collect::<String>());
            }
            Err(error) => {
                failed += 1;
                eprintln!("failed: {error:#}");
            }
        }
    }
    ensure!(!first_tokens.is_empty(), "no request was answered");
    first_tokens.sort_by(f64::total_cmp);
    let served = |state: &Value| state["served"].as_u64().context("/sim/state names no served");
    let requests_per_worker = fleet.engine_states().await?.iter().map(served).collect::<anyhow::Result<_>>()?;
    #[expect(clippy::cast_precision_loss, reason = "token counts of a short run")]
    let reused_tokens_ratio = round(cached as f64 / prompt as f64, 4);
    Ok(Figures {
        reused_tokens_ratio,
        ttft_ms_p50: round(quantile(&first_tokens, 50), 1),
        ttft_ms_p90: round(quantile(&first_tokens, 90), 1),
        requests_per_worker,
        failed,
    })
}

/// Sends one request with four pictures twice; the second time the balancer knows what the first left behind.
pub async fn repeat(fleet: &Fleet) -> anyhow::Result<Repeat> {
    let url = fleet.chat_url()?;
    let body = four_pictures(0xf0);
    let first = fleet.client.stream(&url, body.clone()).await?;
    fleet.settled().await?;
    let second = fleet.client.stream(&url, body).await?;
    ensure!(second.status.is_success(), "the repeated request failed: {}", second.text);
    let overlap = second.header("x-fovea-overlap");
    let (held, all) = overlap.split_once('/').with_context(|| format!("x-fovea-overlap is {overlap:?}"))?;
    let same_worker =
        !first.header("x-fovea-worker").is_empty() && first.header("x-fovea-worker") == second.header("x-fovea-worker");
    Ok(Repeat { overlap_blocks: held.parse()?, prompt_blocks: all.parse()?, same_worker })
}

/// `percent` of the values are at or below the answer. `sorted` is ascending and not empty.
fn quantile(sorted: &[f64], percent: usize) -> f64 {
    sorted[((sorted.len() * percent).div_ceil(100)).clamp(1, sorted.len()) - 1]
}

fn round(value: f64, digits: i32) -> f64 {
    let scale = 10f64.powi(digits);
    (value * scale).round() / scale
}

fn progress(name: &str, requests: u64) -> ProgressBar {
    let style = ProgressStyle::with_template("{prefix:12} [{bar:40}] {pos}/{len} requests {elapsed}")
        .unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(requests).with_style(style.progress_chars("=> ")).with_prefix(name.to_owned())
}

/// All figures of a demo in the order of its table.
pub type Comparison = BTreeMap<&'static str, Figures>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_were_seen() {
        let values: Vec<f64> = (1..=10).map(f64::from).collect();
        assert_eq!((quantile(&values, 50), quantile(&values, 90), quantile(&values, 100)), (5.0, 9.0, 10.0));
        assert_eq!(quantile(&[3.0], 50), 3.0);
    }
}
