//! The clients' side: HTTP on pingora-core's connection layer, one request after another on each connection.
//!
//! The accept loop is our own: ports are known before anything serves, and shutdown waits for requests and no longer.
//! **Invariant:** nothing here parses prompts, hashes or decodes on a network thread; that is [`plan`], on the blocking pool.

mod accept;
mod attempt;
mod body;
mod complete;
mod conn;
mod dial;
mod fingerprint;
mod forward;
mod gate;
mod headers;
mod line;
mod media;
mod permits;
mod plan;
mod refusal;
mod respond;
mod retry;
mod suspects;
mod tries;
mod truth;
mod usage;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use async_trait::async_trait;
use fovea_balancer_core::quarantine::Quarantine;
use fovea_media::estimate::VideoHints;
use http::{HeaderValue, Method};
use pingora_core::apps::{HttpPersistentSettings, HttpServerApp, HttpServerOptions, ReusedHttpStream};
use pingora_core::protocols::http::ServerSession;
use pingora_core::server::ShutdownWatch;
use prometheus_client::metrics::gauge::Gauge;
use tokio_util::sync::CancellationToken;

pub use accept::serve;
pub use gate::Keys;
pub use line::LineMetrics;
pub use permits::media_threads;
pub use suspects::SuspectMetrics;
pub use truth::Demand;

use crate::config::BalancerConfig;
use crate::config::media::UnmeasuredVideos;
use crate::fetch::Fetcher;
use crate::metrics::{ErrorKind, Metrics};
use crate::models::Models;
use crate::prepare::ApiPath;
use crate::render::Asker;
use crate::secure::Access;
use crate::tenants::{Caller, Refused};
use crate::workers::Workers;
use dial::Dial;
use plan::Planner;
use refusal::Refusal;

/// Everything that serving a client needs.
pub struct Front {
    config: BalancerConfig,
    /// Proves this balancer to sidecars.
    key: Option<HeaderValue>,
    /// Of clients and engines.
    keys: Keys,
    workers: Arc<Workers>,
    planner: Arc<Planner>,
    fetcher: Fetcher,
    metrics: Metrics,
    budget: body::Budget,
    retries: retry::RetryBudget,
    /// Requests prepared at a time.
    permits: permits::Permits,
    line: Arc<line::Line>,
    suspects: Arc<suspects::Suspects>,
    connector: Dial,
    options: HttpServerOptions,
    stop: CancellationToken,
    /// Counts requests; with `seed` it makes request ids.
    turn: AtomicU64,
    seed: u64,
}

/// How a request ended.
enum End {
    /// Answered whole; the connection may serve another.
    Answered,
    /// The connection is of no more use.
    Broken,
}

/// What a request's life is named and timed by.
struct Context {
    id: String,
    turn: u64,
    began: Instant,
    /// By the request's headers.
    videos: VideoHints,
    /// By its API key.
    caller: Result<Caller, Refused>,
}

