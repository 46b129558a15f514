//! One GET on a connection of its own, to an address that was checked.
//!
//! **Invariant:** only this module dials, and only addresses it is given: no name is resolved below it, no proxy is asked, no connection is shared.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{self, HeaderValue};
use http::{Request, Response};
use http_body_util::Empty;
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName};
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore};
use tokio_util::task::AbortOnDropHandle;

use super::error::Reason;
use super::url::Target;
use crate::config::media::{MediaConfig, Scheme};

/// To open one connection; a host with several addresses gets this for each.
const CONNECT_MAX: Duration = Duration::from_secs(2);
/// Addresses of one host that are tried.
const DIALS_MAX: usize = 3;
/// Longest head of an answer, in bytes.
const HEAD_BYTES_MAX: usize = 64 << 10;
const HEADERS_MAX: usize = 100;

const USER_AGENT: HeaderValue = HeaderValue::from_static(concat!("fovea/", env!("CARGO_PKG_VERSION")));

/// Certificates that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum SetupError {
    #[error("media.ca_file: cannot read {}; give a file of PEM certificates", path.display())]
    CaFile {
        path: std::path::PathBuf,
        #[source]
        source: rustls::pki_types::pem::Error,
    },
    #[error("cannot set up TLS for media")]
    Tls(#[from] rustls::Error),
}

pub(super) struct Client(TlsConnector);

/// An answer's head; dropping it ends the connection.
pub(super) struct Answer {
    pub response: Response<Incoming>,
    pub address: SocketAddr,
    _connection: AbortOnDropHandle<()>,
}

/// What to add to the request.
#[derive(Clone, Debug, Default)]
pub(super) struct Conditions {
    /// So many bytes from the start.
    pub first: Option<u64>,
    pub if_none_match: Option<HeaderValue>,
}

impl Client {
    pub fn new(config: &MediaConfig) -> Result<Self, SetupError> {
        let mut roots = RootCertStore::empty();
        if config.enabled && config.schemes.contains(&Scheme::Https) {
            match rustls_native_certs::load_native_certs() {
                Ok(found) => _ = roots.add_parsable_certificates(found),
                Err(error) => tracing::warn!(%error, "no certificates of the system: https media needs media.ca_file"),
            }
            if let Some(path) = &config.ca_file {
                let unread = |source| SetupError::CaFile { path: path.clone(), source };
                for certificate in CertificateDer::pem_file_iter(path).map_err(unread)? {
                    roots.add(certificate.map_err(unread)?)?;
                }
            }
        }
        let config = ClientConfig::builder_with_provider(Arc::new(rustls::crypto::ring::default_provider()))
            .with_safe_default_protocol_versions()?
            .with_root_certificates(roots)
            .with_no_client_auth();
        Ok(Self(TlsConnector::from(Arc::new(config))))
    }

    /// Sends a GET to the first of `addresses` that takes the connection. On failure, with the address that was tried last.
    pub async fn get(
        &self,
        target: &Target,
        addresses: &[IpAddr],
        conditions: Conditions,
    ) -> Result<Answer, (Reason, Option<SocketAddr>)> {
        let request = request(target, conditions).map_err(|reason| (reason, None))?;
        let (stream, address) = dial(addresses, target.port).await?;
        let at = |reason| (reason, Some(address));
        let (connection, response) = if target.tls {
            let name = ServerName::try_from(target.host()).map_err(|_| at(Reason::BadUrl))?;
            let stream = self.0.connect(name, stream).await.map_err(|error| {
                tracing::debug!(%address, %error, "media: tls");
                at(Reason::Tls)
            })?;
            exchange(stream, request).await
        } else {
            exchange(stream, request).await
        }
        .map_err(|error| {
            tracing::debug!(%address, %error, "media: http");
            at(Reason::Protocol)
        })?;
        Ok(Answer { response, address, _connection: connection })
    }
}

async fn dial(addresses: &[IpAddr], port: u16) -> Result<(TcpStream, SocketAddr), (Reason, Option<SocketAddr>)> {
    let mut tried = None;
    for address in addresses.iter().take(DIALS_MAX) {
        let address = SocketAddr::new(*address, port);
        tried = Some(address);
        match timeout(CONNECT_MAX, TcpStream::connect(address)).await {
            Ok(Ok(stream)) => {
                // A failure costs latency alone.
                let _ = stream.set_nodelay(true);
                return Ok((stream, address));
            }
            Ok(Err(error)) => tracing::debug!(%address, %error, "media: connect"),
            Err(_) => tracing::debug!(%address, "media: connect timed out"),
        }
    }
    Err((Reason::Connect, tried))
}

type Exchanged = (AbortOnDropHandle<()>, Response<Incoming>);

async fn exchange(
    stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
    request: Request<Empty<Bytes>>,
) -> hyper::Result<Exchanged> {
    let (mut sender, connection) = http1::Builder::new()
        .max_buf_size(HEAD_BYTES_MAX)
        .max_headers(HEADERS_MAX)
        .handshake::<_, Empty<Bytes>>(TokioIo::new(stream))
        .await?;
    let connection = AbortOnDropHandle::new(tokio::spawn(async move {
        // Errors reach the answer's side too.
        let _ = connection.await;
    }));
    let response = sender.send_request(request).await?;
    Ok((connection, response))
}

fn request(target: &Target, conditions: Conditions) -> Result<Request<Empty<Bytes>>, Reason> {
    let mut request = Request::new(Empty::new());
    *request.uri_mut() = target.path_and_query().parse().map_err(|_| Reason::BadUrl)?;
    let headers = request.headers_mut();
    headers.insert(header::HOST, HeaderValue::from_str(target.authority()).map_err(|_| Reason::BadUrl)?);
    headers.insert(header::USER_AGENT, USER_AGENT);
    headers.insert(header::ACCEPT, HeaderValue::from_static("image/*, */*;q=0.5"));
    headers.insert(header::ACCEPT_ENCODING, HeaderValue::from_static("identity"));
    headers.insert(header::CONNECTION, HeaderValue::from_static("close"));
    if let Some(first) = conditions.first {
        let range = HeaderValue::try_from(format!("bytes=0-{}", first.saturating_sub(1)));
        headers.insert(header::RANGE, range.expect("digits"));
    }
    if let Some(tag) = conditions.if_none_match {
        headers.insert(header::IF_NONE_MATCH, tag);
    }
    Ok(request)
}
