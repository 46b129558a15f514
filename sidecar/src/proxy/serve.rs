//! Accepts connections and runs the stack on each, until the stop; then what is in flight ends by itself.

use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use fovea_service::shutdown::Shutdown;
use fovea_service::tls::server::ServerTls;
use fovea_service::tls::socket::Socket;
use http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tower::ServiceExt;

use super::stack::{Peer, Shared, stack};
use super::step::Next;
use crate::body;

/// After a failed accept, most often for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// Request line and headers of one request, in bytes.
const HEAD_BYTES_MAX: usize = 64 << 10;

/// Serves until the stop. A connection over `connections_max` is closed at once.
pub async fn serve(
    listener: TcpListener,
    shared: Arc<Shared>,
    tls: Option<Arc<ServerTls>>,
    connections_max: usize,
    shutdown: Shutdown,
) {
    let stop = shutdown.token();
    let slots = Arc::new(Semaphore::new(connections_max));
    let head_timeout = shared.bodies.timeouts.client_head;
    let stack = stack(Arc::clone(&shared));
    loop {
        let accepted = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            accepted = listener.accept() => accepted,
        };
        let (stream, peer) = match accepted {
            Ok(accepted) => accepted,
            Err(error) => {
                tracing::warn!(%error, "cannot accept a connection");
                tokio::time::sleep(ACCEPT_PAUSE).await;
                continue;
            }
        };
        let Ok(slot) = Arc::clone(&slots).try_acquire_owned() else {
            shared.metrics.connections_refused.inc();
            continue;
        };
        let (stack, tls, stop) = (stack.clone(), tls.clone(), stop.clone());
        shutdown.spawn(async move {
            let _slot = slot;
            let Some(opened) = stop.run_until_cancelled(open(stream, peer, tls)).await.flatten() else { return };
            connection(opened, peer, stack, head_timeout, stop).await;
        });
    }
}

/// A connection to serve, and whether its peer has shown a certificate that is believed.
struct Opened {
    socket: Socket,
    verified: bool,
}

async fn open(stream: TcpStream, peer: SocketAddr, tls: Option<Arc<ServerTls>>) -> Option<Opened> {
    if let Err(error) = stream.set_nodelay(true) {
        tracing::debug!(%error, "cannot set TCP_NODELAY");
    }
    let Some(tls) = tls else { return Some(Opened { socket: Box::new(stream), verified: false }) };
    match tls.accept(stream).await {
        Ok(stream) => Some(Opened { socket: Box::new(stream), verified: tls.verifies_peers() }),
        Err(error) => {
            let cause = error.source.as_ref().map(ToString::to_string);
            tracing::debug!(%peer, %error, cause, "no secure connection");
            None
        }
    }
}

async fn connection(
    opened: Opened,
    peer: SocketAddr,
    stack: impl Next + Sync,
    head_timeout: Duration,
    stop: CancellationToken,
) {
    let Opened { socket, verified } = opened;
    let service = service_fn(move |request: Request<Incoming>| {
        let mut request = request.map(body::boxed);
        request.extensions_mut().insert(Peer { address: peer, verified });
        stack.clone().oneshot(request)
    });
    // HTTP/1 only: one request at a time, so that connections bound the memory, and a head that never comes ends its connection.
    let mut builder = http1::Builder::new();
    builder.timer(TokioTimer::new()).header_read_timeout(head_timeout).max_buf_size(HEAD_BYTES_MAX);
    let mut connection = pin!(builder.serve_connection(TokioIo::new(socket), service));
    let ended = tokio::select! {
        ended = connection.as_mut() => ended,
        () = stop.cancelled() => {
            // Idle connections end at once, others after the answer in progress.
            connection.as_mut().graceful_shutdown();
            connection.await
        }
    };
    if let Err(error) = ended {
        tracing::debug!(%error, "connection failed");
    }
}
