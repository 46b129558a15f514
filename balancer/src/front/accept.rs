//! Takes connections from clients and hands each to the HTTP layer.

use std::sync::Arc;
use std::time::Duration;

use fovea_service::shutdown::Shutdown;
use fovea_service::tls::server::ServerTls;
use pingora_core::apps::ServerApp as _;
use pingora_core::protocols::Stream as HttpStream;
use pingora_core::protocols::l4::stream::Stream;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::sync::watch;

use super::Front;
use super::conn::Conn;

/// How HTTP/2 begins (RFC 9113 §3.4).
const PREFACE: &[u8; 24] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Between two looks at a preface of which a part has come.
const PREFACE_PAUSE: Duration = Duration::from_millis(5);
/// After a failed accept, most often for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves until stopped; connections then end with the request they are at, and the caller's drain waits for them.
pub async fn serve(listener: TcpListener, front: Arc<Front>, tls: Option<Arc<ServerTls>>, shutdown: Shutdown) {
    let slots = Arc::new(Semaphore::new(front.config.limits.connections_max));
    // Dropped at the end of this function: HTTP/2 connections then say goodbye. For others the front watches its token.
    let (_accepting, stopping) = watch::channel(false);
    let accept = async {
        while let Ok(slot) = Arc::clone(&slots).acquire_owned().await {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let (front, tls, stopping) = (Arc::clone(&front), tls.clone(), stopping.clone());
                    shutdown.spawn(async move {
                        connection(stream, front, tls, stopping).await;
                        drop(slot);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept clients");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    };
    shutdown.token().run_until_cancelled(accept).await;
}

async fn connection(
    stream: TcpStream,
    front: Arc<Front>,
    tls: Option<Arc<ServerTls>>,
    stopping: watch::Receiver<bool>,
) {
    let _ = stream.set_nodelay(true);
    let mut next = tokio::select! {
        opened = open(stream, &front, tls) => opened,
        () = front.stop.cancelled() => None,
    };
    while let Some(stream) = next {
        next = front.process_new(stream, &stopping).await;
    }
}

/// Waits for the first bytes, and shakes hands where there is TLS. The HTTP layer would wait for either without a time limit.
async fn open(stream: TcpStream, front: &Front, tls: Option<Arc<ServerTls>>) -> Option<HttpStream> {
    let timeouts = &front.config.timeouts;
    tokio::time::timeout(timeouts.client_idle, stream.peek(&mut [0])).await.ok()?.ok().filter(|read| *read > 0)?;
    if let Some(tls) = tls {
        return match tls.accept(stream).await {
            Ok(stream) => Some(Box::new(Conn::secure(stream))),
            Err(error) => {
                let cause = error.source.as_ref().map(ToString::to_string);
                tracing::debug!(%error, cause, "no secure connection to a client");
                None
            }
        };
    }
    match tokio::time::timeout(timeouts.client_headers, is_h2(&stream)).await.ok()?.ok()? {
        true => Some(Box::new(Stream::from(stream))),
        false => Some(Box::new(Conn::plain(stream))),
    }
}

/// Does HTTP/2 without TLS begin? Answers as soon as the bytes that are there tell.
async fn is_h2(stream: &TcpStream) -> std::io::Result<bool> {
    let mut bytes = [0; PREFACE.len()];
    loop {
        let seen = stream.peek(&mut bytes).await?;
        if seen == PREFACE.len() || seen == 0 || bytes[..seen] != PREFACE[..seen] {
            return Ok(bytes == *PREFACE);
        }
        // What was peeked at stays readable, so there is nothing to wait for but time.
        tokio::time::sleep(PREFACE_PAUSE).await;
    }
}
