//! `/sim/*`: what tests ask and switch.

use super::error::ApiError;
use super::{Reply, json};
use crate::engine::{Engine, State};
use http::StatusCode;
use serde_json::{Value, json};
use std::time::Duration;

/// Longest wait of `/sim/state`.
const STATE_WAIT_MAX: Duration = Duration::from_secs(30);

/// `{"fault": …}`, with `"rank": r` for one rank only.
pub(super) async fn fault(engine: &Engine, mut body: Value) -> Reply {
    let rank = body.as_object_mut().and_then(|body| body.remove("rank")).filter(|rank| !rank.is_null());
    let wrong = || ApiError::bad("rank must be a whole number");
    let index = |rank: Value| rank.as_u64().and_then(|rank| usize::try_from(rank).ok()).ok_or_else(wrong);
    let rank = rank.map(index).transpose()?;
    let fault = serde_json::from_value(body).map_err(|error| ApiError::bad(error.to_string()))?;
    engine.fault(fault, rank).await?;
    Ok(json(&json!({"ok": true})))
}

/// The state; with `?served=3&aborted=1…` once all these have been reached.
pub(super) async fn state(engine: &Engine, query: &str) -> Reply {
    let reached = |state: &State| {
        let counts = &state.counts;
        let small = |n: usize| n as u64;
        let values = [
            ("served", counts.served),
            ("aborted", counts.aborted),
            ("running", small(counts.running)),
            ("waiting", small(counts.waiting)),
            ("images_encoded", counts.images_encoded),
            ("generated_tokens", counts.generated_tokens),
            ("subscriptions", state.subscriptions),
            ("restarts", state.restarts),
            ("next_seq", state.next_seq),
        ];
        values.iter().all(|(name, value)| parameter(query, name).is_none_or(|least| *value >= least))
    };
    let state = tokio::time::timeout(STATE_WAIT_MAX, engine.wait_for(reached)).await;
    let state = state.map_err(|_| ApiError::new(StatusCode::REQUEST_TIMEOUT, format!("not reached: {query}")))?;
    Ok(json(&serde_json::to_value(state).map_err(|error| ApiError::bad(error.to_string()))?))
}

/// A number of the query.
pub(super) fn parameter(query: &str, name: &str) -> Option<u64> {
    let pairs = query.split('&').filter_map(|pair| pair.split_once('='));
    pairs.filter(|(key, _)| *key == name).find_map(|(_, value)| value.parse().ok())
}
