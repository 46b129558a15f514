//! The dialling end.

use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::client::WebPkiServerVerifier;
use tokio_rustls::rustls::client::danger::ServerCertVerifier;
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{self, ClientConfig, RootCertStore};

use super::config::ClientTlsConfig;
use super::files::{Files, Material, TlsError};
use super::handshake::HandshakeError;
use super::metrics::{HandshakeEnd, HandshakeLabels, TlsMetrics};
use super::names::NamedServers;
use super::provider;
use super::reload::{Looked, Reloading, Watched};

/// Certificates of one kind of link.
pub struct ClientTls {
    config: Reloading<Arc<ClientConfig>>,
    name: Option<ServerName<'static>>,
    /// The dialled host does not matter: a list of names does.
    by_list: bool,
}

impl ClientTls {
    /// Reads the files. `protocols`: ALPN, the most wanted first. Blocking.
    ///
    /// # Errors
    /// When the files make no TLS, or `server_name` is no name.
    pub fn load(
        link: &'static str,
        config: &ClientTlsConfig,
        protocols: &'static [&'static [u8]],
        metrics: &TlsMetrics,
    ) -> Result<Self, TlsError> {
        let name = config.server_name.as_deref().map(server_name).transpose()?;
        let files =
            Files { cert: config.cert_file.clone(), key: config.key_file.clone(), ca: Some(config.ca_file.clone()) };
        let allowed: Arc<[String]> = config.allowed_names.clone().into();
        let by_list = !allowed.is_empty();
        let make = move |material: &Material| client_config(material, &allowed, protocols).map(Arc::new);
        Ok(Self { config: Reloading::load(link, files, metrics, make)?, name, by_list })
    }

    /// Which certificates are in use: grows with each replacement.
    pub fn generation(&self) -> u64 {
        self.config.get().generation
    }

    /// Must the dialled host's name be known, to check the certificate?
    pub fn needs_host(&self) -> bool {
        self.name.is_none() && !self.by_list
    }

    /// The handshake on a connection to `host` (a DNS name or an address, without port). The caller sets its time limit.
    ///
    /// # Errors
    /// When it fails; counted here, to be logged by the caller.
    pub async fn connect<S>(&self, host: &str, stream: S) -> Result<TlsStream<S>, HandshakeError>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let config = Arc::clone(&self.config.get().value);
        let name = match &self.name {
            Some(name) => Ok(name.clone()),
            None => server_name(host),
        };
        let connected = match name {
            Ok(name) => TlsConnector::from(config).connect(name, stream).await,
            Err(error) => Err(std::io::Error::other(error)),
        };
        let connected = connected.map_err(HandshakeError::from);
        let end = connected.as_ref().err().map_or(HandshakeEnd::Done, |error| error.end);
        self.config.metrics.handshakes.get_or_create(&HandshakeLabels { link: self.config.link(), end }).inc();
        connected
    }
}

impl Watched for ClientTls {
    fn look(&self) -> Looked {
        self.config.look()
    }
}

/// A host, also an address in brackets.
fn server_name(host: &str) -> Result<ServerName<'static>, TlsError> {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host);
    let name = ServerName::try_from(bare.to_owned());
    name.map_err(|_| TlsError::ServerName { name: host.chars().take(200).collect() })
}

fn client_config(material: &Material, allowed: &Arc<[String]>, protocols: &[&[u8]]) -> Result<ClientConfig, TlsError> {
    let provider = provider();
    let roots = material.roots.clone().unwrap_or_else(|| Arc::new(RootCertStore::empty()));
    let verifier: Arc<dyn ServerCertVerifier> = match allowed.is_empty() {
        true => {
            let verifier = WebPkiServerVerifier::builder_with_provider(roots, Arc::clone(&provider));
            verifier.build().map_err(TlsError::Verifier)?
        }
        false => {
            let algorithms = provider.signature_verification_algorithms;
            Arc::new(NamedServers { roots, algorithms, allowed: Arc::clone(allowed) })
        }
    };
    let builder = ClientConfig::builder_with_provider(provider);
    let builder = builder.with_safe_default_protocol_versions().map_err(TlsError::Pair)?;
    let builder = builder.dangerous().with_custom_certificate_verifier(verifier);
    let mut config = match &material.key {
        Some(key) => {
            let pair = builder.with_client_auth_cert(material.chain.clone(), key.clone_key());
            pair.map_err(TlsError::Pair)?
        }
        None => builder.with_no_client_auth(),
    };
    config.alpn_protocols = protocols.iter().map(|protocol| protocol.to_vec()).collect();
    config.key_log = Arc::new(rustls::NoKeyLog {});
    Ok(config)
}