struct Counted(Gauge);

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl Front {
    /// To be called in a runtime.
    pub fn new(
        config: BalancerConfig,
        access: Access,
        workers: Arc<Workers>,
        models: Arc<Models>,
        fetcher: Fetcher,
        metrics: Metrics,
        stop: CancellationToken,
    ) -> Self {
        let mut options = HttpServerOptions::default();
        options.h2c = true;
        options.h2_idle_timeout = Some(config.timeouts.client_idle);
        let in_use = metrics.body_bytes_in_flight.clone();
        let (sidecars, connect) = (Arc::clone(&workers), config.timeouts.connect);
        let asking = Asker::new(&config.render, sidecars, metrics.render.clone(), access.clone(), connect);
        let renderer = asking.map(|(asker, renderer)| {
            tokio::spawn(asker.run(stop.clone()));
            renderer
        });
        let planner = Arc::new(Planner {
            workers: Arc::clone(&workers),
            models,
            renderer,
            embeddings_allowed: config.trust.client_embeddings,
            fetches: config.media.enabled,
            pixels_max: config.media.pixels_max,
            unmeasured_videos: config.media.unmeasured_videos == UnmeasuredVideos::Predict,
            estimate: config.estimate.clone(),
            demand: metrics.demand.clone(),
        });
        Self {
            budget: body::Budget::new(config.limits.bodies_max.as_u64(), config.timeouts.queue, in_use),
            retries: retry::RetryBudget::new(config.retry_percent),
            permits: permits::Permits::new(config.thread_count()),
            line: line::Line::new(config.queue, Arc::clone(&workers), metrics.line.clone()),
            suspects: suspects::Suspects::new(
                Quarantine::new(config.quarantine.into()),
                config.quarantine.trial,
                config.queue.wait_max / 4,
                config.quarantine.entries_max > 0,
                metrics.suspects.clone(),
            ),
            connector: Dial::new(access.tls.clone()),
            options,
            turn: AtomicU64::new(0),
            seed: std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), "request id"),
            config,
            key: access.key,
            keys: Keys::default(),
            workers,
            planner,
            fetcher,
            metrics,
            stop,
        }
    }

    /// The same, with keys of clients and engines; without these everybody may ask.
    #[must_use]
    pub fn with_keys(self, keys: Keys) -> Self {
        Self { keys, ..self }
    }

    async fn serve_request(&self, client: &mut ServerSession) -> End {
        self.metrics.requests_in_flight.inc();
        let _counted = Counted(self.metrics.requests_in_flight.clone());
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let id = headers::request_id(&client.req_header().headers)
            .unwrap_or_else(|| format!("{:016x}{turn:016x}", self.seed));
        let text = |name: &str| client.req_header().headers.get(name)?.to_str().ok();
        let (began, videos) = (Instant::now(), VideoHints::read(text));
        let caller = self.keys.tenants.find(&client.req_header().headers);
        let context = Context { id, turn, began, videos, caller };
        let end = match self.route_path(client, &context).await {
            Ok(end) => end,
            Err(refusal) => {
                self.metrics.error(refusal.kind);
                respond::refuse(client, &refusal, &context.id).await
            }
        };
        self.metrics.request_seconds.observe(context.began.elapsed().as_secs_f64());
        end
    }

    async fn route_path(&self, client: &mut ServerSession, context: &Context) -> Result<End, Refusal> {
        let head = client.req_header();
        let post = head.method == Method::POST;
        let get = head.method == Method::GET || head.method == Method::HEAD;
        match head.uri.path() {
            "/v1/chat/completions" if post => self.let_in(client, ApiPath::ChatCompletions, context).await,
            "/v1/completions" if post => self.let_in(client, ApiPath::Completions, context).await,
            "/v1/models" if get => {
                self.caller(context)?;
                Ok(respond::json(client, respond::models(&self.workers), &context.id).await)
            }
            path if get && path.starts_with(truth::MODEL_PAGES) => {
                self.caller(context)?;
                let name = path[truth::MODEL_PAGES.len()..].to_owned();
                self.model_page(client, &name, context).await
            }
            "/health" if get => Ok(respond::json(client, br#"{"status":"ok"}"#.to_vec(), &context.id).await),
            "/ready" if get && self.ready() => {
                Ok(respond::json(client, br#"{"status":"ready"}"#.to_vec(), &context.id).await)
            }
            "/ready" if get => {
                let why = self.not_ready().unwrap_or_default();
                Err(Refusal::busy(ErrorKind::NoWorker, &why, context.turn))
            }
            "/v1/chat/completions" | "/v1/completions" => {
                Err(Refusal::new(ErrorKind::MethodNotAllowed, "only POST is served here"))
            }
            "/v1/models" | "/health" | "/ready" => {
                Err(Refusal::new(ErrorKind::MethodNotAllowed, "only GET is served here"))
            }
            _ => {
                let message =
                    "no such path; served are /v1/chat/completions, /v1/completions, /v1/models, /health, /ready";
                Err(Refusal::new(ErrorKind::NotFound, message))
            }
        }
    }
}

#[async_trait]
impl HttpServerApp for Front {
    fn server_options(&self) -> Option<&HttpServerOptions> {
        Some(&self.options)
    }

    async fn process_new_http(
        self: &Arc<Self>,
        mut client: ServerSession,
        _shutdown: &ShutdownWatch,
    ) -> Option<ReusedHttpStream> {
        let timeouts = &self.config.timeouts;
        client.set_read_timeout(Some(timeouts.client_headers));
        let head = tokio::time::timeout(timeouts.client_idle + timeouts.client_headers, client.read_request());
        let head = tokio::select! {
            // A request that is here already is served even while stopping.
            biased;
            head = head => head.ok()?,
            () = self.stop.cancelled() => return None,
        };
        match head {
            Ok(true) if headers::has_one_framing(&client.req_header().headers) => {}
            Ok(false) => return None,
            told => {
                let error = told.err().map(|error| error.to_string());
                tracing::debug!(error, "request head is malformed");
                self.metrics.error(ErrorKind::BadRequest);
                let _ = client.respond_error(400).await;
                client.shutdown().await;
                return None;
            }
        }
        client.set_read_timeout(Some(timeouts.client_body));
        client.set_write_timeout(Some(timeouts.client_write));
        // An HTTP/1.0 client is told the end of an answer by the end of the connection. The HTTP layer has switched reuse off where
        // the client asked for that, or sent both a length and chunks.
        let http_1_0 = client.req_header().version == http::Version::HTTP_10;
        let keep = !self.stop.is_cancelled() && !http_1_0 && client.get_keepalive().is_some();
        client.set_keepalive(keep.then_some(timeouts.client_idle.as_secs().max(1)));
        match self.serve_request(&mut client).await {
            End::Answered => {
                let settings = HttpPersistentSettings::for_session(&client);
                let stream = client.finish().await.ok().flatten()?;
                Some(ReusedHttpStream::from_reusable_stream(stream, settings))
            }
            End::Broken => {
                client.shutdown().await;
                None
            }
        }
    }
}
