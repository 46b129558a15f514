//! Everything the balancer counts. All names start with `balancer_`; label values come from enums or config, never from clients.

use fovea_balancer_core::fleet::State;
use fovea_service::label::Snake;
use fovea_service::snake_case_labels;
use fovea_service::tls::metrics::TlsMetrics;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::diagnose::DiagnosisMetrics;
use crate::fetch::MediaMetrics;
use crate::front::{Demand, LineMetrics, SuspectMetrics};
use crate::models::pull::PullMetrics;
use crate::plain::PlainMetrics;
use crate::render::RenderMetrics;
use crate::sync::guard::Proven;
use crate::tenants::metrics::TenantMetrics;

/// What decided where a request went.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// Overlap and load, with every hash of the prompt known.
    Precise,
    /// Overlap and load, but overlap is an upper bound (hybrid attention).
    Approximate,
    /// Overlap and load, with only the front of the prompt known.
    Prefix,
    /// Load alone: by config, or for want of knowledge.
    Load,
    RoundRobin,
    Session,
}

/// Why a request was not answered by a worker, or not to its end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ErrorKind {
    BadRequest,
    /// No API key, or none of ours.
    Unauthorized,
    /// A tenant's or key's limits: requests per minute, prompt tokens per minute, requests at a time.
    RequestRate,
    TokenRate,
    Concurrency,
    NotFound,
    MethodNotAllowed,
    UnknownModel,
    /// Media that could not or must not be fetched.
    Media,
    BodyTooLarge,
    BodyTimeout,
    BodyBudget,
    Busy,
    NoWorker,
    /// Every worker had enough for too long.
    Saturated,
    /// Engines died under this request.
    Poison,
    Connect,
    UpstreamFailed,
    UpstreamTimeout,
    UpstreamBroke,
    ClientGone,
    Internal,
}

/// Messages of sidecars.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FrameKind {
    Hello,
    Snapshot,
    Delta,
    Load,
    Learnt,
    Digest,
    Repair,
    Embeddings,
    Heartbeat,
}

/// Why a sidecar's stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StreamEnd {
    /// The sidecar closed it.
    Closed,
    /// The connection broke.
    Broken,
    /// Nothing came for a long time.
    Silent,
    /// Bytes that are not a frame.
    BadFrame,
    /// A frame that must not come here.
    Protocol,
    /// The advertised URL cannot be used.
    BadUrl,
    /// Too many streams.
    Refused,
    /// Neither certificate nor key came in time.
    HandshakeTimeout,
    /// No TLS could be set up.
    Tls,
    /// A shared key is wanted, and the sidecar has none.
    KeyMissing,
    /// The sidecar has a shared key, and there is none here.
    NoKeyHere,
    /// The sidecar has another key.
    WrongKey,
    /// This balancer stops.
    Shutdown,
}

