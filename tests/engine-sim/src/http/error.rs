//! Errors: `{"error": {message, type, param, code}}` as vLLM words them, SGLang's and TensorRT-LLM's without the outer object.

use super::{Body, json};
use crate::config::EngineKind;
use crate::engine::{NoSuchRank, QueueFull};
use crate::prompt::PromptError;
use http::{Response, StatusCode};
use serde_json::json;

/// An answer that is an error.
#[derive(Debug)]
pub(super) struct ApiError {
    status: StatusCode,
    message: String,
    param: Option<&'static str>,
}

impl ApiError {
    pub(super) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), param: None }
    }

    pub(super) fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }

    pub(super) fn with_param(self, param: &'static str) -> Self {
        Self { param: Some(param), ..self }
    }

    /// What a request in flight gets when the engine process dies.
    pub(super) fn engine_dead() -> Self {
        let message = "EngineCore encountered an issue. See stack trace (above) for the root cause.";
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    pub(super) fn body(&self, family: EngineKind) -> serde_json::Value {
        let kind = match self.status.as_u16() {
            400 => "BadRequestError",
            404 => "NotFoundError",
            422 => "UnprocessableEntityError",
            503 => "ServiceUnavailableError",
            500 => "InternalServerError",
            _ => "Error",
        };
        let code = self.status.as_u16();
        let (message, param) = (&self.message, self.param);
        match family {
            EngineKind::Vllm => {
                json!({"error": {"message": message, "type": kind, "param": param, "code": code}})
            }
            EngineKind::Sglang | EngineKind::Trtllm => {
                json!({"object": "error", "message": message, "type": kind, "param": param, "code": code})
            }
        }
    }

    pub(super) fn response(&self, family: EngineKind) -> Response<Body> {
        let mut response = json(&self.body(family));
        *response.status_mut() = self.status;
        response
    }
}

impl From<PromptError> for ApiError {
    fn from(error: PromptError) -> Self {
        let (status, message, param) = match error {
            PromptError::Bad { message, param } => (StatusCode::BAD_REQUEST, message, param),
            PromptError::Unprocessable { message, param } => (StatusCode::UNPROCESSABLE_ENTITY, message, param),
        };
        Self { status, message, param }
    }
}

impl From<QueueFull> for ApiError {
    fn from(error: QueueFull) -> Self {
        Self::new(StatusCode::SERVICE_UNAVAILABLE, error.to_string())
    }
}

impl From<NoSuchRank> for ApiError {
    fn from(error: NoSuchRank) -> Self {
        Self::bad(format!("{error}."))
    }
}
