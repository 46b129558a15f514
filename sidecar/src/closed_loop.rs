//! Takes what the closed loops of all ranks have to say: counts verdicts, passes learnt facts on to the balancers, and tells them when
//! media predictions are not to be believed. Every decision is in `fovea_sidecar_core::verify`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::metrics::{LoopMetrics, VerdictLabels};
use crate::state::State;
use crate::worker::lock;

/// Verdicts wait for the engine's events anyway.
const EVERY: Duration = Duration::from_millis(100);

/// Until the stop.
pub async fn run(state: Arc<State>, metrics: LoopMetrics, stop: CancellationToken) {
    let mut ticks = tokio::time::interval(EVERY);
    ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            _ = ticks.tick() => settle(&state, &metrics),
        }
    }
}

fn settle(state: &State, metrics: &LoopMetrics) {
    let facts = state.facts();
    let model = facts.as_ref().and_then(|facts| facts.served_names.first()).cloned().unwrap_or_default();
    let mut trust_changed = false;
    for worker in state.workers() {
        let trusted = worker.media_trusted();
        let settled = worker.settle(Instant::now());
        for verdict in &settled.verdicts {
            let labels = VerdictLabels { model: model.clone(), verdict: verdict.found.label() };
            metrics.verdicts.get_or_create(&labels).inc();
            if let Some((predicted, actual)) = verdict.cached {
                metrics.cached_tokens_predicted.inc_by(predicted.into());
                metrics.cached_tokens_actual.inc_by(actual.into());
            }
        }
        state.learn(worker.take_learnt());
        if trusted != settled.media_trusted {
            tracing::warn!(
                rank = worker.rank,
                trusted = settled.media_trusted,
                "predictions of media and the engine part or meet"
            );
            trust_changed = true;
        }
    }
    metrics.facts.set(i64::try_from(lock(&state.learnt).len()).unwrap_or(i64::MAX));
    metrics.media_trusted.set(state.workers().iter().all(|worker| worker.media_trusted()).into());
    if trust_changed {
        state.refresh_hello();
    }
}

/// `/debug/divergences`: evidence of the last divergences of each rank, newest last.
pub fn divergences(state: &State) -> Value {
    let ranks: Vec<Value> = state
        .workers()
        .iter()
        .map(|worker| {
            json!({
                "rank": worker.rank,
                "media_trusted": worker.media_trusted(),
                "divergences": worker.divergences(),
            })
        })
        .collect();
    json!({ "ranks": ranks })
}
