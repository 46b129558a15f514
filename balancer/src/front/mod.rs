//! The clients' side: HTTP on pingora-core's connection layer, one request after another on each connection.
//!
//! The accept loop is our own: ports are known before anything serves, and shutdown waits for requests and no longer.
//! **Invariant:** nothing here parses prompts, hashes or decodes on a network thread; that is [`plan`], on the blocking pool.

mod accept;
mod body;
mod forward;
mod headers;
mod media;
mod plan;
mod refusal;
mod respond;
mod retry;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use async_trait::async_trait;
use bytes::Bytes;
use fovea_media::estimate::VideoHints;
use http::{HeaderValue, Method};
use pingora_core::apps::{HttpPersistentSettings, HttpServerApp, HttpServerOptions, ReusedHttpStream};
use pingora_core::connectors::http::Connector;
use pingora_core::protocols::http::ServerSession;
use pingora_core::server::ShutdownWatch;
use prometheus_client::metrics::gauge::Gauge;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;

pub use accept::serve;

use crate::config::BalancerConfig;
use crate::config::media::UnmeasuredVideos;
use crate::fetch::Fetcher;
use crate::metrics::{ErrorKind, Metrics, OutcomeLabels};
use crate::models::Models;
use crate::prepare::ApiPath;
use crate::render::Asker;
use crate::workers::{Route, Workers};
use forward::{Failed, Relayed, Upstream};
use plan::{Plan, Planned, Planner, Told};
use refusal::Refusal;

