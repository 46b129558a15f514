//! The bottom of the stack: one request to the engine. Dropping the future or the answer's body closes the engine's connection, so
//! a client that leaves cancels its request there, during prefill too.

use std::convert::Infallible;
use std::error::Error;
use std::sync::Arc;
use std::time::Duration;

use http::uri::{Authority, PathAndQuery, Scheme};
use http::{HeaderValue, Request, Response, Uri, Version};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::{TokioExecutor, TokioTimer};

use super::headers;
use super::refusal::{Outcome, Refusal};
use super::splice::LengthError;
use crate::body::{self, Body, BodyError};
use crate::engine::discover::EngineClient;

/// Idle connections are closed before uvicorn does it (5 s by default), so that no request meets a closing one.
const POOL_IDLE: Duration = Duration::from_secs(3);

/// For the engine's word on its health.
const HEALTH_WAIT: Duration = Duration::from_secs(3);

/// The engine's base URL, taken apart once.
#[derive(Clone, Debug)]
pub struct Target {
    scheme: Scheme,
    authority: Authority,
}

impl Target {
    pub fn new(base: &Uri) -> Option<Self> {
        Some(Self { scheme: base.scheme()?.clone(), authority: base.authority()?.clone() })
    }
}

pub fn client(connect: Duration) -> EngineClient {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    connector.set_connect_timeout(Some(connect));
    Client::builder(TokioExecutor::new()).pool_timer(TokioTimer::new()).pool_idle_timeout(POOL_IDLE).build(connector)
}

/// The request's own body broke off on its way: not the engine's fault.
fn body_error<'e>(error: &'e (dyn Error + 'static)) -> Option<&'e BodyError> {
    std::iter::successors(Some(error), |&error| error.source()).find_map(|error| error.downcast_ref())
}

#[derive(Clone)]
pub struct Forward {
    pub client: EngineClient,
    pub target: Arc<Target>,
    pub first_byte: Duration,
}

impl Forward {
    /// Never fails: what goes wrong is an answer of our own.
    pub async fn call(self, request: Request<Body>) -> Result<Response<Body>, Infallible> {
        Ok(self.send(request).await.unwrap_or_else(Refusal::into_response))
    }

    async fn send(self, mut request: Request<Body>) -> Result<Response<Body>, Refusal> {
        let path = request.uri().path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
        let uri = Uri::builder().scheme(self.target.scheme.clone()).authority(self.target.authority.clone());
        *request.uri_mut() =
            uri.path_and_query(path).build().map_err(|error| Refusal::EngineUnreachable(error.into()))?;
        *request.version_mut() = Version::HTTP_11;
        let answer = tokio::time::timeout(self.first_byte, self.client.request(request)).await;
        let answer = answer.map_err(|_| Refusal::EngineTooSlow)?;
        let failed = match &answer {
            Ok(answer) => answer.status().is_server_error(),
            Err(error) => body_error(error).is_none() && !error.is_connect(),
        };
        let died = failed && self.has_died().await;
        let answer = answer.map_err(|error| match body_error(&error) {
            Some(body) => match body.downcast_ref::<LengthError>() {
                Some(&wrong) => wrong.into(),
                None => Refusal::BodyBroken(BodyError::new(error)),
            },
            None if error.is_connect() => Refusal::EngineUnreachable(error.into()),
            None if died => Refusal::EngineDied(error.into()),
            None => Refusal::EngineBroken(error.into()),
        })?;
        let (mut head, incoming) = answer.into_parts();
        headers::strip_hop(&mut head.headers);
        if died {
            head.headers.insert(headers::ENGINE, HeaderValue::from_static("died"));
        }
        head.version = Version::HTTP_11;
        head.extensions = http::Extensions::new();
        let outcome = if head.status.is_server_error() { Outcome::EngineError } else { Outcome::Answered };
        head.extensions.insert(outcome);
        Ok(Response::from_parts(head, body::boxed(incoming)))
    }

    /// After an answer that failed: does the engine say of itself that it is well? One that does not answer at all in this time is slow,
    /// not dead. vLLM (0.32) answers `/health` with 503 once its core has ended, and then ends itself.
    async fn has_died(&self) -> bool {
        let uri = Uri::builder().scheme(self.target.scheme.clone()).authority(self.target.authority.clone());
        let Ok(uri) = uri.path_and_query("/health").build() else { return false };
        let mut request = Request::new(body::full(""));
        *request.uri_mut() = uri;
        match tokio::time::timeout(HEALTH_WAIT, self.client.request(request)).await {
            Ok(Ok(answer)) => answer.status().is_server_error(),
            Ok(Err(_)) => true,
            Err(_) => false,
        }
    }
}
