//! Answers that the balancer gives itself: errors shaped as the OpenAI API shapes them.

use std::time::Duration;

use crate::metrics::ErrorKind;
use crate::prepare::PrepareError;

/// An error answer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    pub kind: ErrorKind,
    pub message: String,
    /// The request field at fault.
    pub param: Option<&'static str>,
    /// Tells the client to come again.
    pub retry_after: Option<Duration>,
    /// In place of the kind's own.
    pub status: Option<u16>,
    /// Further headers of the answer.
    pub headers: Vec<(&'static str, String)>,
}

impl Refusal {
    pub fn new(kind: ErrorKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), param: None, retry_after: None, status: None, headers: Vec::new() }
    }

    pub fn unknown_model(model: &str) -> Self {
        let message = format!("the model `{model}` is not served here; GET /v1/models lists those that are");
        Self { param: Some("model"), ..Self::new(ErrorKind::UnknownModel, message) }
    }

    /// A refusal that ends by itself; `turn` spreads the returns over 1 to 5 s.
    pub fn busy(kind: ErrorKind, message: &str, turn: u64) -> Self {
        Self { retry_after: Some(Duration::from_secs(1 + turn % 5)), ..Self::new(kind, message) }
    }

    /// Engines died under this request; it is refused for `left` yet.
    pub fn poison(left: Duration) -> Self {
        let seconds = left.as_secs().max(1);
        let message =
            format!("two engines failed while they computed this request: it is not passed on again for {seconds} s");
        Self::new(ErrorKind::Poison, message)
    }

    pub fn status(&self) -> u16 {
        if let Some(status) = self.status {
            return status;
        }
        match self.kind {
            ErrorKind::BadRequest | ErrorKind::Media => 400,
            ErrorKind::Unauthorized => 401,
            ErrorKind::RequestRate | ErrorKind::TokenRate | ErrorKind::Concurrency => 429,
            ErrorKind::NotFound | ErrorKind::UnknownModel => 404,
            ErrorKind::MethodNotAllowed => 405,
            ErrorKind::BodyTimeout => 408,
            ErrorKind::BodyTooLarge => 413,
            ErrorKind::Poison => 422,
            ErrorKind::ClientGone => 499,
            ErrorKind::Internal => 500,
            ErrorKind::Connect | ErrorKind::UpstreamFailed | ErrorKind::UpstreamBroke => 502,
            ErrorKind::BodyBudget | ErrorKind::Busy | ErrorKind::NoWorker | ErrorKind::Saturated => 503,
            ErrorKind::UpstreamTimeout => 504,
        }
    }

    /// `{"error":{message,type,param,code}}`
    pub fn body(&self) -> Vec<u8> {
        let kind = match self.status() {
            404 => "not_found_error",
            // The API names the limit here.
            429 if self.kind == ErrorKind::TokenRate => "tokens",
            429 => "requests",
            400..500 => "invalid_request_error",
            503 => "service_unavailable_error",
            _ => "server_error",
        };
        let code = match self.kind {
            ErrorKind::UnknownModel => "model_not_found",
            ErrorKind::BodyTooLarge => "body_too_large",
            ErrorKind::Unauthorized => "invalid_api_key",
            ErrorKind::RequestRate | ErrorKind::TokenRate | ErrorKind::Concurrency => "rate_limit_exceeded",
            ErrorKind::NoWorker => "no_worker",
            ErrorKind::BodyBudget | ErrorKind::Busy | ErrorKind::Saturated => "overloaded",
            ErrorKind::Poison => "poison",
            ErrorKind::BodyTimeout | ErrorKind::UpstreamTimeout => "timeout",
            ErrorKind::NotFound => "not_found",
            ErrorKind::MethodNotAllowed => "method_not_allowed",
            ErrorKind::BadRequest => "bad_request",
            ErrorKind::Media => "media",
            _ => "upstream_error",
        };
        let error = serde_json::json!({"message": self.message, "type": kind, "param": self.param, "code": code});
        serde_json::json!({ "error": error }).to_string().into_bytes()
    }
}

impl From<PrepareError> for Refusal {
    fn from(error: PrepareError) -> Self {
        Self::new(ErrorKind::BadRequest, error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn errors_have_the_shape_of_the_api() {
        let refusal = Refusal::unknown_model("m\"1");
        let body: serde_json::Value = serde_json::from_slice(&refusal.body()).unwrap();
        assert_eq!(refusal.status(), 404);
        assert_eq!(body["error"]["code"], "model_not_found");
        assert_eq!(body["error"]["param"], "model");
        assert!(body["error"]["message"].as_str().unwrap().contains("m\"1"));
    }

    #[test]
    fn returns_are_spread_over_one_to_five_seconds() {
        let after = |turn| Refusal::busy(ErrorKind::NoWorker, "x", turn).retry_after.unwrap().as_secs();
        assert_eq!([0, 4, 5].map(after), [1, 5, 1]);
    }
}
