//! Heads and answers that are written here.

use std::time::Duration;

use bytes::Bytes;
use http::header;
use pingora_core::protocols::http::ServerSession;
use pingora_http::ResponseHeader;

use super::End;
use super::headers::{self, REQUEST_ID};
use super::refusal::Refusal;
use crate::metrics::Outcome;

/// After a refusal the rest of the body is read this long, so that the client gets the answer before a reset.
const LINGER: Duration = Duration::from_secs(2);

/// What the debug headers say.
pub struct Explained<'a> {
    pub worker: &'a str,
    /// `confirmed/prompt_blocks`
    pub overlap: String,
    pub outcome: Outcome,
    pub view: String,
}

/// The head of a worker's answer as the client gets it.
///
/// # Errors
/// When a header cannot be written.
pub fn head(
    client: &ServerSession,
    upstream: &ResponseHeader,
    request_id: &str,
    explained: Option<Explained>,
) -> pingora_core::Result<ResponseHeader> {
    let close_delimited = client.req_header().version == http::Version::HTTP_10;
    let mut head = headers::to_client(upstream, client.is_http2(), close_delimited)?;
    head.insert_header(REQUEST_ID, request_id)?;
    if let Some(Explained { worker, overlap, outcome, view }) = explained {
        head.insert_header("x-fovea-worker", worker)?;
        head.insert_header("x-fovea-overlap", overlap)?;
        head.insert_header("x-fovea-mode", mode(outcome))?;
        head.insert_header("x-fovea-view", view)?;
    }
    Ok(head)
}

fn mode(outcome: Outcome) -> &'static str {
    match outcome {
        Outcome::Precise | Outcome::Prefix => "precise",
        Outcome::Approximate => "approximate",
        Outcome::Load => "load",
        Outcome::RoundRobin => "round_robin",
        Outcome::Session => "session",
    }
}

/// Answers with a refusal. A client that still sends its body is read for a moment, then cut off.
pub async fn refuse(client: &mut ServerSession, refusal: &Refusal, request_id: &str) -> End {
    let end = json(client, refusal.status(), refusal.body(), request_id, refusal.retry_after).await;
    if client.is_body_done() {
        return end;
    }
    let rest = async { while let Ok(Some(_)) = client.read_request_body().await {} };
    let _ = tokio::time::timeout(LINGER, rest).await;
    End::Broken
}

/// Answers with a JSON text.
pub async fn json(
    client: &mut ServerSession,
    status: u16,
    body: Vec<u8>,
    request_id: &str,
    retry_after: Option<Duration>,
) -> End {
    let bodiless = client.req_header().method == http::Method::HEAD;
    let written = async {
        let mut head = ResponseHeader::build(status, Some(6))?;
        head.insert_header(header::CONTENT_TYPE, "application/json")?;
        head.insert_header(header::CONTENT_LENGTH, body.len().to_string())?;
        head.insert_header(REQUEST_ID, request_id)?;
        if let Some(after) = retry_after {
            head.insert_header(header::RETRY_AFTER, after.as_secs().to_string())?;
        }
        client.write_response_header(Box::new(head)).await?;
        let body = if bodiless { Bytes::new() } else { Bytes::from(body) };
        client.write_response_body(body, true).await
    };
    match written.await {
        Ok(()) => End::Answered,
        Err(error) => {
            tracing::debug!(%error, "client did not take the answer");
            End::Broken
        }
    }
}

/// The body of `GET /v1/models`.
pub fn models(names: &[String]) -> Vec<u8> {
    let models: Vec<_> = names
        .iter()
        .map(|name| serde_json::json!({"id": name, "object": "model", "created": 0, "owned_by": "fovea"}))
        .collect();
    serde_json::json!({"object": "list", "data": models}).to_string().into_bytes()
}
