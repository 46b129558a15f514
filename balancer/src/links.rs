//! What the config says of trust and TLS, made ready for the three kinds of links: clients, sidecars' streams, requests to sidecars.

use std::sync::Arc;

use fovea_gossip::auth::SharedKey;
use fovea_service::config::KeyError;
use fovea_service::secret::shared_key;
use fovea_service::tls::client::ClientTls;
use fovea_service::tls::files::TlsError;
use fovea_service::tls::metrics::TlsMetrics;
use fovea_service::tls::reload::Watched;
use fovea_service::tls::server::ServerTls;
use http::HeaderValue;

use crate::config::BalancerConfig;
use crate::secure::{Access, SidecarTls};
use crate::sync::guard::Guard;
use crate::{secure, sync};

/// ALPN names for clients, the most wanted first.
const CLIENT_PROTOCOLS: &[&[u8]] = &[b"h2", b"http/1.1"];

#[derive(Debug, thiserror::Error)]
pub enum LinkError {
    #[error("{block}: TLS cannot be set up")]
    Tls {
        block: &'static str,
        #[source]
        source: TlsError,
    },
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error("trust.shared_key has characters that no header takes: use letters, digits and punctuation")]
    KeyCharacters,
}

/// All links.
#[derive(Default)]
pub struct Links {
    /// Towards clients; `None` = plain.
    pub clients: Option<Arc<ServerTls>>,
    /// Of the sync port.
    pub guard: Guard,
    /// Of requests to sidecars.
    pub access: Access,
    /// All files to be looked at again.
    pub watched: Vec<Arc<dyn Watched>>,
}

impl Links {
    /// Reads keys and certificates. Blocking.
    ///
    /// # Errors
    /// When a file cannot be read, or does not hold what it should.
    pub fn load(config: &BalancerConfig, metrics: &TlsMetrics) -> Result<Self, LinkError> {
        let trust = &config.trust;
        let key = shared_key(&trust.shared_key, trust.shared_key_file.as_deref())?;
        let mut links = Self::default();
        links.guard.key = key.as_deref().map(SharedKey::new);
        links.access.key = key.map(|key| header(&key)).transpose()?;
        let failed = |block| move |source| LinkError::Tls { block, source };
        if let Some(tls) = &config.tls {
            let tls = ServerTls::load("tls", tls, CLIENT_PROTOCOLS, metrics).map_err(failed("tls"))?;
            links.clients = Some(links.watch(tls));
        }
        if let Some(tls) = &config.sync_tls {
            let protocols = sync::guard::PROTOCOLS;
            let tls = ServerTls::load("sync_tls", tls, protocols, metrics).map_err(failed("sync_tls"))?;
            links.guard.tls = Some(links.watch(tls));
        }
        if let Some(tls) = &config.sidecar_tls {
            let protocols = secure::PROTOCOLS;
            let tls = ClientTls::load("sidecar_tls", tls, protocols, metrics).map_err(failed("sidecar_tls"))?;
            let tls = links.watch(SidecarTls::new(tls));
            links.guard.sidecars = Some(Arc::clone(&tls));
            links.access.tls = Some(tls);
        }
        Ok(links)
    }

    fn watch<T: Watched + 'static>(&mut self, tls: T) -> Arc<T> {
        let tls = Arc::new(tls);
        self.watched.push(Arc::<T>::clone(&tls));
        tls
    }
}

/// The key as it goes out, never to be logged.
fn header(key: &[u8]) -> Result<HeaderValue, LinkError> {
    let mut key = HeaderValue::from_bytes(key).map_err(|_| LinkError::KeyCharacters)?;
    key.set_sensitive(true);
    Ok(key)
}
