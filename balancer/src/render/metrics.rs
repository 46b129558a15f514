//! What asking renderers comes to.

use fovea_service::snake_case_labels;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::registry::Registry;

/// How one ask ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AskEnd {
    Learnt,
    /// A second image of the size becomes the same: asked once for a model.
    Repeats,
    /// It does not: what is learnt holds for the first image of a prompt.
    FirstOnly,
    /// The page is not there, or not for us.
    Closed,
    /// The engine takes no such image.
    Refused,
    /// No connection, or it broke.
    Connect,
    /// Any other status.
    Status,
    TooSlow,
    /// More bytes than we read.
    TooLarge,
    /// Bytes that are no such answer.
    Malformed,
    /// The image becomes more than is kept.
    TooLong,
    /// The engine's prompt differs from ours outside the image: its template or tokenizer is another.
    Disagrees,
    /// What is replaced cannot be told.
    Ambiguous,
}

snake_case_labels!(AskEnd);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct AskLabels {
    pub end: AskEnd,
}

#[derive(Clone, Debug)]
pub struct RenderMetrics {
    pub asks: Family<AskLabels, Counter>,
    pub dropped: Counter,
}

impl RenderMetrics {
    /// Makes all families and registers them; `registry` carries the program's prefix.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self { asks: Family::default(), dropped: Counter::default() };
        registry.register("render_asks", "Probes sent to renderers, by how it ended", metrics.asks.clone());
        registry.register("render_dropped", "Sizes not queued: the queue was full", metrics.dropped.clone());
        metrics
    }
}
