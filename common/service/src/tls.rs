//! TLS between our programs and towards clients: rustls over ring, certificates that are replaced without a restart.
//!
//! A [`server::ServerTls`] accepts, a [`client::ClientTls`] dials; both hold what their files said last, and [`reload::watch`] reads the files
//! again and again.
//!
//! **Invariant:** files that do not fit together never replace what works: the old certificates stay in use, and the log says so once.
//! **Invariant:** a peer is believed by a chain to `ca_file` and, where `allowed_names` is given, by one of these names; the clock decides
//! expiry, nothing else does. Revocation lists are not read: certificates should live for hours or days.

mod certificate;
pub mod client;
pub mod config;
pub mod files;
pub mod handshake;
pub mod metrics;
mod names;
pub mod reload;
pub mod server;
pub mod socket;

use std::sync::Arc;

use tokio_rustls::rustls::crypto::{CryptoProvider, ring};

pub use tokio_rustls;

/// The one provider of all our configs.
pub(crate) fn provider() -> Arc<CryptoProvider> {
    Arc::new(ring::default_provider())
}

/// Random bytes fit for nonces and keys.
///
/// # Errors
/// When the operating system gives none.
pub fn random<const N: usize>() -> std::io::Result<[u8; N]> {
    let mut bytes = [0; N];
    let filled = ring::default_provider().secure_random.fill(&mut bytes);
    filled.map_err(|_| std::io::Error::other("the operating system gives no random bytes"))?;
    Ok(bytes)
}

#[cfg(test)]
mod tests;