/// Everything that serving a client needs.
pub struct Front {
    config: BalancerConfig,
    /// Proves this balancer to sidecars.
    key: Option<HeaderValue>,
    workers: Arc<Workers>,
    planner: Arc<Planner>,
    fetcher: Fetcher,
    metrics: Metrics,
    budget: body::Budget,
    retries: retry::RetryBudget,
    /// Requests prepared at a time.
    cpu: Arc<Semaphore>,
    connector: Connector,
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
        key: Option<HeaderValue>,
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
        let asking = Asker::new(&config.render, sidecars, metrics.render.clone(), key.clone(), connect);
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
        });
        Self {
            budget: body::Budget::new(config.limits.bodies_max.as_u64(), config.timeouts.queue, in_use),
            retries: retry::RetryBudget::new(config.retry_percent),
            cpu: Arc::new(Semaphore::new(config.thread_count())),
            connector: Connector::new(None),
            options,
            turn: AtomicU64::new(0),
            seed: std::hash::BuildHasher::hash_one(&std::hash::RandomState::new(), "request id"),
            config,
            key,
            workers,
            planner,
            fetcher,
            metrics,
            stop,
        }
    }

    async fn serve_request(&self, client: &mut ServerSession) -> End {
        self.metrics.requests_in_flight.inc();
        let _counted = Counted(self.metrics.requests_in_flight.clone());
        let turn = self.turn.fetch_add(1, Ordering::Relaxed);
        let id = headers::request_id(&client.req_header().headers)
            .unwrap_or_else(|| format!("{:016x}{turn:016x}", self.seed));
        let text = |name: &str| client.req_header().headers.get(name)?.to_str().ok();
        let context = Context { id, turn, began: Instant::now(), videos: VideoHints::read(text) };
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
            "/v1/chat/completions" if post => self.complete(client, ApiPath::ChatCompletions, context).await,
            "/v1/completions" if post => self.complete(client, ApiPath::Completions, context).await,
            "/v1/models" if get => {
                Ok(respond::json(client, 200, respond::models(&self.workers), &context.id, None).await)
            }
            "/health" if get => Ok(respond::json(client, 200, br#"{"status":"ok"}"#.to_vec(), &context.id, None).await),
            "/ready" if get && self.ready() => {
                Ok(respond::json(client, 200, br#"{"status":"ready"}"#.to_vec(), &context.id, None).await)
            }
            "/ready" if get => {
                Err(Refusal::busy(ErrorKind::NoWorker, "no worker takes requests, or stopping", context.turn))
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

    /// Takes requests: not stopping, and a worker is there.
    pub fn ready(&self) -> bool {
        !self.stop.is_cancelled() && self.workers.any_ready(Instant::now())
    }

    async fn complete(&self, client: &mut ServerSession, path: ApiPath, context: &Context) -> Result<End, Refusal> {
        let reading = body::read(client, &self.budget, self.config.limits.body_max, context.turn);
        let reading = tokio::time::timeout(self.config.timeouts.client_body, reading);
        let (body, room) = reading.await.map_err(|_| body::timed_out())??;
        let mut plan = self.plan(path, body.clone(), context).await?;
        self.retries.earn();
        let mut answered = self.answer_of_a_worker(client, &plan, plan.body.as_ref().unwrap_or(&body), context).await;
        if let Err(Failed::Upstream(ErrorKind::NoWorker, _)) = answered {
            // The pool's workers may be in another one by now: their facts have changed since the plan was made.
            plan = self.plan(path, body.clone(), context).await?;
            answered = self.answer_of_a_worker(client, &plan, plan.body.as_ref().unwrap_or(&body), context).await;
        }
        drop((body, room));
        let (upstream, route) = match answered {
            Ok(answered) => answered,
            Err(Failed::ClientGone) => {
                self.metrics.error(ErrorKind::ClientGone);
                return Ok(End::Broken);
            }
            Err(Failed::Upstream(ErrorKind::NoWorker, _)) => return Err(plan::no_worker(context.turn)),
            Err(Failed::Upstream(kind, _)) => return Err(Refusal::new(kind, "the worker did not answer")),
        };
        let told = plan.told(self.workers.mode(), &route);
        self.count(&told, &route);
        Ok(self.relay(client, upstream, told, &route, context).await)
    }

    /// Looks at the body, fetches what it wants fetched, and looks again with that at hand.
    async fn plan(&self, path: ApiPath, body: Bytes, context: &Context) -> Result<Box<Plan>, Refusal> {
        let urls = match self.look(path, body.clone(), None, context).await? {
            Planned::Ready(plan) => return Ok(plan),
            Planned::Wants(urls) => urls,
        };
        let media = media::fetch(&self.fetcher, &self.config.media, &urls).await?;
        match self.look(path, body, Some(media), context).await? {
            Planned::Ready(plan) => Ok(plan),
            Planned::Wants(_) => Err(Refusal::new(ErrorKind::Internal, "the request could not be prepared")),
        }
    }

    async fn look(
        &self,
        path: ApiPath,
        body: Bytes,
        media: Option<media::Media>,
        context: &Context,
    ) -> Result<Planned, Refusal> {
        let busy = || Refusal::busy(ErrorKind::Busy, "too many requests are waiting; try again soon", context.turn);
        let slot = tokio::time::timeout(self.config.timeouts.queue, Arc::clone(&self.cpu).acquire_owned());
        let slot = slot.await.map_err(|_| busy())?.map_err(|_| busy())?;
        let (planner, began) = (Arc::clone(&self.planner), Instant::now());
        let (turn, videos) = (context.turn, context.videos);
        let planned = tokio::task::spawn_blocking(move || {
            let planned = planner.plan(path, &body, turn, videos, media);
            drop(slot);
            planned
        });
        let planned = planned.await.unwrap_or_else(|error| {
            tracing::error!(%error, request = context.id, "preparing a request failed");
            Err(Refusal::new(ErrorKind::Internal, "the request could not be prepared"))
        });
        self.metrics.prepare_seconds.observe(began.elapsed().as_secs_f64());
        planned
    }

    /// The head of an answer: from the chosen worker, or once from another when that one cannot be reached or refuses with 503.
    async fn answer_of_a_worker(
        &self,
        client: &mut ServerSession,
        plan: &Plan,
        body: &Bytes,
        context: &Context,
    ) -> Result<(Upstream, Route), Failed> {
        let choose = |avoid| self.workers.route(&plan.pool, &plan.ask(), avoid, Instant::now());
        let no_worker = || pingora_core::Error::new_str("no worker takes requests");
        let route = choose(None).ok_or_else(|| Failed::Upstream(ErrorKind::NoWorker, no_worker()))?;
        let first = Box::pin(self.try_worker(client, plan, &route, body, context)).await;
        let unserved = match &first {
            Ok(upstream) => upstream.head().status == http::StatusCode::SERVICE_UNAVAILABLE,
            Err(Failed::Upstream(kind, _)) => *kind != ErrorKind::UpstreamTimeout,
            Err(Failed::ClientGone) => false,
        };
        let avoid = route.booked.key;
        // A worker that did not answer has nothing to carry from here.
        let first = first.map(|upstream| (upstream, route));
        if !unserved {
            return first;
        }
        let Some(route) = choose(Some(avoid)).filter(|_| self.retries.spend()) else { return first };
        self.metrics.retries.inc();
        match (first, Box::pin(self.try_worker(client, plan, &route, body, context)).await) {
            // An engine that says why it cannot serve tells the client more than a second one that says nothing.
            (Ok(busy), Err(Failed::Upstream(..))) => Ok(busy),
            (first, second) => {
                if let Ok((busy, _)) = first {
                    busy.give_up().await;
                }
                second.map(|upstream| (upstream, route))
            }
        }
    }

    async fn try_worker(
        &self,
        client: &mut ServerSession,
        plan: &Plan,
        route: &Route,
        body: &Bytes,
        context: &Context,
    ) -> Result<Upstream, Failed> {
        let invalid = |error| Failed::Upstream(ErrorKind::Internal, error);
        let address = forward::address(&route.url)
            .ok_or_else(|| invalid(pingora_core::Error::new_str("worker has no usable address")))?;
        let preamble = Bytes::from(plan.preamble(route));
        let outgoing = headers::Outgoing {
            path: client.req_header().uri.path(),
            authority: &address.to_string(),
            request_id: &context.id,
            content_bytes: preamble.len() + body.len(),
            preamble_bytes: preamble.len(),
            key: self.key.as_ref(),
        };
        let timeouts = &self.config.timeouts;
        let request = forward::Request {
            head: headers::to_sidecar(&client.req_header().headers, &outgoing).map_err(invalid)?,
            preamble,
            body: body.clone(),
            head_wait: if plan.prepared.stream { timeouts.first_byte } else { timeouts.total },
        };
        let answered = forward::exchange(&self.connector, client, address, &request, timeouts).await;
        if let Err(Failed::Upstream(_, error)) = &answered {
            forward::log_failure(&route.name, route.booked.key, error);
        }
        answered
    }

    async fn relay(
        &self,
        client: &mut ServerSession,
        upstream: Upstream,
        told: Told,
        route: &Route,
        context: &Context,
    ) -> End {
        let explained = self.config.debug_headers.then_some((&told, route));
        let Ok(head) = respond::head(client, upstream.head(), &context.id, explained) else {
            upstream.give_up().await;
            self.metrics.error(ErrorKind::Internal);
            return End::Broken;
        };
        let status = head.status;
        let first_byte = || {
            // An engine that refuses a request caches nothing of it.
            if status.is_success() {
                route.booked.started();
            }
            self.metrics.first_byte_seconds.observe(context.began.elapsed().as_secs_f64());
        };
        let relayed = forward::relay(&self.connector, client, upstream, head, first_byte).await;
        tracing::debug!(
            request = context.id,
            model = told.model,
            worker = %route.name,
            status = status.as_u16(),
            prompt_tokens = told.prompt_tokens,
            reused_tokens = route.reused_tokens,
            seconds = context.began.elapsed().as_secs_f64(),
            end = ?relayed,
            "request served"
        );
        match relayed {
            Relayed::Whole => return End::Answered,
            Relayed::ClientGone => self.metrics.error(ErrorKind::ClientGone),
            Relayed::UpstreamBroke => self.metrics.error(ErrorKind::UpstreamBroke),
        }
        End::Broken
    }

    fn count(&self, told: &Told, route: &Route) {
        self.metrics.decisions.get_or_create(&OutcomeLabels { outcome: told.outcome }).inc();
        self.metrics.overlap_blocks.inc_by(u64::from(route.confirmed_blocks));
        self.metrics.prompt_tokens.inc_by(u64::from(told.prompt_tokens));
        self.metrics.reused_tokens_predicted.inc_by(u64::from(route.reused_tokens));
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
            Ok(true) => {}
            Ok(false) => return None,
            Err(error) => {
                tracing::debug!(%error, "request head is malformed");
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
