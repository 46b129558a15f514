//! Heads and answers that are written here.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http::header;
use pingora_core::protocols::http::ServerSession;
use pingora_http::ResponseHeader;

use super::End;
use super::headers::{self, REQUEST_ID};
use super::plan::Told;
use super::refusal::Refusal;
use super::truth;
use crate::metrics::Outcome;
use crate::workers::{Route, Workers};

/// After a refusal the rest of the body is read this long, so that the client gets the answer before a reset.
const LINGER: Duration = Duration::from_secs(2);

/// The head of a worker's answer as the client gets it; `explained` makes the debug headers.
///
/// # Errors
/// When a header cannot be written.
pub fn head(
    client: &ServerSession,
    upstream: &ResponseHeader,
    request_id: &str,
    explained: Option<(&Told, &Route)>,
) -> pingora_core::Result<ResponseHeader> {
    let close_delimited = client.req_header().version == http::Version::HTTP_10;
    let mut head = headers::to_client(upstream, client.is_http2(), close_delimited)?;
    head.insert_header(REQUEST_ID, request_id)?;
    if let Some((told, route)) = explained {
        head.insert_header("x-fovea-worker", &*route.name)?;
        head.insert_header("x-fovea-overlap", format!("{}/{}", route.confirmed_blocks, told.prompt_blocks))?;
        head.insert_header("x-fovea-mode", mode(told.outcome))?;
        head.insert_header("x-fovea-view", told.view.as_str())?;
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
    let after = refusal.retry_after.map(|after| (header::RETRY_AFTER.as_str(), after.as_secs().to_string()));
    let headers = after.iter().chain(&refusal.headers);
    let end = answer(client, refusal.status(), refusal.body(), request_id, headers).await;
    if client.is_body_done() {
        return end;
    }
    let rest = async { while let Ok(Some(_)) = client.read_request_body().await {} };
    let _ = tokio::time::timeout(LINGER, rest).await;
    End::Broken
}

/// Answers with a JSON text.
pub async fn json(client: &mut ServerSession, body: Vec<u8>, request_id: &str) -> End {
    answer(client, 200, body, request_id, [].into_iter()).await
}

async fn answer<'h>(
    client: &mut ServerSession,
    status: u16,
    body: Vec<u8>,
    request_id: &str,
    mut headers: impl Iterator<Item = &'h (&'static str, String)>,
) -> End {
    let bodiless = client.req_header().method == http::Method::HEAD;
    let written = async {
        let mut head = ResponseHeader::build(status, Some(6))?;
        head.insert_header(header::CONTENT_TYPE, "application/json")?;
        head.insert_header(header::CONTENT_LENGTH, body.len().to_string())?;
        head.insert_header(REQUEST_ID, request_id)?;
        headers.try_for_each(|(name, value)| head.insert_header(*name, value))?;
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

/// The body of `GET /v1/models`: what can be served at this moment. A model that is declared and has no worker is left out, because
/// clients take the list for models that answer.
pub fn models(workers: &Workers) -> Vec<u8> {
    let mut models = Vec::new();
    workers.each_name(Instant::now(), |name, served, about| models.push(truth::entry(name, served, about)));
    serde_json::json!({"object": "list", "data": models}).to_string().into_bytes()
}