snake_case_labels!(Outcome, ErrorKind, FrameKind, StreamEnd);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct OutcomeLabels {
    pub outcome: Outcome,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct ErrorLabels {
    pub kind: ErrorKind,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct FrameLabels {
    pub kind: FrameKind,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct EndLabels {
    pub cause: StreamEnd,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct OpenedLabels {
    pub proven: Snake<Proven>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct StateLabels {
    pub state: Snake<State>,
}

#[derive(Clone, Debug)]
pub struct Metrics {
    pub decisions: Family<OutcomeLabels, Counter>,
    pub errors: Family<ErrorLabels, Counter>,
    pub retries: Counter,
    pub overlap_blocks: Counter,
    pub prompt_tokens: Counter,
    pub reused_tokens_predicted: Counter,
    pub request_seconds: Histogram,
    pub first_byte_seconds: Histogram,
    pub prepare_seconds: Histogram,
    pub requests_in_flight: Gauge,
    pub body_bytes_in_flight: Gauge,
    pub workers: Family<StateLabels, Gauge>,
    pub index_entries: Gauge,
    pub index_full: Counter,
    pub sync_streams: Gauge,
    pub sync_frames: Family<FrameLabels, Counter>,
    pub sync_ends: Family<EndLabels, Counter>,
    pub sync_resyncs: Counter,
    pub sync_digests: Counter,
    pub sync_digest_mismatches: Counter,
    pub sync_repaired_hashes: Counter,
    pub sync_opened: Family<OpenedLabels, Counter>,
    pub tls: TlsMetrics,
    pub media: MediaMetrics,
    pub models: PullMetrics,
    pub render: RenderMetrics,
    pub line: LineMetrics,
    pub suspects: SuspectMetrics,
    pub ejections: Counter,
    pub workers_ejected: Gauge,
    pub plain: PlainMetrics,
    pub tenants: TenantMetrics,
    pub demand: Demand,
    pub findings: DiagnosisMetrics,
}

/// 1 ms to 512 s.
fn slow() -> Histogram {
    Histogram::new(std::iter::successors(Some(0.001), |bound| Some(bound * 2.0)).take(20))
}

/// 50 µs to 1.6 s.
fn fast() -> Histogram {
    Histogram::new(std::iter::successors(Some(0.000_05), |bound| Some(bound * 2.0)).take(16))
}

impl Metrics {
    /// Makes all families and registers them under `balancer_`.
    pub fn register(registry: &mut Registry) -> Self {
        let demand = Demand::register(registry);
        let registry = registry.sub_registry_with_prefix("balancer");
        let metrics = Self {
            decisions: Family::default(),
            errors: Family::default(),
            retries: Counter::default(),
            overlap_blocks: Counter::default(),
            prompt_tokens: Counter::default(),
            reused_tokens_predicted: Counter::default(),
            request_seconds: slow(),
            first_byte_seconds: slow(),
            prepare_seconds: fast(),
            requests_in_flight: Gauge::default(),
            body_bytes_in_flight: Gauge::default(),
            workers: Family::default(),
            index_entries: Gauge::default(),
            index_full: Counter::default(),
            sync_streams: Gauge::default(),
            sync_frames: Family::default(),
            sync_ends: Family::default(),
            sync_resyncs: Counter::default(),
            sync_digests: Counter::default(),
            sync_digest_mismatches: Counter::default(),
            sync_repaired_hashes: Counter::default(),
            sync_opened: Family::default(),
            tls: TlsMetrics::register(registry),
            media: MediaMetrics::register(registry),
            models: PullMetrics::register(registry),
            render: RenderMetrics::register(registry),
            line: LineMetrics::register(registry),
            suspects: SuspectMetrics::register(registry),
            ejections: Counter::default(),
            workers_ejected: Gauge::default(),
            plain: PlainMetrics::register(registry),
            tenants: TenantMetrics::register(registry),
            demand,
            findings: DiagnosisMetrics::register(registry),
        };
        metrics.register_requests(registry);
        metrics.register_workers(registry);
        metrics
    }

    fn register_requests(&self, r: &mut Registry) {
        r.register("decisions", "Requests routed, by what decided", self.decisions.clone());
        r.register("errors", "Requests refused or broken off, by cause", self.errors.clone());
        r.register("retries", "Requests sent to a second worker", self.retries.clone());
        r.register("overlap_blocks", "Blocks that the chosen workers held", self.overlap_blocks.clone());
        r.register("prompt_tokens", "Prompt tokens routed, as far as known", self.prompt_tokens.clone());
        let reused = "Prompt tokens that the chosen workers were expected to reuse";
        r.register("reused_tokens_predicted", reused, self.reused_tokens_predicted.clone());
        let seconds = || Unit::Seconds;
        r.register_with_unit("request", "Whole requests", seconds(), self.request_seconds.clone());
        r.register_with_unit("first_byte", "To the first response byte", seconds(), self.first_byte_seconds.clone());
        r.register_with_unit("prepare", "From body to hashes", seconds(), self.prepare_seconds.clone());
        r.register("requests_in_flight", "Requests being served", self.requests_in_flight.clone());
        r.register("body_bytes_in_flight", "Budget taken by request bodies", self.body_bytes_in_flight.clone());
    }

    fn register_workers(&self, r: &mut Registry) {
        r.register("workers", "Workers, by state", self.workers.clone());
        r.register("workers_ejected", "Workers left out because they failed", self.workers_ejected.clone());
        r.register("ejections", "Times that a worker was left out", self.ejections.clone());
        r.register("index_entries", "(block, worker) pairs in all indexes", self.index_entries.clone());
        r.register("index_full", "Workers taken out of a full index", self.index_full.clone());
        r.register("sync_streams", "Connected sidecars", self.sync_streams.clone());
        r.register("sync_frames", "Frames from sidecars, by kind", self.sync_frames.clone());
        r.register("sync_ends", "Ends of sidecar streams, by cause", self.sync_ends.clone());
        r.register("sync_resyncs", "Snapshots asked for", self.sync_resyncs.clone());
        r.register("sync_digests", "Digests compared with the index", self.sync_digests.clone());
        r.register("sync_digest_mismatches", "Digests that differed", self.sync_digest_mismatches.clone());
        r.register("sync_repaired_hashes", "Hashes sent again in repairs", self.sync_repaired_hashes.clone());
        r.register("sync_opened", "Streams of sidecars, by what these proved", self.sync_opened.clone());
    }

    pub fn error(&self, kind: ErrorKind) {
        self.errors.get_or_create(&ErrorLabels { kind }).inc();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_carry_prefix_unit_and_snake_case_labels() {
        let mut registry = Registry::default();
        let metrics = Metrics::register(&mut registry);
        metrics.error(ErrorKind::UnknownModel);
        metrics.request_seconds.observe(0.5);
        metrics.workers.get_or_create(&StateLabels { state: Snake(State::Up) }).set(2);
        let mut page = String::new();
        prometheus_client::encoding::text::encode(&mut page, &registry).unwrap();
        for line in [
            r#"balancer_errors_total{kind="unknown_model"} 1"#,
            "balancer_request_seconds_count 1",
            r#"balancer_workers{state="up"} 2"#,
        ] {
            assert!(page.contains(line), "{line} not in:\n{page}");
        }
    }
}
