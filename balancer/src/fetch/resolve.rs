//! From names to addresses.

use std::io;
use std::net::{IpAddr, ToSocketAddrs as _};
use std::sync::Arc;

use async_trait::async_trait;
use tokio::sync::{Semaphore, oneshot};

/// Lookups at a time; more wait within their fetch's time. A thread each, idle but for the wait.
const LOOKUPS_MAX: usize = 64;

/// Asked once for each exchange; every answer is checked, and none is kept.
#[async_trait]
pub trait Resolve: Send + Sync {
    /// All addresses of a host name.
    async fn resolve(&self, host: &str) -> io::Result<Vec<IpAddr>>;
}

/// The system's own resolver, with its hosts file and search list.
///
/// Lookups block for as long as a name server pleases, so they have threads of their own: a hostile one takes none from requests being prepared.
pub struct System(Arc<Semaphore>);

impl Default for System {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(LOOKUPS_MAX)))
    }
}

#[async_trait]
impl Resolve for System {
    async fn resolve(&self, host: &str) -> io::Result<Vec<IpAddr>> {
        let slot = Arc::clone(&self.0).acquire_owned().await.map_err(io::Error::other)?;
        let (answer, answered) = oneshot::channel();
        let host = host.to_owned();
        std::thread::Builder::new().name("resolve".to_owned()).spawn(move || {
            let _slot = slot;
            let found = (host.as_str(), 0).to_socket_addrs();
            // Nobody waits any more when the fetch ran out of time.
            let _ = answer.send(found.map(|found| found.map(|address| address.ip()).collect()));
        })?;
        answered.await.map_err(io::Error::other)?
    }
}
