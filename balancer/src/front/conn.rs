//! Our own connections under Pingora's HTTP layer: TLS of ours, and plain ones whose first bytes have been looked at.

use std::os::fd::{AsRawFd as _, RawFd};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use async_trait::async_trait;
use fovea_service::tls::tokio_rustls;
use pingora_core::protocols::tls::SslDigest;
use pingora_core::protocols::{
    ALPN, GetProxyDigest, GetSocketDigest, GetTimingDigest, Peek, Shutdown, SocketDigest, Ssl, TimingDigest, UniqueID,
};
use tokio::io::{self, AsyncRead, AsyncWrite, AsyncWriteExt as _, ReadBuf};
use tokio::net::TcpStream;

/// A connection that Pingora takes for one of its own.
#[derive(Debug)]
pub struct Conn<S> {
    socket: S,
    /// Its descriptor, by which pooled connections are told apart.
    fd: RawFd,
    /// Present on TLS: keeps Pingora from looking for HTTP/2 without TLS.
    tls: Option<Arc<SslDigest>>,
    h2: bool,
}

impl Conn<TcpStream> {
    /// HTTP/1 without TLS: known by its first bytes not to be HTTP/2.
    pub fn plain(socket: TcpStream) -> Self {
        Self { fd: socket.as_raw_fd(), socket, tls: None, h2: false }
    }
}

impl Conn<tokio_rustls::TlsStream<TcpStream>> {
    pub fn secure(socket: impl Into<tokio_rustls::TlsStream<TcpStream>>) -> Self {
        let socket = socket.into();
        let (tcp, session) = socket.get_ref();
        let h2 = session.alpn_protocol() == Some(b"h2");
        let digest = SslDigest::new("", "", None, None, Vec::new());
        Self { fd: tcp.as_raw_fd(), h2, tls: Some(Arc::new(digest)), socket }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Conn<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_read(cx, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Conn<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.socket).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bytes: &[std::io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.socket).poll_write_vectored(cx, bytes)
    }

    fn is_write_vectored(&self) -> bool {
        self.socket.is_write_vectored()
    }
}

#[async_trait]
impl<S: AsyncWrite + Unpin + Send> Shutdown for Conn<S> {
    async fn shutdown(&mut self) {
        if let Err(error) = self.socket.shutdown().await {
            tracing::trace!(%error, "connection was gone already");
        }
    }
}

impl<S> UniqueID for Conn<S> {
    fn id(&self) -> RawFd {
        self.fd
    }
}

impl<S> Ssl for Conn<S> {
    fn get_ssl_digest(&self) -> Option<Arc<SslDigest>> {
        self.tls.clone()
    }

    fn selected_alpn_proto(&self) -> Option<ALPN> {
        self.tls.is_some().then_some(if self.h2 { ALPN::H2 } else { ALPN::H1 })
    }
}

#[async_trait]
impl<S: Send> Peek for Conn<S> {
    /// What was looked at is no HTTP/2, and is told as such without a wait for more.
    async fn try_peek(&mut self, bytes: &mut [u8]) -> io::Result<bool> {
        bytes.fill(0);
        Ok(true)
    }
}

impl<S> GetTimingDigest for Conn<S> {
    fn get_timing_digest(&self) -> Vec<Option<TimingDigest>> {
        Vec::new()
    }
}

impl<S> GetProxyDigest for Conn<S> {
    fn get_proxy_digest(&self) -> Option<Arc<pingora_core::protocols::raw_connect::ProxyDigest>> {
        None
    }
}

impl<S> GetSocketDigest for Conn<S> {
    fn get_socket_digest(&self) -> Option<Arc<SocketDigest>> {
        None
    }
}
