//! The way in: whose key it is, what is left of its limits, and what the client is told of them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fovea_balancer_core::tenants::{Exceeded, Level, Limit, Standing, Wait};
use http::HeaderValue;
use pingora_core::protocols::http::ServerSession;
use pingora_http::ResponseHeader;

use super::plan::Plan;
use super::refusal::Refusal;
use super::{Context, End, Front};
use crate::metrics::ErrorKind;
use crate::prepare::ApiPath;
use crate::tenants::{Admitted, Caller, Refused, Tenants};

/// Longest wait that is told: a client that comes back earlier loses nothing.
const RETRY_AFTER_MAX: Duration = Duration::from_secs(3600);
/// Label of who has no key of ours.
const UNKNOWN: &str = "unknown";

/// Keys of clients, and that of engines.
#[derive(Default)]
pub struct Keys {
    pub tenants: Arc<Tenants>,
    /// `Authorization` that engines want, in place of the client's.
    pub engines: Option<HeaderValue>,
    /// Keys of clients pass on to engines.
    pub forward: bool,
}

impl Keys {
    /// Headers with keys of clients end here.
    pub fn stop_at_us(&self) -> bool {
        self.engines.is_some() || !self.forward && !self.tenants.are_open()
    }
}

impl Front {
    /// Who asks.
    ///
    /// # Errors
    /// Somebody without a key of ours.
    pub(super) fn caller<'c>(&self, context: &'c Context) -> Result<&'c Caller, Refusal> {
        context.caller.as_ref().map_err(|refused| {
            self.metrics.tenants.refused(UNKNOWN, ErrorKind::Unauthorized);
            unauthorized(*refused)
        })
    }

    /// Serves a completion request as far as its caller's limits allow.
    pub(super) async fn let_in(
        &self,
        client: &mut ServerSession,
        path: ApiPath,
        context: &Context,
    ) -> Result<End, Refusal> {
        let caller = self.caller(context)?;
        let ended = match caller.clone().enter(Instant::now()) {
            Ok(mut admitted) => Box::pin(self.complete(client, path, context, &mut admitted)).await,
            Err(exceeded) => Err(limited(exceeded, context.turn)),
        };
        ended.map_err(|mut refusal| {
            self.metrics.tenants.refused(&caller.tenant.name, refusal.kind);
            refusal.headers.extend(told(caller.standing(Instant::now())));
            refusal
        })
    }

    /// Charges a planned prompt to its caller.
    pub(super) fn charge(&self, admitted: &mut Admitted, plan: &Plan, context: &Context) -> Result<(), Refusal> {
        let charged = admitted.charge(plan.load_tokens().into(), Instant::now());
        charged.map_err(|exceeded| limited(exceeded, context.turn))
    }
}

/// Tells in an answer's head what is left.
///
/// # Errors
/// When a header cannot be written.
pub fn mark(head: &mut ResponseHeader, standing: Standing) -> pingora_core::Result<()> {
    told(standing).into_iter().try_for_each(|(name, value)| head.insert_header(name, value))
}

fn unauthorized(refused: Refused) -> Refusal {
    let message = match refused {
        Refused::NoKey => "no API key: send it as `Authorization: Bearer KEY`, `api-key` or `x-api-key`",
        Refused::UnknownKey => "the API key is not known here: compare it with the one that you were given",
    };
    let headers = vec![("www-authenticate", "Bearer".to_owned())];
    Refusal { headers, ..Refusal::new(ErrorKind::Unauthorized, message) }
}

fn limited(exceeded: Exceeded, turn: u64) -> Refusal {
    let Exceeded { limit, allowed, wait } = exceeded;
    let (kind, what) = match limit {
        Limit::Requests => (ErrorKind::RequestRate, "requests per minute"),
        Limit::PromptTokens => (ErrorKind::TokenRate, "prompt tokens per minute"),
        Limit::Concurrent => (ErrorKind::Concurrency, "requests at a time"),
    };
    let reached = |then: &str| format!("the limit of {allowed} {what} is reached: {then}");
    match wait {
        Some(Wait::Never) => {
            Refusal::new(kind, format!("the prompt is longer than {allowed} {what} allow at once: send a shorter one"))
        }
        Some(Wait::For(wait)) => {
            let after = Duration::from_secs(wait.as_secs() + 1).min(RETRY_AFTER_MAX);
            Refusal { retry_after: Some(after), ..Refusal::new(kind, reached("try again later")) }
        }
        None => Refusal::busy(kind, &reached("try again when one of yours has ended"), turn),
    }
}

/// The headers that clients of the OpenAI API know.
fn told(standing: Standing) -> Vec<(&'static str, String)> {
    let mut headers = Vec::new();
    let mut tell = |level: Option<Level>, names: [&'static str; 3]| {
        if let Some(level) = level {
            let values = [level.limit.to_string(), level.left.to_string(), reset(level.full_in)];
            headers.extend(names.into_iter().zip(values));
        }
    };
    tell(
        standing.requests,
        ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests", "x-ratelimit-reset-requests"],
    );
    tell(
        standing.prompt_tokens,
        ["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens", "x-ratelimit-reset-tokens"],
    );
    headers
}

/// `20ms`, `7s`, `6m0s`; rounded up.
fn reset(wait: Duration) -> String {
    let (millis, seconds) = (wait.as_micros().div_ceil(1000), wait.as_millis().div_ceil(1000));
    match seconds {
        0 | 1 if millis < 1000 => format!("{millis}ms"),
        0..60 => format!("{seconds}s"),
        _ => format!("{}m{}s", seconds / 60, seconds % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_written_as_the_api_writes_them() {
        let written = [0, 20, 1000, 6_500, 59_001, 360_000].map(|millis| reset(Duration::from_millis(millis)));
        assert_eq!(written, ["0ms", "20ms", "1s", "7s", "1m0s", "6m0s"]);
    }

    #[test]
    fn a_refusal_says_which_limit_and_when_to_come_again() {
        let exceeded = |limit, wait| limited(Exceeded { limit, allowed: 5, wait }, 3);
        let rate = exceeded(Limit::Requests, Some(Wait::For(Duration::from_millis(1500))));
        assert_eq!((rate.status(), rate.retry_after), (429, Some(Duration::from_secs(2))));
        assert!(rate.message.contains("5 requests per minute"), "{}", rate.message);
        let long = exceeded(Limit::PromptTokens, Some(Wait::Never));
        assert_eq!((long.status(), long.retry_after), (429, None));
        let many = exceeded(Limit::Concurrent, None);
        assert_eq!((many.status(), many.retry_after), (429, Some(Duration::from_secs(4))));
        let body: serde_json::Value = serde_json::from_slice(&many.body()).unwrap();
        assert_eq!(body["error"]["code"], "rate_limit_exceeded");
    }

    #[test]
    fn who_has_no_key_is_told_how_to_send_one() {
        let refusal = unauthorized(Refused::NoKey);
        let body: serde_json::Value = serde_json::from_slice(&refusal.body()).unwrap();
        assert_eq!((refusal.status(), &body["error"]["code"]), (401, &serde_json::json!("invalid_api_key")));
        assert_eq!(refusal.headers, [("www-authenticate", "Bearer".to_owned())]);
    }
}
