//! One request to one sidecar and its answer back, unbuffered both ways.
//!
//! **Invariant:** a client that leaves ends the engine's work at once; an answer that breaks off upstream breaks off for the client
//! too, without a terminator.

use std::time::{Duration, Instant};

use bytes::Bytes;
use fovea_balancer_core::fleet::WorkerKey;
use pingora_core::protocols::http::ServerSession;
use pingora_core::protocols::http::client::HttpSession;
use pingora_core::{Error, ErrorType};
use pingora_http::{RequestHeader, ResponseHeader};

use super::dial::{self, Dial, Target, To};
use crate::config::Timeouts;
use crate::metrics::ErrorKind;

/// What is sent.
pub struct Request {
    pub head: RequestHeader,
    pub preamble: Bytes,
    pub body: Bytes,
    /// Longest wait for the answer's head.
    pub head_wait: Duration,
}

/// An answer whose head has come.
pub struct Upstream {
    session: HttpSession,
    to: To,
    head: ResponseHeader,
}

impl Upstream {
    pub fn head(&self) -> &ResponseHeader {
        &self.head
    }

    pub async fn give_up(mut self) {
        self.session.shutdown().await;
    }
}

/// Why there is no answer, or not a whole one.
#[derive(Debug)]
pub enum Failed {
    ClientGone,
    /// Nothing of an answer has come; another worker may try.
    Upstream(ErrorKind, Box<Error>),
    /// Engines died under this request; it is refused for so long yet.
    Poison(Duration),
    /// Every worker had enough for too long.
    NoTurn,
}

/// An answer that came before the request was taken is there already, or never comes.
const REFUSAL_WAIT: Duration = Duration::from_millis(200);

/// Sends `request` and waits for the head of its answer. A pooled connection that the sidecar has closed meanwhile is replaced by a fresh one.
///
/// # Errors
/// When the client leaves, or when no head comes.
pub async fn exchange(
    connector: &Dial,
    client: &mut ServerSession,
    target: Target,
    request: &Request,
    timeouts: &Timeouts,
) -> Result<Upstream, Failed> {
    let mut to = connector.to(target, timeouts);
    loop {
        let connected = connector.open(&to).await;
        let (mut session, reused) = connected.map_err(|error| Failed::Upstream(ErrorKind::Connect, error))?;
        session.set_write_timeout(Some(timeouts.stream_idle));
        session.set_read_timeout(Some(request.head_wait));
        let sent = tokio::select! {
            biased;
            sent = send(&mut session, request) => sent,
            _ = client.read_body_or_idle(true) => {
                session.shutdown().await;
                return Err(Failed::ClientGone);
            }
        };
        match sent {
            Ok(Sent { head, whole }) => {
                session.set_read_timeout(Some(timeouts.stream_idle));
                if !whole {
                    to.never_pooled();
                }
                return Ok(Upstream { session, to, head });
            }
            Err(error) => {
                session.shutdown().await;
                if dial::is_refusal(&error) {
                    return Err(Failed::Upstream(ErrorKind::Connect, error));
                }
                let timed_out = matches!(error.etype(), ErrorType::ReadTimedout | ErrorType::WriteTimedout);
                if timed_out {
                    return Err(Failed::Upstream(ErrorKind::UpstreamTimeout, error));
                }
                if !reused {
                    return Err(Failed::Upstream(ErrorKind::UpstreamFailed, error));
                }
                to.never_pooled();
            }
        }
    }
}

/// The head of an answer, and whether all of the request was taken before it.
struct Sent {
    head: ResponseHeader,
    whole: bool,
}

async fn send(session: &mut HttpSession, request: &Request) -> pingora_core::Result<Sent> {
    match write(session, request).await {
        Ok(()) => Ok(Sent { head: read_head(session).await?, whole: true }),
        Err(error) => {
            // A sidecar that refuses a request says so without taking its body.
            session.set_read_timeout(Some(REFUSAL_WAIT));
            let head = read_head(session).await;
            let head = head.map_err(|read| if dial::is_refusal(&read) { read } else { error })?;
            Ok(Sent { head, whole: false })
        }
    }
}

async fn write(session: &mut HttpSession, request: &Request) -> pingora_core::Result<()> {
    session.write_request_header(Box::new(request.head.clone())).await?;
    session.write_request_body(request.preamble.clone(), false).await?;
    session.write_request_body(request.body.clone(), true).await?;
    session.finish_request_body().await
}

async fn read_head(session: &mut HttpSession) -> pingora_core::Result<ResponseHeader> {
    loop {
        session.read_response_header().await?;
        match session.response_header() {
            Some(head) if head.status.is_informational() => {}
            Some(head) => return Ok(head.clone()),
            None => return Err(Error::explain(ErrorType::H1Error, "no response head")),
        }
    }
}

/// How an answer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relayed {
    Whole,
    ClientGone,
    /// … so long after its last piece.
    UpstreamBroke(Duration),
}

/// Passes the answer on, piece by piece; `piece_came` sees each piece of its body as it comes.
pub async fn relay(
    connector: &Dial,
    client: &mut ServerSession,
    mut upstream: Upstream,
    head: ResponseHeader,
    mut piece_came: impl FnMut(&[u8]),
) -> Relayed {
    let session = &mut upstream.session;
    let mut last = Instant::now();
    let mut end = match client.write_response_header(Box::new(head)).await {
        Ok(()) => None,
        Err(_) => Some(Relayed::ClientGone),
    };
    while end.is_none() && !session.response_done() {
        let piece = tokio::select! {
            biased;
            piece = session.read_response_body() => piece,
            _ = client.read_body_or_idle(true) => {
                end = Some(Relayed::ClientGone);
                break;
            }
        };
        match piece {
            Ok(Some(piece)) => {
                last = Instant::now();
                piece_came(&piece);
                if client.write_response_body(piece, false).await.is_err() {
                    end = Some(Relayed::ClientGone);
                }
            }
            Ok(None) => break,
            Err(error) => {
                tracing::debug!(%error, "answer broke off");
                end = Some(Relayed::UpstreamBroke(last.elapsed()));
            }
        }
    }
    if end.is_none() && client.finish_body().await.is_err() {
        end = Some(Relayed::ClientGone);
    }
    if let Some(end) = end {
        session.shutdown().await;
        return end;
    }
    let Upstream { session, to, .. } = upstream;
    connector.release(session, &to).await;
    Relayed::Whole
}

/// A try that came to nothing, for the log.
pub fn log_failure(worker: &str, key: WorkerKey, error: &Error) {
    tracing::warn!(worker, key = key.0, %error, "worker did not answer");
}
