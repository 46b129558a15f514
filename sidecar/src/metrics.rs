//! Every metric of the sidecar. `docs/operate/sidecar.md` explains each. Labels are closed sets and rank numbers (at most 256).

use std::sync::atomic::Ordering::Relaxed;

use fovea_gossip::auth::AuthError;
use fovea_kv::Tier;
use fovea_kv::event::Skipped;
use fovea_kv::replica::Count;
use fovea_service::label::Snake;
use fovea_service::tls::metrics::TlsMetrics;
use fovea_sidecar_core::publish::{Counters, Gauges};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;

use crate::gossip::link::LinkError;
use crate::gossip::stream::StreamError;
use crate::proxy::refusal::Outcome;

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RequestLabels {
    pub outcome: Outcome,
}

/// Why sidecar and balancer do not trust each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Refused {
    /// The balancer wants a shared key, and there is none here.
    KeyMissing,
    /// The balancer has no shared key.
    NoKeyThere,
    WrongKey,
    /// No TLS could be set up.
    Tls,
    /// The exchange broke off, or took too long.
    Unfinished,
}

fovea_service::snake_case_labels!(Refused);

impl Refused {
    /// `None` = the stream ended for another reason.
    pub fn of(error: &StreamError) -> Option<Self> {
        let StreamError::Link(error) = error else { return None };
        match error {
            LinkError::Dial { .. } => None,
            LinkError::Tls(_) => Some(Self::Tls),
            LinkError::Key(AuthError::KeyMissing) => Some(Self::KeyMissing),
            LinkError::Key(AuthError::NoKeyThere) => Some(Self::NoKeyThere),
            LinkError::Key(AuthError::WrongKey) => Some(Self::WrongKey),
            LinkError::Key(AuthError::Malformed) | LinkError::Broken(_) | LinkError::TooSlow => Some(Self::Unfinished),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RefusedLabels {
    pub cause: Refused,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct RankLabels {
    pub rank: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct TierLabels {
    pub rank: u32,
    pub tier: Snake<Tier>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct AnomalyLabels {
    pub rank: u32,
    pub what: Snake<Count>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct SkippedLabels {
    pub rank: u32,
    pub cause: Snake<Skipped>,
}

/// Why a block of the engine is not published, or was surprising.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Oddity {
    DuplicateStore,
    UnknownRemoval,
    UnmappedStore,
    OverLimit,
    OtherBlockSize,
    OtherAttention,
    SubtreeBlock,
}

fovea_service::snake_case_labels!(Oddity);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct OddityLabels {
    pub rank: u32,
    pub what: Oddity,
}

#[derive(Clone, Debug, Default)]
pub struct Metrics {
    pub proxy: ProxyMetrics,
    pub events: EventMetrics,
    pub gossip: GossipMetrics,
    pub tls: TlsMetrics,
    pub engine: EngineMetrics,
    pub closed_loop: LoopMetrics,
}

#[derive(Clone, Debug, Default)]
pub struct ProxyMetrics {
    pub requests: Family<RequestLabels, Counter>,
    pub connections_refused: Counter,
    pub running: Family<RankLabels, Gauge>,
    pub waiting: Family<RankLabels, Gauge>,
    pub prefill_tokens: Family<RankLabels, Gauge>,
    pub bodies_free_bytes: Gauge,
}

#[derive(Clone, Debug, Default)]
pub struct EventMetrics {
    pub connected: Family<RankLabels, Gauge>,
    pub complete: Family<RankLabels, Gauge>,
    pub batches: Family<RankLabels, Counter>,
    pub anomalies: Family<AnomalyLabels, Counter>,
    pub skipped: Family<SkippedLabels, Counter>,
    pub undecodable: Family<RankLabels, Counter>,
    pub malformed: Family<RankLabels, Counter>,
    pub resets: Family<RankLabels, Counter>,
    pub watermark: Family<RankLabels, Gauge>,
    pub held: Family<TierLabels, Gauge>,
    pub published: Family<TierLabels, Gauge>,
    pub orphans: Family<RankLabels, Gauge>,
    pub opaque: Family<RankLabels, Gauge>,
    pub oddities: Family<OddityLabels, Counter>,
}

#[derive(Clone, Debug, Default)]
pub struct GossipMetrics {
    pub streams: Gauge,
    pub dials_failed: Counter,
    pub streams_failed: Counter,
    pub frames: Counter,
    pub bytes: Counter,
    pub snapshots: Counter,
    pub resyncs: Counter,
    pub mismatches: Counter,
    pub repairs: Counter,
    pub refused: Family<RefusedLabels, Counter>,
}

#[derive(Clone, Debug, Default)]
pub struct EngineMetrics {
    pub up: Gauge,
    pub checks_failed: Counter,
    pub facts_changed: Counter,
}

/// One served model, and a verdict of [`fovea_sidecar_core::verify::Found::label`].
#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct VerdictLabels {
    pub model: String,
    pub verdict: &'static str,
}

#[derive(Clone, Debug, Default)]
pub struct LoopMetrics {
    pub verdicts: Family<VerdictLabels, Counter>,
    pub cached_tokens_predicted: Counter,
    pub cached_tokens_actual: Counter,
    pub facts: Gauge,
    pub media_trusted: Gauge,
}

impl Metrics {
    pub fn register(registry: &mut Registry) -> Self {
        let mut metrics = Self::default();
        metrics.proxy.register(registry);
        metrics.events.register(registry);
        metrics.gossip.register(registry);
        metrics.tls = TlsMetrics::register(registry.sub_registry_with_prefix("sidecar"));
        metrics.engine.register(registry);
        metrics.closed_loop.register(registry);
        metrics
    }
}

impl ProxyMetrics {
    fn register(&self, r: &mut Registry) {
        r.register("sidecar_requests", "Requests by how they ended", self.requests.clone());
        r.register(
            "sidecar_connections_refused",
            "Connections closed because limits.connections_max was reached",
            self.connections_refused.clone(),
        );
        r.register("sidecar_requests_running", "Requests between first and last byte", self.running.clone());
        r.register("sidecar_requests_waiting", "Requests without a first byte", self.waiting.clone());
        r.register(
            "sidecar_prefill_tokens",
            "Prompt tokens of waiting requests that no cache covers",
            self.prefill_tokens.clone(),
        );
        r.register("sidecar_bodies_free_bytes", "Room left under limits.bodies_max", self.bodies_free_bytes.clone());
    }
}

impl EventMetrics {
    fn register(&self, r: &mut Registry) {
        r.register("sidecar_events_connected", "1 = subscribed to the engine's events", self.connected.clone());
        r.register("sidecar_events_complete", "1 = nothing the engine holds is unknown", self.complete.clone());
        r.register("sidecar_event_batches", "Batches applied, in order", self.batches.clone());
        r.register("sidecar_event_anomalies", "What happened to the order of batches", self.anomalies.clone());
        r.register("sidecar_events_skipped", "Events left out of a batch", self.skipped.clone());
        r.register("sidecar_event_batches_undecodable", "Batches that could not be read", self.undecodable.clone());
        r.register("sidecar_event_messages_malformed", "Messages without sequence number", self.malformed.clone());
        r.register("sidecar_epochs", "Times all that was known became void", self.resets.clone());
        r.register("sidecar_event_watermark", "Highest batch applied without a gap; -1 = none", self.watermark.clone());
        r.register("sidecar_blocks_held", "Blocks the engine holds, by tier", self.held.clone());
        r.register("sidecar_blocks_published", "Blocks published, by level", self.published.clone());
        r.register("sidecar_blocks_orphaned", "Held blocks whose chain is unknown", self.orphans.clone());
        r.register("sidecar_blocks_opaque", "Held blocks with a key nobody can predict", self.opaque.clone());
        r.register("sidecar_block_oddities", "Blocks left out or surprising", self.oddities.clone());
    }

    /// Brings the figures of one rank's publisher up to date.
    pub fn show(&self, rank: u32, gauges: &Gauges, counters: &Counters) {
        let figure = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        for tier in Tier::ALL {
            let (labels, index) = (TierLabels { rank, tier: Snake(tier) }, usize::from(tier.index()));
            self.held.get_or_create(&labels).set(figure(gauges.held[index]));
            self.published.get_or_create(&labels).set(figure(gauges.published[index]));
        }
        self.orphans.get_or_create(&RankLabels { rank }).set(figure(gauges.orphans));
        self.opaque.get_or_create(&RankLabels { rank }).set(figure(gauges.opaque));
        for (what, count) in [
            (Oddity::DuplicateStore, counters.duplicate_stores),
            (Oddity::UnknownRemoval, counters.unknown_removals),
            (Oddity::UnmappedStore, counters.unmapped_stores),
            (Oddity::OverLimit, counters.over_limit),
            (Oddity::OtherBlockSize, counters.other_block_size),
            (Oddity::OtherAttention, counters.other_attention),
            (Oddity::SubtreeBlock, counters.subtree_blocks),
        ] {
            self.oddities.get_or_create(&OddityLabels { rank, what }).inner().store(count, Relaxed);
        }
    }
}

impl GossipMetrics {
    fn register(&self, r: &mut Registry) {
        r.register("sidecar_gossip_streams", "Balancers connected", self.streams.clone());
        r.register(
            "sidecar_gossip_dials_failed",
            "Dials that did not connect or were not welcomed",
            self.dials_failed.clone(),
        );
        r.register("sidecar_gossip_streams_failed", "Streams that broke", self.streams_failed.clone());
        r.register("sidecar_gossip_frames", "Frames sent", self.frames.clone());
        r.register("sidecar_gossip_bytes", "Bytes sent", self.bytes.clone());
        r.register("sidecar_gossip_snapshots", "Snapshots sent", self.snapshots.clone());
        r.register("sidecar_gossip_resyncs", "Snapshots that a balancer asked for", self.resyncs.clone());
        r.register("sidecar_gossip_mismatches", "Digests that a balancer found to differ", self.mismatches.clone());
        r.register("sidecar_gossip_repairs", "Repairs sent", self.repairs.clone());
        r.register("sidecar_gossip_refused", "Streams without trust, by cause", self.refused.clone());
    }
}

impl EngineMetrics {
    fn register(&self, r: &mut Registry) {
        r.register("sidecar_engine_up", "1 = the last look at the engine succeeded", self.up.clone());
        r.register("sidecar_engine_checks_failed", "Looks at the engine that failed", self.checks_failed.clone());
        r.register("sidecar_engine_facts_changed", "Times the engine's facts changed", self.facts_changed.clone());
    }
}

impl LoopMetrics {
    fn register(&self, r: &mut Registry) {
        r.register("sidecar_predictions", "Predicted requests by how the prediction turned out", self.verdicts.clone());
        r.register(
            "sidecar_cached_tokens_predicted",
            "Prompt tokens predicted to be cached, of requests whose engine says how many were",
            self.cached_tokens_predicted.clone(),
        );
        r.register("sidecar_cached_tokens", "Prompt tokens of these that were", self.cached_tokens_actual.clone());
        r.register("sidecar_media_facts", "Facts about media that balancers are told", self.facts.clone());
        r.register("sidecar_media_trusted", "1 = predictions of media are used", self.media_trusted.clone());
    }
}
