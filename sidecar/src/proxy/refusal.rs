//! Answers that the sidecar gives itself, in the engine's error shape: `{"error":{"message","type","param","code"}}`.

use http::{HeaderValue, Response, StatusCode, header};

use super::headers;
use super::splice::LengthError;
use crate::body::{self, Body, BodyError, BoxError};

/// Why a request does not reach the engine, or its answer does not come back.
#[derive(Debug, thiserror::Error)]
pub enum Refusal {
    #[error("path is not passed to the engine; add it to allow_paths in sidecar.yaml if it must be")]
    PathNotAllowed,
    #[error(
        "header {} is taken from balancers only; set trust.loopback or trust.shared_key in sidecar.yaml",
        fovea_gossip::preamble::HEADER
    )]
    PreambleNotTrusted,
    #[error("model files are given to balancers only; set trust.loopback or trust.shared_key in sidecar.yaml")]
    PeerNotTrusted,
    #[error("the model directory is not known or lacks this file; set model.dir in sidecar.yaml")]
    NoModelFile,
    #[error("this file is longer than {limit} bytes, the most that is given")]
    ModelFileTooLong { limit: u64 },
    #[error("this model file cannot be read; may the sidecar read model.dir?")]
    ModelFileUnreadable(#[source] std::io::Error),
    #[error("preamble: {problem}")]
    BadPreamble { problem: String },
    #[error("{problem}")]
    BadJson { problem: String },
    #[error(transparent)]
    Hazard(#[from] fovea_openai::Hazard),
    #[error("body is longer than {limit} bytes; raise limits.body_max in sidecar.yaml or send less")]
    BodyTooLong { limit: u64 },
    #[error(
        "body was not sent within the time limit; raise timeouts.client_body in sidecar.yaml if the client is slow"
    )]
    BodyTooSlow,
    #[error("body broke off")]
    BodyBroken(#[source] BodyError),
    #[error("no room for this body in limits.bodies_max; try again")]
    NoRoom,
    #[error("cannot connect to the engine; try again")]
    EngineUnreachable(#[source] BoxError),
    #[error("the engine ends, and takes no new requests; try again elsewhere")]
    Draining,
    #[error("the engine ended before it answered")]
    EngineDied(#[source] BoxError),
    #[error("the engine broke the connection before it answered")]
    EngineBroken(#[source] BoxError),
    #[error(
        "the engine did not begin its answer in time; raise timeouts.first_byte in sidecar.yaml if it is only slow"
    )]
    EngineTooSlow,
    #[error(transparent)]
    Encode(#[from] crate::encode::Fault),
}

/// A closed set: label of `sidecar_requests`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    Answered,
    EngineError,
    NotAllowed,
    NotTrusted,
    BadPreamble,
    BadJson,
    NoModelFile,
    Hazard,
    BodyTooLong,
    BodyTooSlow,
    BodyBroken,
    NoRoom,
    EngineUnreachable,
    EngineBroken,
    EngineDied,
    Draining,
    EngineTooSlow,
    /// The client left before the answer began.
    Cancelled,
    /// Images that were not encoded.
    NotEncoded,
}

fovea_service::snake_case_labels!(Outcome);

impl From<LengthError> for Refusal {
    fn from(error: LengthError) -> Self {
        match error {
            LengthError::TooLong { limit } => Self::BodyTooLong { limit },
            LengthError::EditBeyondEnd => Self::BadPreamble { problem: error.to_string() },
        }
    }
}

impl Refusal {
    pub fn outcome(&self) -> Outcome {
        match self {
            Self::PathNotAllowed => Outcome::NotAllowed,
            Self::PreambleNotTrusted | Self::PeerNotTrusted => Outcome::NotTrusted,
            Self::NoModelFile | Self::ModelFileTooLong { .. } | Self::ModelFileUnreadable(_) => Outcome::NoModelFile,
            Self::BadPreamble { .. } => Outcome::BadPreamble,
            Self::BadJson { .. } => Outcome::BadJson,
            Self::Hazard(_) => Outcome::Hazard,
            Self::BodyTooLong { .. } => Outcome::BodyTooLong,
            Self::BodyTooSlow => Outcome::BodyTooSlow,
            Self::BodyBroken(_) => Outcome::BodyBroken,
            Self::NoRoom => Outcome::NoRoom,
            Self::EngineUnreachable(_) => Outcome::EngineUnreachable,
            Self::EngineBroken(_) => Outcome::EngineBroken,
            Self::EngineDied(_) => Outcome::EngineDied,
            Self::Draining => Outcome::Draining,
            Self::EngineTooSlow => Outcome::EngineTooSlow,
            Self::Encode(_) => Outcome::NotEncoded,
        }
    }

    fn status(&self) -> (StatusCode, &'static str) {
        match self {
            Self::PathNotAllowed => (StatusCode::FORBIDDEN, "path_not_allowed"),
            Self::PreambleNotTrusted => (StatusCode::FORBIDDEN, "preamble_not_trusted"),
            Self::PeerNotTrusted => (StatusCode::FORBIDDEN, "peer_not_trusted"),
            Self::NoModelFile => (StatusCode::NOT_FOUND, "no_model_file"),
            Self::ModelFileTooLong { .. } => (StatusCode::INTERNAL_SERVER_ERROR, "model_file_too_long"),
            Self::ModelFileUnreadable(_) => (StatusCode::INTERNAL_SERVER_ERROR, "model_file_unreadable"),
            Self::BadPreamble { .. } => (StatusCode::BAD_REQUEST, "bad_preamble"),
            Self::BadJson { .. } => (StatusCode::BAD_REQUEST, "bad_json"),
            Self::Hazard(_) => (StatusCode::BAD_REQUEST, "refused_content"),
            Self::BodyTooLong { .. } => (StatusCode::PAYLOAD_TOO_LARGE, "body_too_long"),
            Self::BodyTooSlow => (StatusCode::REQUEST_TIMEOUT, "body_too_slow"),
            Self::BodyBroken(_) => (StatusCode::BAD_REQUEST, "body_broken"),
            Self::NoRoom => (StatusCode::SERVICE_UNAVAILABLE, "no_room"),
            Self::EngineUnreachable(_) => (StatusCode::SERVICE_UNAVAILABLE, "engine_unreachable"),
            Self::EngineBroken(_) => (StatusCode::BAD_GATEWAY, "engine_broken"),
            Self::EngineDied(_) => (StatusCode::BAD_GATEWAY, "engine_died"),
            Self::Draining => (StatusCode::SERVICE_UNAVAILABLE, "draining"),
            Self::EngineTooSlow => (StatusCode::GATEWAY_TIMEOUT, "engine_too_slow"),
            Self::Encode(fault) => (fault.status(), fault.kind()),
        }
    }

    fn field(&self) -> Option<&'static str> {
        match self {
            Self::Hazard(hazard) => Some(hazard.field()),
            _ => None,
        }
    }

    pub fn into_response(self) -> Response<Body> {
        let (status, kind) = self.status();
        let error = serde_json::json!({"error": {
            "message": self.to_string(), "type": kind, "param": self.field(), "code": status.as_u16(),
        }});
        let mut response = Response::new(body::full(error.to_string()));
        *response.status_mut() = status;
        response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
        if status == StatusCode::SERVICE_UNAVAILABLE {
            response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
        }
        let told = match self {
            Self::EngineDied(_) => Some("died"),
            Self::Draining => Some("draining"),
            Self::EngineUnreachable(_) => Some("unreachable"),
            _ => None,
        };
        if let Some(told) = told {
            response.headers_mut().insert(headers::ENGINE, HeaderValue::from_static(told));
        }
        // The rest of an unread body is not worth reading: the connection ends with this answer.
        if matches!(
            self,
            Self::BodyTooLong { .. }
                | Self::BodyTooSlow
                | Self::BodyBroken(_)
                | Self::NoRoom
                | Self::BadPreamble { .. }
        ) {
            response.headers_mut().insert(header::CONNECTION, HeaderValue::from_static("close"));
        }
        response.extensions_mut().insert(self.outcome());
        response
    }
}
