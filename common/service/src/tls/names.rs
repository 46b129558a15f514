//! Lists of peers that are believed: names in a certificate's subject alternative names, DNS and URI.

use std::sync::Arc;

use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::client::verify_server_cert_signed_by_trust_anchor;
use tokio_rustls::rustls::crypto::{WebPkiSupportedAlgorithms, verify_tls12_signature, verify_tls13_signature};
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::ParsedCertificate;
use tokio_rustls::rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use tokio_rustls::rustls::{
    CertificateError, DigitallySignedStruct, DistinguishedName, Error, OtherError, RootCertStore, SignatureScheme,
};

/// Names of a peer that are told in an error, at most.
const TOLD_MAX: usize = 8;

/// The chain is fine, the name is not one of those that are allowed.
#[derive(Debug, thiserror::Error)]
#[error("the certificate is for {found:?}, none of which is in allowed_names")]
pub struct NotAllowed {
    pub found: Vec<String>,
}

/// Carries the certificate one of the names? Exactly: a wildcard in it matches nothing.
fn check(certificate: &CertificateDer<'_>, allowed: &[String]) -> Result<(), Error> {
    let parsed = webpki::EndEntityCert::try_from(certificate)
        .map_err(|_| Error::InvalidCertificate(CertificateError::BadEncoding))?;
    let dns = |allowed: &String| parsed.valid_dns_names().any(|name| name.eq_ignore_ascii_case(allowed));
    let uri = |allowed: &String| parsed.valid_uri_names().any(|name| name == allowed);
    if allowed.iter().any(|allowed| dns(allowed) || uri(allowed)) {
        return Ok(());
    }
    let found = parsed.valid_dns_names().chain(parsed.valid_uri_names()).take(TOLD_MAX);
    let found = found.map(|name| name.chars().take(200).collect()).collect();
    Err(Error::InvalidCertificate(CertificateError::Other(OtherError(Arc::new(NotAllowed { found })))))
}

/// Clients with one of the names, besides what `inner` asks.
#[derive(Debug)]
pub struct NamedClients {
    pub inner: Arc<dyn ClientCertVerifier>,
    pub allowed: Arc<[String]>,
}

impl ClientCertVerifier for NamedClients {
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        self.inner.root_hint_subjects()
    }

    fn verify_client_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        now: UnixTime,
    ) -> Result<ClientCertVerified, Error> {
        let verified = self.inner.verify_client_cert(certificate, intermediates, now)?;
        check(certificate, &self.allowed)?;
        Ok(verified)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, certificate, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, certificate, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.inner.supported_verify_schemes()
    }
}

/// Servers with one of the names, whatever host was dialled.
#[derive(Debug)]
pub struct NamedServers {
    pub roots: Arc<RootCertStore>,
    pub algorithms: WebPkiSupportedAlgorithms,
    pub allowed: Arc<[String]>,
}

impl ServerCertVerifier for NamedServers {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        _host: &ServerName<'_>,
        _ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        let parsed = ParsedCertificate::try_from(certificate)?;
        let algorithms = self.algorithms.all;
        verify_server_cert_signed_by_trust_anchor(&parsed, &self.roots, intermediates, now, algorithms)?;
        check(certificate, &self.allowed)?;
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls12_signature(message, certificate, signed, &self.algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        verify_tls13_signature(message, certificate, signed, &self.algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.algorithms.supported_schemes()
    }
}
