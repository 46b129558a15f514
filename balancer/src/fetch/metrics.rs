//! What the fetcher counts.

use fovea_service::snake_case_labels;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use super::error::Reason;

/// Where a file came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Source {
    Origin,
    /// Kept here, and the origin said that it is unchanged.
    Revalidated,
    /// Kept here, and still fresh.
    Cache,
}

snake_case_labels!(Source);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct SourceLabels {
    pub source: Source,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RefusalLabels {
    pub reason: Reason,
}

#[derive(Clone, Debug)]
pub struct MediaMetrics {
    pub fetches: Family<SourceLabels, Counter>,
    pub refusals: Family<RefusalLabels, Counter>,
    pub shared: Counter,
    pub bytes: Counter,
    pub bytes_held: Gauge,
    pub seconds: Histogram,
}

impl MediaMetrics {
    /// Makes all families and registers them; `registry` carries the program's prefix.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self {
            fetches: Family::default(),
            refusals: Family::default(),
            shared: Counter::default(),
            bytes: Counter::default(),
            bytes_held: Gauge::default(),
            // 1 ms to 8 s.
            seconds: Histogram::new(std::iter::successors(Some(0.001), |bound| Some(bound * 2.0)).take(14)),
        };
        let r = registry;
        r.register("media_fetches", "Files fetched, by source", metrics.fetches.clone());
        r.register("media_refusals", "Files refused or failed, by reason", metrics.refusals.clone());
        r.register("media_shared", "Fetches that joined one under way", metrics.shared.clone());
        r.register("media_bytes", "Bytes read from origins", metrics.bytes.clone());
        r.register("media_bytes_held", "Fetched bytes in memory", metrics.bytes_held.clone());
        r.register_with_unit("media_fetch", "Whole fetches", Unit::Seconds, metrics.seconds.clone());
        metrics
    }
}
