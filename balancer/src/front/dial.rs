//! Connections to sidecars, kept for the next request: plain ones by Pingora's connector, secure ones dialled here and kept in Pingora's pool.
//!
//! Pingora's own TLS builds a client config for each connection, resumes no session, and cannot check lists of names.
//! **Invariant:** a secure connection is used only while the certificates it was made with are in use.

use std::net::SocketAddr;
use std::sync::Arc;

use fovea_service::tls::handshake::end_of;
use fovea_service::tls::metrics::HandshakeEnd;
use pingora_core::connectors::TransportConnector;
use pingora_core::connectors::http::Connector;
use pingora_core::protocols::http::client::HttpSession;
use pingora_core::protocols::http::v1::client::HttpSession as Http1;
use pingora_core::upstreams::peer::{HttpPeer, Peer as _};
use pingora_core::{Error, ErrorType};

use super::conn::Conn;
use crate::config::Timeouts;
use crate::secure::SidecarTls;

/// In a peer's group: its connections must not be taken from the pool.
const FRESH: u64 = 1;

/// Where a sidecar takes requests, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Target {
    pub address: SocketAddr,
    pub secure: bool,
}

impl Target {
    /// Of a sidecar's URL, as the sync listener writes it.
    pub fn new(url: &str) -> Option<Self> {
        let (scheme, address) = url.split_once("://")?;
        let secure = match scheme {
            "http" => false,
            "https" => true,
            _ => return None,
        };
        Some(Self { address: address.parse().ok()?, secure })
    }
}

/// One exchange's peer.
pub struct To {
    peer: HttpPeer,
    secure: bool,
}

impl To {
    /// The next connection is a fresh one, and is not kept.
    pub fn never_pooled(&mut self) {
        self.peer.group_key |= FRESH;
    }
}

/// Did the sidecar refuse our certificate? In TLS 1.3 that comes after our end of the handshake, in place of an answer: no connection was made,
/// and nothing of the request was looked at.
pub fn is_refusal(error: &Error) -> bool {
    // Pingora's errors keep their cause, but do not give it as a source.
    let Some(cause) = &error.cause else { return false };
    if let Some(inner) = cause.downcast_ref::<Box<Error>>() {
        return is_refusal(inner);
    }
    cause.downcast_ref().is_some_and(|error| end_of(error) == HandshakeEnd::RefusedByPeer)
}

/// Dials sidecars.
pub struct Dial {
    plain: Connector,
    secure: Option<(Arc<SidecarTls>, TransportConnector)>,
}

impl Dial {
    pub fn new(tls: Option<Arc<SidecarTls>>) -> Self {
        Self { plain: Connector::new(None), secure: tls.map(|tls| (tls, TransportConnector::new(None))) }
    }

    pub fn to(&self, target: Target, timeouts: &Timeouts) -> To {
        let mut peer = HttpPeer::new(target.address, false, String::new());
        peer.options.connection_timeout = Some(timeouts.connect);
        peer.options.total_connection_timeout = Some(timeouts.connect);
        peer.options.idle_timeout = Some(timeouts.client_idle);
        if let Some((tls, _)) = self.secure.as_ref().filter(|_| target.secure) {
            // The lowest bit is FRESH.
            peer.group_key = tls.generation() << 1;
        }
        To { peer, secure: target.secure }
    }

    /// A session, and whether its connection served another request before.
    ///
    /// # Errors
    /// When no connection can be made.
    pub async fn open(&self, to: &To) -> pingora_core::Result<(HttpSession, bool)> {
        if !to.secure {
            return self.plain.get_http_session(&to.peer).await;
        }
        let no_tls = || Error::explain(ErrorType::ConnectError, "set sidecar_tls to reach sidecars by https");
        let (tls, pool) = self.secure.as_ref().ok_or_else(no_tls)?;
        if to.peer.group_key & FRESH == 0
            && let Some(stream) = pool.reused_stream(&to.peer).await
        {
            return Ok((HttpSession::H1(Http1::new_with_options(stream, &to.peer)), true));
        }
        let address = to.peer.address().as_inet().copied();
        let address = address.ok_or_else(|| Error::explain(ErrorType::ConnectError, "no address"))?;
        let limit = to.peer.options.total_connection_timeout.unwrap_or_default();
        let stream = tls.connect(address, limit).await.map_err(|error| {
            Error::because(ErrorType::TLSHandshakeFailure, "no secure connection to the sidecar", error)
        })?;
        let stream = Box::new(Conn::secure(stream));
        Ok((HttpSession::H1(Http1::new_with_options(stream, &to.peer)), false))
    }

    /// Keeps the connection of a session that ended whole, unless it must not be kept.
    pub async fn release(&self, session: HttpSession, to: &To) {
        if to.peer.group_key & FRESH != 0 {
            return;
        }
        let idle = to.peer.options.idle_timeout;
        match (session, self.secure.as_ref().filter(|_| to.secure)) {
            (HttpSession::H1(mut session), Some((_, pool))) => {
                session.respect_keepalive();
                if let Some(stream) = session.reuse().await {
                    pool.release_stream(stream, to.peer.reuse_hash(), idle);
                }
            }
            (session, _) => self.plain.release_http_session(session, &to.peer, idle).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use fovea_service::tls::tokio_rustls::rustls::{AlertDescription, Error as TlsError};

    use super::*;

    #[test]
    fn a_refused_certificate_is_told_from_a_broken_connection() {
        let alert = |alert| std::io::Error::other(TlsError::AlertReceived(alert));
        let read = |error| Error::because(ErrorType::ReadError, "while reading an answer", error);
        assert!(is_refusal(&read(alert(AlertDescription::UnknownCA))));
        assert!(is_refusal(&Error::because(
            ErrorType::H1Error,
            "again",
            read(alert(AlertDescription::CertificateRequired))
        )));
        assert!(!is_refusal(&read(alert(AlertDescription::CloseNotify))));
        assert!(!is_refusal(&read(std::io::ErrorKind::ConnectionReset.into())));
    }

    #[test]
    fn only_a_scheme_and_an_address_are_a_target() {
        let target =
            |url, secure| assert_eq!(Target::new(url), Some(Target { address: ([127, 0, 0, 1], 80).into(), secure }));
        target("http://127.0.0.1:80", false);
        target("https://127.0.0.1:80", true);
        for url in ["ftp://127.0.0.1:80", "http://host:80", "127.0.0.1:80", "http://127.0.0.1:80/x"] {
            assert_eq!(Target::new(url), None);
        }
    }
}
