//! Handshakes that did not come to an end, by name.

use std::io;

use tokio_rustls::rustls::{AlertDescription, CertificateError, Error};

use super::metrics::HandshakeEnd;

/// Why there is no secure connection.
#[derive(Debug, thiserror::Error)]
#[error("{}", text(*end))]
pub struct HandshakeError {
    pub end: HandshakeEnd,
    #[source]
    pub source: Option<io::Error>,
}

fn text(end: HandshakeEnd) -> &'static str {
    match end {
        HandshakeEnd::Done => "no error",
        HandshakeEnd::TimedOut => "the TLS handshake took too long",
        HandshakeEnd::Closed => {
            "the peer closed the connection during the TLS handshake; does it take our certificate, and does it speak TLS?"
        }
        HandshakeEnd::NotTls => "the peer does not speak TLS here: set it up at both ends or at neither",
        HandshakeEnd::NoCertificate => "the peer shows no certificate: give it cert_file and key_file",
        HandshakeEnd::UnknownIssuer => "the peer's certificate is not signed by our ca_file",
        HandshakeEnd::Expired => "the peer's certificate has expired or is not valid yet; check the clocks too",
        HandshakeEnd::WrongName => "the peer's certificate is for another name: see server_name and allowed_names",
        HandshakeEnd::RefusedByPeer => {
            "the peer does not take our certificate: see cert_file here, ca_file and allowed_names there"
        }
        HandshakeEnd::Other => "the TLS handshake failed",
    }
}

impl HandshakeError {
    pub fn timed_out() -> Self {
        Self { end: HandshakeEnd::TimedOut, source: None }
    }
}

impl From<io::Error> for HandshakeError {
    fn from(error: io::Error) -> Self {
        Self { end: end_of(&error), source: Some(error) }
    }
}

/// The TLS reason of an I/O error, also of one that comes after the handshake: in TLS 1.3 a client learns only by reading that its
/// certificate was not taken.
pub fn end_of(error: &io::Error) -> HandshakeEnd {
    let Some(tls) = error.get_ref().and_then(|inner| inner.downcast_ref::<Error>()) else {
        return match error.kind() {
            io::ErrorKind::UnexpectedEof | io::ErrorKind::ConnectionReset | io::ErrorKind::BrokenPipe => {
                HandshakeEnd::Closed
            }
            _ => HandshakeEnd::Other,
        };
    };
    match tls {
        Error::NoCertificatesPresented => HandshakeEnd::NoCertificate,
        Error::InvalidCertificate(error) => of_certificate(error),
        Error::AlertReceived(alert) => of_alert(*alert),
        Error::InvalidMessage(_) => HandshakeEnd::NotTls,
        _ => HandshakeEnd::Other,
    }
}

fn of_certificate(error: &CertificateError) -> HandshakeEnd {
    match error {
        CertificateError::UnknownIssuer | CertificateError::BadSignature => HandshakeEnd::UnknownIssuer,
        CertificateError::Expired
        | CertificateError::ExpiredContext { .. }
        | CertificateError::NotValidYet
        | CertificateError::NotValidYetContext { .. } => HandshakeEnd::Expired,
        CertificateError::NotValidForName
        | CertificateError::NotValidForNameContext { .. }
        | CertificateError::Other(_) => HandshakeEnd::WrongName,
        _ => HandshakeEnd::Other,
    }
}

fn of_alert(alert: AlertDescription) -> HandshakeEnd {
    match alert {
        AlertDescription::CertificateRequired
        | AlertDescription::BadCertificate
        | AlertDescription::UnsupportedCertificate
        | AlertDescription::CertificateExpired
        | AlertDescription::CertificateUnknown
        | AlertDescription::UnknownCA
        // A certificate of another authority that has the same name.
        | AlertDescription::DecryptError
        | AlertDescription::AccessDenied => HandshakeEnd::RefusedByPeer,
        _ => HandshakeEnd::Other,
    }
}
