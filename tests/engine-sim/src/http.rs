//! The HTTP face of the engine: the family's paths, bodies and errors, and `/sim/*` for tests.

mod answer;
mod error;
mod metrics;
mod request;
mod sglang;
mod sim;
mod trtllm;
mod vllm;

use crate::config::EngineKind;
use crate::engine::Engine;
use bytes::Bytes;
use error::ApiError;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use request::Kind;
use serde_json::Value;
use std::convert::Infallible;
use std::sync::Arc;
use tokio::net::{TcpListener, TcpStream};
use tokio_util::task::TaskTracker;

type Body = UnsyncBoxBody<Bytes, Infallible>;
type Reply = Result<Response<Body>, ApiError>;

/// Serves until the engine's stop token; then cuts all connections.
pub async fn serve(listener: TcpListener, engine: Arc<Engine>) {
    let connections = TaskTracker::new();
    loop {
        tokio::select! {
            () = engine.stop.cancelled() => break,
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => drop(connections.spawn(serve_connection(stream, Arc::clone(&engine)))),
                Err(error) => tracing::warn!(%error, "cannot accept a connection"),
            },
        }
    }
    connections.close();
    connections.wait().await;
}

async fn serve_connection(stream: TcpStream, engine: Arc<Engine>) {
    let _ = stream.set_nodelay(true);
    let stop = engine.stop.clone();
    let service = service_fn(move |request| {
        let engine = Arc::clone(&engine);
        async move {
            let kind = engine.config.engine_kind;
            let reply = route(engine, request).await;
            Ok::<_, Infallible>(reply.unwrap_or_else(|error| error.response(kind)))
        }
    });
    let connection = http1::Builder::new().serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        () = stop.cancelled() => {}
        result = connection => {
            if let Err(error) = result {
                tracing::debug!(%error, "connection ended early");
            }
        }
    }
}

async fn route(engine: Arc<Engine>, request: Request<Incoming>) -> Reply {
    let (head, body) = request.into_parts();
    let query = head.uri.query().unwrap_or_default().to_owned();
    match (&head.method, head.uri.path()) {
        (&Method::POST, "/v1/chat/completions") => answer::generate(engine, Kind::Chat, &head.headers, body).await,
        (&Method::POST, "/v1/completions") => answer::generate(engine, Kind::Text, &head.headers, body).await,
        (&Method::POST, path) if vllm::shows_prompts(&engine, path) => {
            let body = read_json(&engine, body).await?;
            vllm::show_prompt(&engine, &head, body).await
        }
        (&Method::POST, "/sim/fault") => {
            let body = read_json(&engine, body).await?;
            sim::fault(&engine, body).await
        }
        (&Method::GET, "/sim/state") => sim::state(&engine, &query).await,
        // vLLM 0.32: its core has ended, its front has not yet.
        (_, "/health") if engine.has_died() => {
            Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "the engine is dead"))
        }
        (method, path) => match engine.config.engine_kind {
            EngineKind::Vllm => vllm::route(&engine, method, path, &query),
            EngineKind::Sglang => sglang::route(&engine, method, path),
            EngineKind::Trtllm => trtllm::route(&engine, method, path),
        },
    }
}

async fn read_json(engine: &Engine, body: Incoming) -> Result<Value, ApiError> {
    let limit = engine.config.body_bytes_max;
    let bytes = match Limited::new(body, limit).collect().await {
        Ok(body) => body.to_bytes(),
        Err(error) if error.is::<http_body_util::LengthLimitError>() => {
            return Err(ApiError::new(StatusCode::PAYLOAD_TOO_LARGE, format!("body is larger than {limit} bytes")));
        }
        Err(error) => return Err(ApiError::bad(format!("cannot read the body: {error}"))),
    };
    serde_json::from_slice(&bytes).map_err(|error| ApiError::bad(format!("JSON decode error: {error}")))
}

fn full(text: impl Into<Bytes>) -> Body {
    Full::new(text.into()).boxed_unsync()
}

fn json(value: &Value) -> Response<Body> {
    with_type("application/json", value.to_string())
}

fn with_type(kind: &'static str, text: String) -> Response<Body> {
    let mut response = Response::new(full(text));
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(kind));
    response
}
