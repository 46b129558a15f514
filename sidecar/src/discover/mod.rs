//! Which balancers there are: addresses written down, names that are resolved again and again, services of Kubernetes.
//!
//! One task for each entry of `balancers` tells what it sees; [`set`] makes of it whom to dial and whom to leave. Streams tell by themselves
//! when a balancer is gone, so an entry that cannot be looked up at the moment keeps what it gave before.

#[cfg(feature = "kube")]
mod kubernetes;
mod names;
pub mod set;

use std::net::SocketAddr;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

pub use set::{Seen, Sight};

/// Begins an entry that names a Kubernetes service.
const KUBERNETES: &str = "kubernetes://";
/// Sights that wait to be looked at; more wait where they were seen.
const SIGHTS_MAX: usize = 64;

/// One entry of `balancers`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Entry {
    /// `host:port`.
    Name { host: String, name: String },
    /// `kubernetes://namespace/service:port`; the port is a number or a name of the service.
    Service { namespace: String, service: String, port: String },
}

/// Why an entry of `balancers` cannot be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BadEntry {
    NoPort,
    NoService,
    NoFeature,
}

impl Entry {
    /// # Errors
    /// When the text is neither form, or needs what this program was built without.
    pub fn parse(text: &str) -> Result<Self, BadEntry> {
        let Some(rest) = text.strip_prefix(KUBERNETES) else {
            let (host, port) = text.rsplit_once(':').ok_or(BadEntry::NoPort)?;
            let fine = !host.is_empty() && port.parse::<u16>().is_ok();
            return if fine { Ok(Self::Name { host: host.into(), name: text.into() }) } else { Err(BadEntry::NoPort) };
        };
        let (namespace, service) = rest.split_once('/').ok_or(BadEntry::NoService)?;
        let (service, port) = service.split_once(':').ok_or(BadEntry::NoService)?;
        let label = |text: &str| {
            let fine = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '.';
            (1..=253).contains(&text.len()) && text.chars().all(fine)
        };
        if !(label(namespace) && label(service) && label(port)) {
            return Err(BadEntry::NoService);
        }
        if !cfg!(feature = "kube") {
            return Err(BadEntry::NoFeature);
        }
        Ok(Self::Service { namespace: namespace.into(), service: service.into(), port: port.into() })
    }

    /// What a certificate of these balancers is for, unless the config says otherwise.
    pub fn host(&self) -> String {
        match self {
            Self::Name { host, .. } => host.clone(),
            Self::Service { namespace, service, .. } => format!("{service}.{namespace}.svc"),
        }
    }
}

/// Follows all entries until the stop; what they see comes out.
pub fn follow(entries: &[Entry], every: Duration, stop: &CancellationToken) -> mpsc::Receiver<Seen> {
    let (sender, seen) = mpsc::channel(SIGHTS_MAX);
    for (source, entry) in entries.iter().enumerate() {
        let (tell, stop) = (Teller { source, sender: sender.clone() }, stop.clone());
        match entry {
            Entry::Name { name, .. } => {
                let name = name.clone();
                let follow = async move { names::follow(&name, every, look_up, tell).await };
                tokio::spawn(async move { stop.run_until_cancelled(follow).await });
            }
            #[cfg(feature = "kube")]
            Entry::Service { namespace, service, port } => {
                let (namespace, service, port) = (namespace.clone(), service.clone(), port.clone());
                let follow = async move { kubernetes::follow(&namespace, &service, &port, tell).await };
                tokio::spawn(async move { stop.run_until_cancelled(follow).await });
            }
            #[cfg(not(feature = "kube"))]
            Entry::Service { .. } => drop((tell, stop)),
        }
    }
    seen
}

async fn look_up(name: String) -> std::io::Result<Vec<SocketAddr>> {
    Ok(tokio::net::lookup_host(name).await?.collect())
}

/// Where an entry's task tells what it sees.
struct Teller {
    source: usize,
    sender: mpsc::Sender<Seen>,
}

impl Teller {
    /// False when nobody listens any more.
    async fn tell(&self, sight: Sight) -> bool {
        self.sender.send(Seen { source: self.source, sight }).await.is_ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, expect: Result<&str, BadEntry>) {
        assert_eq!(Entry::parse(text).map(|entry| entry.host()), expect.map(str::to_owned), "{text}");
    }

    #[test]
    fn entries_are_names_with_a_port_or_services() {
        check("balancer:7400", Ok("balancer"));
        check("10.0.0.1:7400", Ok("10.0.0.1"));
        check("[::1]:7400", Ok("[::1]"));
        for text in ["balancer", ":7400", "balancer:x", "balancer:70000", ""] {
            check(text, Err(BadEntry::NoPort));
        }
        for text in ["kubernetes://", "kubernetes://a", "kubernetes://a/b", "kubernetes://a/:1", "kubernetes://a/b:1/c"]
        {
            check(text, Err(BadEntry::NoService));
        }
        let service = if cfg!(feature = "kube") { Ok("fovea-balancer.ml.svc") } else { Err(BadEntry::NoFeature) };
        check("kubernetes://ml/fovea-balancer:sync", service);
    }
}
