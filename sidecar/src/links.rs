//! What the config says of trust and TLS, made ready for both kinds of links: requests that come in, streams to balancers.

use std::sync::Arc;

use fovea_gossip::auth::SharedKey;
use fovea_service::config::KeyError;
use fovea_service::tls::client::ClientTls;
use fovea_service::tls::files::TlsError;
use fovea_service::tls::metrics::TlsMetrics;
use fovea_service::tls::reload::Watched;
use fovea_service::tls::server::ServerTls;

use crate::config::Config;
use crate::gossip::link::{Credentials, PROTOCOLS};

/// ALPN names of `listen`.
const HTTP_PROTOCOLS: &[&[u8]] = &[b"http/1.1"];

#[derive(Debug, thiserror::Error)]
pub enum LinksError {
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error("{block}: TLS cannot be set up")]
    Tls {
        block: &'static str,
        #[source]
        source: TlsError,
    },
}

/// All links.
pub struct Links {
    /// Of `listen`; `None` = plain.
    pub requests: Option<Arc<ServerTls>>,
    /// Of streams to balancers.
    pub balancers: Credentials,
    /// Shared key that balancers send with requests.
    pub key: Option<Vec<u8>>,
    /// All files to be looked at again.
    pub watched: Vec<Arc<dyn Watched>>,
}

impl Links {
    /// Reads keys and certificates. Blocking.
    ///
    /// # Errors
    /// When a file cannot be read, or does not hold what it should.
    pub fn load(config: &Config, metrics: &TlsMetrics) -> Result<Self, LinksError> {
        let key = config.trust.key()?;
        let balancers = Credentials { tls: None, key: key.as_deref().map(SharedKey::new) };
        let mut links = Self { requests: None, balancers, key, watched: Vec::new() };
        let failed = |block| move |source| LinksError::Tls { block, source };
        if let Some(tls) = &config.tls {
            let tls = Arc::new(ServerTls::load("tls", tls, HTTP_PROTOCOLS, metrics).map_err(failed("tls"))?);
            links.watched.push(Arc::<ServerTls>::clone(&tls));
            links.requests = Some(tls);
        }
        if let Some(tls) = &config.gossip.tls {
            let tls = ClientTls::load("gossip.tls", tls, PROTOCOLS, metrics).map_err(failed("gossip.tls"))?;
            let tls = Arc::new(tls);
            links.watched.push(Arc::<ClientTls>::clone(&tls));
            links.balancers.tls = Some(tls);
        }
        Ok(links)
    }
}
