//! `/drain` on the admin port: an engine that is about to end lets its requests end first.
//!
//! Kubernetes ends a sidecar container after the main one, so the sidecar learns of the end too late; the engine's preStop hook calls this
//! page and waits on it. Balancers are told at once, new requests get 503, and the answer comes when nothing is in flight.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio_util::task::TaskTracker;

use crate::state::State;

/// Longest wait that can be asked for.
const WAIT_MAX: Duration = Duration::from_secs(3500);

/// The action; `cap`: the wait where the query has none.
pub fn drain(
    state: Arc<State>,
    in_flight: TaskTracker,
    cap: Duration,
) -> impl Fn(&str) -> futures_util::future::BoxFuture<'static, Value> + Send + Sync + 'static {
    move |query| {
        let (state, in_flight, wait) = (Arc::clone(&state), in_flight.clone(), wait(query).unwrap_or(cap));
        Box::pin(async move {
            tracing::info!(?wait, in_flight = in_flight.len(), "draining");
            state.set_draining();
            // Another drain may follow, so the tracker stays closed; that only lets waits end.
            in_flight.close();
            let drained = tokio::time::timeout(wait.min(WAIT_MAX), in_flight.wait()).await.is_ok();
            json!({"drained": drained, "in_flight": in_flight.len()})
        })
    }
}

/// `wait=300s`, `wait=500ms` or `wait=300`, in seconds.
fn wait(query: &str) -> Option<Duration> {
    let text = query.split('&').find_map(|pair| pair.strip_prefix("wait="))?;
    let of = |digits: &str, one: fn(u64) -> Duration| digits.parse().ok().map(one);
    match (text.strip_suffix("ms"), text.strip_suffix('s'), text.strip_suffix('m')) {
        (Some(digits), ..) => of(digits, Duration::from_millis),
        (_, Some(digits), _) => of(digits, Duration::from_secs),
        (.., Some(digits)) => of(digits, |minutes| Duration::from_secs(minutes.saturating_mul(60))),
        _ => of(text, Duration::from_secs),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn waits_carry_their_unit_or_are_seconds() {
        let seconds = |text| wait(text).map(|wait| wait.as_secs_f64());
        assert_eq!(seconds("wait=300s"), Some(300.0));
        assert_eq!(seconds("x=1&wait=250ms"), Some(0.25));
        assert_eq!((seconds("wait=5m"), seconds("wait=7")), (Some(300.0), Some(7.0)));
        assert_eq!((seconds(""), seconds("wait=soon"), seconds("wait=-1s")), (None, None, None));
    }
}
