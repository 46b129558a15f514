//! What TLS counts. Label `link` = the config block.

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::{Registry, Unit};

use crate::snake_case_labels;

/// What new content of the files came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReloadEnd {
    Replaced,
    Failed,
}

/// How a handshake ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HandshakeEnd {
    Done,
    TimedOut,
    /// The peer closed the connection.
    Closed,
    /// The peer does not speak TLS.
    NotTls,
    /// The peer showed no certificate.
    NoCertificate,
    /// Its certificate is not signed by `ca_file`.
    UnknownIssuer,
    /// Its certificate has expired or is not valid yet.
    Expired,
    /// Its certificate is for another name.
    WrongName,
    /// The peer did not take ours.
    RefusedByPeer,
    Other,
}

snake_case_labels!(ReloadEnd, HandshakeEnd);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct LinkLabels {
    pub link: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ReloadLabels {
    pub link: &'static str,
    pub end: ReloadEnd,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct HandshakeLabels {
    pub link: &'static str,
    pub end: HandshakeEnd,
}

#[derive(Clone, Debug, Default)]
pub struct TlsMetrics {
    pub expires: Family<LinkLabels, Gauge>,
    pub reloads: Family<ReloadLabels, Counter>,
    pub handshakes: Family<HandshakeLabels, Counter>,
}

impl TlsMetrics {
    /// Makes all families and registers them; `registry` carries the program's prefix.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self::default();
        let expires = "End of our certificate, in seconds since 1970";
        registry.register_with_unit("tls_certificate_expires", expires, Unit::Seconds, metrics.expires.clone());
        registry.register("tls_reloads", "New certificates, by what came of them", metrics.reloads.clone());
        registry.register("tls_handshakes", "TLS handshakes, by how they ended", metrics.handshakes.clone());
        metrics
    }
}
