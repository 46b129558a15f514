//! Takes connections from clients and hands each to the HTTP layer.

use std::sync::Arc;
use std::time::Duration;

use fovea_service::shutdown::Shutdown;
use pingora_core::apps::ServerApp as _;
use pingora_core::protocols::l4::stream::Stream;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::sync::watch;

use super::Front;

/// After a failed accept, most often for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Serves until stopped; connections then end with the request they are at, and the caller's drain waits for them.
pub async fn serve(listener: TcpListener, front: Arc<Front>, shutdown: Shutdown) {
    let slots = Arc::new(Semaphore::new(front.config.limits.connections_max));
    // Dropped at the end of this function: HTTP/2 connections then say goodbye. For others the front watches its token.
    let (_accepting, stopping) = watch::channel(false);
    let accept = async {
        while let Ok(slot) = Arc::clone(&slots).acquire_owned().await {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let (front, stopping) = (Arc::clone(&front), stopping.clone());
                    shutdown.spawn(async move {
                        connection(stream, front, stopping).await;
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

async fn connection(stream: TcpStream, front: Arc<Front>, stopping: watch::Receiver<bool>) {
    let _ = stream.set_nodelay(true);
    // The HTTP layer looks for an HTTP/2 preface without a time limit: wait here for the first byte.
    let mut byte = [0];
    let first = tokio::time::timeout(front.config.timeouts.client_idle, stream.peek(&mut byte));
    let begun = tokio::select! {
        peeked = first => matches!(peeked, Ok(Ok(1))),
        () = front.stop.cancelled() => false,
    };
    if !begun {
        return;
    }
    let mut next: Option<pingora_core::protocols::Stream> = Some(Box::new(Stream::from(stream)));
    while let Some(stream) = next {
        next = front.process_new(stream, &stopping).await;
    }
}
