//! TLS towards sidecars that advertise https: one set of certificates for requests, model files and render probes.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use fovea_service::tls::client::ClientTls;
use fovea_service::tls::reload::{Looked, Watched};
use fovea_service::tls::socket::Socket;
use fovea_service::tls::tokio_rustls::client::TlsStream;
use http::{HeaderValue, Uri};
use hyper::rt::{Read, ReadBufCursor, Write};
use hyper_util::client::legacy::connect::{Connected, Connection};
use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tower::Service;

/// ALPN names that sidecars take.
pub const PROTOCOLS: &[&[u8]] = &[b"http/1.1"];
/// Advertised hosts remembered; far more than streams.
const HOSTS_MAX: usize = 64 << 10;

/// What proves this balancer to sidecars.
#[derive(Clone, Default)]
pub struct Access {
    /// Shared key, as a header.
    pub key: Option<HeaderValue>,
    /// Certificates, for sidecars that advertise https.
    pub tls: Option<Arc<SidecarTls>>,
}

/// Certificates towards sidecars, and the host that each address was advertised under.
pub struct SidecarTls {
    tls: ClientTls,
    hosts: quick_cache::sync::Cache<SocketAddr, Arc<str>>,
}

impl SidecarTls {
    pub fn new(tls: ClientTls) -> Self {
        Self { tls, hosts: quick_cache::sync::Cache::new(HOSTS_MAX) }
    }

    /// Requests to `address` go to a sidecar that advertised `host`: its certificate must be for that, unless the config says otherwise.
    pub fn remember(&self, address: SocketAddr, host: &str) {
        if self.tls.needs_host() {
            self.hosts.insert(address, host.into());
        }
    }

    /// Which certificates are in use.
    pub fn generation(&self) -> u64 {
        self.tls.generation()
    }

    /// Dials and shakes hands, within `limit`.
    ///
    /// # Errors
    /// When either fails; the text of a failed handshake says what to change.
    pub async fn connect(&self, address: SocketAddr, limit: Duration) -> io::Result<TlsStream<TcpStream>> {
        let connected = timeout(limit, async {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            let host = self.hosts.get(&address);
            let fallback = || address.ip().to_string().into();
            let host: Arc<str> = host.unwrap_or_else(fallback);
            self.tls.connect(&host, stream).await.map_err(io::Error::other)
        });
        connected.await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
    }
}

impl Watched for SidecarTls {
    fn look(&self) -> Looked {
        self.tls.look()
    }
}

/// Opens connections for hyper's client, to `http://ADDRESS` and `https://ADDRESS`.
#[derive(Clone)]
pub struct SidecarConnector {
    pub tls: Option<Arc<SidecarTls>>,
    /// Of a dial and its handshake.
    pub limit: Duration,
}

impl Service<Uri> for SidecarConnector {
    type Response = Opened;
    type Error = io::Error;
    type Future = Pin<Box<dyn Future<Output = io::Result<Opened>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, uri: Uri) -> Self::Future {
        let this = self.clone();
        Box::pin(async move {
            let wrong = || io::Error::new(io::ErrorKind::InvalidInput, "a sidecar's url has no address");
            let address: SocketAddr = uri.authority().and_then(|at| at.as_str().parse().ok()).ok_or_else(wrong)?;
            let socket: Socket = match (uri.scheme_str(), &this.tls) {
                (Some("https"), Some(tls)) => Box::new(tls.connect(address, this.limit).await?),
                (Some("https"), None) => return Err(io::Error::other("set sidecar_tls to reach sidecars by https")),
                _ => {
                    let dialled = timeout(this.limit, TcpStream::connect(address)).await;
                    let stream = dialled.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))?;
                    stream.set_nodelay(true)?;
                    Box::new(stream)
                }
            };
            Ok(Opened(TokioIo::new(socket)))
        })
    }
}

/// An open connection, as hyper wants it.
pub struct Opened(TokioIo<Socket>);

impl Connection for Opened {
    fn connected(&self) -> Connected {
        Connected::new()
    }
}

impl Read for Opened {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: ReadBufCursor<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(cx, buffer)
    }
}

impl Write for Opened {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(Pin::new(&mut self.0).poll_flush(cx))?;
        Pin::new(&mut self.0).poll_shutdown(cx)
    }
}
