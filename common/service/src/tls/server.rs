//! The accepting end.

use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::server::WebPkiClientVerifier;
use tokio_rustls::rustls::server::danger::ClientCertVerifier;
use tokio_rustls::rustls::{self, ServerConfig};
use tokio_rustls::server::TlsStream;

use super::config::{ClientAuth, ServerTlsConfig};
use super::files::{Files, Material, TlsError};
use super::handshake::HandshakeError;
use super::metrics::{HandshakeEnd, HandshakeLabels, TlsMetrics};
use super::names::NamedClients;
use super::provider;
use super::reload::{Looked, Reloading, Watched};

/// Of a peer that was refused, taken so that it can read why.
const REFUSED_BYTES_MAX: u64 = 64 << 10;
const REFUSED_TIME_MAX: Duration = Duration::from_secs(1);

/// Certificates of one port.
pub struct ServerTls {
    config: Reloading<Arc<ServerConfig>>,
    timeout: Duration,
    verifies: bool,
}

impl ServerTls {
    /// Reads the files. `protocols`: ALPN, the most wanted first. Blocking.
    ///
    /// # Errors
    /// When the files make no TLS.
    pub fn load(
        link: &'static str,
        config: &ServerTlsConfig,
        protocols: &'static [&'static [u8]],
        metrics: &TlsMetrics,
    ) -> Result<Self, TlsError> {
        let required = config.client_auth == ClientAuth::Required;
        let files = Files {
            cert: Some(config.cert_file.clone()),
            key: Some(config.key_file.clone()),
            ca: config.ca_file.clone().filter(|_| required),
        };
        let allowed: Arc<[String]> = config.allowed_names.clone().into();
        let make = move |material: &Material| server_config(material, &allowed, protocols).map(Arc::new);
        let config_now = Reloading::load(link, files, metrics, make)?;
        Ok(Self { config: config_now, timeout: config.handshake_timeout, verifies: required })
    }

    /// Who comes in has shown a certificate that is believed.
    pub fn verifies_peers(&self) -> bool {
        self.verifies
    }

    /// The handshake, within its time.
    ///
    /// # Errors
    /// When it fails; counted here, to be logged by the caller.
    pub async fn accept<S>(&self, stream: S) -> Result<TlsStream<S>, HandshakeError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let config = Arc::clone(&self.config.get().value);
        let accept = TlsAcceptor::from(config).accept(stream).into_fallible();
        let accepted = match tokio::time::timeout(self.timeout, accept).await {
            Ok(Ok(stream)) => Ok(stream),
            Ok(Err((error, stream))) => {
                let _ = tokio::time::timeout(REFUSED_TIME_MAX, take_rest(stream)).await;
                Err(HandshakeError::from(error))
            }
            Err(_) => Err(HandshakeError::timed_out()),
        };
        let end = accepted.as_ref().err().map_or(HandshakeEnd::Done, |error| error.end);
        self.config.metrics.handshakes.get_or_create(&HandshakeLabels { link: self.config.link(), end }).inc();
        accepted
    }
}

impl Watched for ServerTls {
    fn look(&self) -> Looked {
        self.config.look()
    }
}

/// The peer has been told why by an alert. A connection that is closed while bytes of the peer are unread loses it.
async fn take_rest<S: AsyncRead + AsyncWrite + Unpin>(mut stream: S) -> std::io::Result<u64> {
    stream.shutdown().await?;
    tokio::io::copy(&mut stream.take(REFUSED_BYTES_MAX), &mut tokio::io::sink()).await
}

fn server_config(material: &Material, allowed: &Arc<[String]>, protocols: &[&[u8]]) -> Result<ServerConfig, TlsError> {
    let provider = provider();
    let builder = ServerConfig::builder_with_provider(Arc::clone(&provider));
    let builder = builder.with_safe_default_protocol_versions().map_err(TlsError::Pair)?;
    let builder = match &material.roots {
        None => builder.with_no_client_auth(),
        Some(roots) => {
            let verifier = WebPkiClientVerifier::builder_with_provider(Arc::clone(roots), provider);
            let inner: Arc<dyn ClientCertVerifier> = verifier.build().map_err(TlsError::Verifier)?;
            match allowed.is_empty() {
                true => builder.with_client_cert_verifier(inner),
                false => {
                    builder.with_client_cert_verifier(Arc::new(NamedClients { inner, allowed: Arc::clone(allowed) }))
                }
            }
        }
    };
    let no_key = || TlsError::Pair(rustls::Error::General("no key".to_owned()));
    let key = material.key.as_ref().ok_or_else(no_key)?.clone_key();
    let mut config = builder.with_single_cert(material.chain.clone(), key).map_err(TlsError::Pair)?;
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    Ok(config)
}
