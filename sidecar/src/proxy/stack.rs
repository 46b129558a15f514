//! The whole request path, top to bottom in request order.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use fovea_gossip::{model_files as listed, preamble};
use fovea_kv::BlockSize;
use fovea_sidecar_core::verify::FlightId;
use http::{HeaderValue, Method, Request, Response};
use tokio_util::task::TaskTracker;
use tower::{ServiceBuilder, service_fn};

use super::answer::Answer;
use super::flight::{Flight, Predicted};
use super::forward::Forward;
use super::headers;
use super::model_files;
use super::paths::{self, Paths};
use super::prepare::{Bodies, Weight};
use super::refusal::{Outcome, Refusal};
use super::speaking::Speaking;
use super::step::{Next, pass, step};
use crate::body::{self, Body};
use crate::encode::{Encoding, Leases};
use crate::engine::dialect;
use crate::engine::version::Version;
use crate::metrics::{ProxyMetrics, RequestLabels};
use crate::state::State;

/// Longest answer to a reset, in bytes; a real one is a few words.
const RESET_ANSWER_MAX: usize = 64 << 10;

/// Of the body of a refused request, taken all the same.
const UNREAD_MAX: usize = 8 << 20;
const UNREAD_TIME_MAX: Duration = Duration::from_secs(1);

/// What the steps share.
pub struct Shared {
    pub state: Arc<State>,
    pub metrics: ProxyMetrics,
    pub paths: Paths,
    pub bodies: Bodies,
    pub trust_loopback: bool,
    pub key: Option<Vec<u8>>,
    /// `model.dir`.
    pub model_dir: Option<PathBuf>,
    pub forward: Forward,
    /// `None` = images reach the engine as they are.
    pub encoding: Option<Arc<Encoding>>,
    /// Name of the next predicted request; begins where no life of this program has been.
    pub flights: AtomicU64,
    /// Requests from their heads to the ends of their answers.
    pub in_flight: TaskTracker,
}

impl Shared {
    fn next_flight(&self) -> FlightId {
        FlightId(self.flights.fetch_add(1, Relaxed))
    }

    /// How the engine is spoken to, and a name for one request.
    fn speaking(&self) -> Speaking {
        let (facts, workers) = (self.state.facts(), self.state.workers());
        Speaking {
            kind: self.state.kind(),
            version: facts.as_ref().and_then(|facts| Version::parse(&facts.version)),
            flight: self.next_flight(),
            block_size: workers.first().and_then(|worker| BlockSize::new(worker.facts().block_size)),
            pairs: workers.iter().any(|worker| worker.has_pairs()),
        }
    }

    /// The peer is one of the balancers, by its certificate, its key or its address.
    fn trusts(&self, request: &Request<Body>) -> bool {
        let peer = request.extensions().get::<Peer>();
        let verified = peer.is_some_and(|peer| peer.verified);
        let loopback = peer.is_some_and(|peer| peer.address.ip().to_canonical().is_loopback());
        let sent = request.headers().get(headers::KEY);
        let key = self.key.as_ref().zip(sent).is_some_and(|(key, sent)| headers::same_key(sent, key));
        verified || self.trust_loopback && loopback || key
    }
}

/// The client's end of the connection, put into each request by the listener.
#[derive(Clone, Copy, Debug)]
pub struct Peer {
    pub address: SocketAddr,
    /// It has shown a certificate that is believed.
    pub verified: bool,
}

/// A preamble was announced, by someone who may: its length in bytes.
#[derive(Clone, Copy, Debug)]
struct Announced(usize);

pub fn stack(shared: Arc<Shared>) -> impl Next {
    let forward = shared.forward.clone();
    let with = |shared: &Arc<Shared>| Arc::clone(shared);
    let (s1, s2, s3, s4, s5, s6, s7) =
        (with(&shared), with(&shared), with(&shared), with(&shared), with(&shared), with(&shared), with(&shared));
    ServiceBuilder::new()
        .layer(step(move |request, next| observe(Arc::clone(&s1), request, next)))
        .layer(step(move |request, next| give_files(Arc::clone(&s2), request, next)))
        .layer(step(move |request, next| allow(Arc::clone(&s3), request, next)))
        .layer(step(move |request, next| admit(Arc::clone(&s4), request, next)))
        .layer(step(move |request, next| prepare(Arc::clone(&s5), request, next)))
        .layer(step(move |request, next| account(Arc::clone(&s6), request, next)))
        .layer(step(move |request, next| watch_resets(Arc::clone(&s7), request, next)))
        .service(service_fn(move |request| forward.clone().call(request)))
}

/// Counts how the request ended; a future that is dropped half-way was cancelled by its client.
async fn observe<N: Next>(shared: Arc<Shared>, request: Request<Body>, next: N) -> Result<Response<Body>, Refusal> {
    struct Counted {
        shared: Arc<Shared>,
        outcome: Outcome,
    }
    impl Drop for Counted {
        fn drop(&mut self) {
            self.shared.metrics.requests.get_or_create(&RequestLabels { outcome: self.outcome }).inc();
        }
    }
    let _held = shared.in_flight.token();
    let mut counted = Counted { shared, outcome: Outcome::Cancelled };
    let path = request.uri().path().to_owned();
    let response = pass(request, next).await;
    if let Some(outcome) = response.extensions().get() {
        counted.outcome = *outcome;
    }
    tracing::debug!(path, status = response.status().as_u16(), outcome = ?counted.outcome, "request");
    Ok(response)
}

/// Answers a balancer that asks for a model file: the one thing that is not the engine's to answer.
async fn give_files<N: Next>(shared: Arc<Shared>, request: Request<Body>, next: N) -> Result<Response<Body>, Refusal> {
    let asked = listed::named(request.uri().path()).filter(|_| request.method() == Method::GET);
    let Some(name) = asked else { return Ok(pass(request, next).await) };
    if !shared.trusts(&request) {
        return Err(Refusal::PeerNotTrusted);
    }
    let facts = shared.state.facts();
    let engine_model = facts.as_ref().map(|facts| facts.engine_model.as_str());
    model_files::give(model_files::directory(shared.model_dir.as_deref(), engine_model), name).await
}

async fn allow<N: Next>(shared: Arc<Shared>, request: Request<Body>, next: N) -> Result<Response<Body>, Refusal> {
    let path = request.uri().path();
    if shared.state.is_draining() && paths::is_computing(path) {
        return refuse(request, Refusal::Draining).await;
    }
    let allowed = shared.paths.allows(path) || paths::is_for_balancers(path) && shared.trusts(&request);
    if allowed { Ok(pass(request, next).await) } else { refuse(request, Refusal::PathNotAllowed).await }
}

/// Refuses a request whose body nobody has looked at.
async fn refuse(request: Request<Body>, refusal: Refusal) -> Result<Response<Body>, Refusal> {
    body::pass_over(request.into_body(), UNREAD_MAX, UNREAD_TIME_MAX).await;
    Err(refusal)
}

/// Believes a preamble of balancers only, and takes away what must not reach the engine.
async fn admit<N: Next>(shared: Arc<Shared>, mut request: Request<Body>, next: N) -> Result<Response<Body>, Refusal> {
    if let Some(told) = request.headers().get(preamble::HEADER) {
        if !shared.trusts(&request) {
            return refuse(request, Refusal::PreambleNotTrusted).await;
        }
        let length = told.to_str().ok().and_then(|text| text.parse().ok());
        let problem = || Refusal::BadPreamble { problem: format!("header {} is no length", preamble::HEADER) };
        let announced = Announced(length.ok_or_else(problem)?);
        request.extensions_mut().insert(announced);
    }
    headers::strip_request(request.headers_mut());
    Ok(pass(request, next).await)
}

async fn prepare<N: Next>(shared: Arc<Shared>, mut request: Request<Body>, next: N) -> Result<Response<Body>, Refusal> {
    let announced = request.extensions().get::<Announced>().copied();
    let encoding = shared.encoding.as_ref().filter(|_| paths::is_encoded(request.uri().path()));
    let (weight, predicted) = match (announced.map(|Announced(length)| length), encoding) {
        (announced, Some(encoding)) => {
            let (speaking, facts) = (shared.speaking(), shared.state.facts());
            if announced.is_some() {
                request.extensions_mut().insert(speaking.flight);
            }
            let made = shared.bodies.encoded(&mut request, announced, &speaking, encoding, facts.as_ref()).await?;
            if let Some(leases) = made.leases {
                request.extensions_mut().insert(Arc::new(leases));
            }
            (made.weight, made.predicted)
        }
        (Some(length), None) => {
            let speaking = shared.speaking();
            request.extensions_mut().insert(speaking.flight);
            shared.bodies.with_preamble(&mut request, length, &speaking).await?
        }
        (None, None) => {
            let scan = paths::is_scanned(request.uri().path());
            (shared.bodies.plain(&mut request, scan).await?, None)
        }
    };
    let pinned = weight.dp_rank.filter(|_| shared.state.workers().len() > 1);
    if let Some((rank, header)) = pinned.zip(dialect::of(shared.state.kind()).rank_header()) {
        request.headers_mut().insert(header, HeaderValue::from(rank));
    }
    request.extensions_mut().insert(weight);
    if let Some(predicted) = predicted {
        request.extensions_mut().insert(predicted);
    }
    Ok(pass(request, next).await)
}

/// Charges the rank while the request lives: waiting, from the first body byte running, then gone. And tells the rank's closed loop
/// what the request should leave in the cache.
async fn account<N: Next>(shared: Arc<Shared>, mut request: Request<Body>, next: N) -> Result<Response<Body>, Refusal> {
    let weight = request.extensions().get::<Weight>().copied().unwrap_or_default();
    let predicted = request.extensions_mut().remove::<Predicted>();
    let id = request.extensions_mut().remove::<FlightId>().unwrap_or_else(|| shared.next_flight());
    let computing = paths::is_computing(request.uri().path());
    let worker = shared.state.worker_of_rank(weight.dp_rank.unwrap_or(0)).filter(|_| computing);
    let charge = worker.as_ref().map(|worker| {
        let most = shared.state.max_model_len();
        worker.load.charge(weight.prompt_tokens.min(most), weight.prefill_tokens.min(most))
    });
    let leases = request.extensions_mut().remove::<Arc<Leases>>().and_then(Arc::into_inner);
    let flight = worker.map(|worker| Flight::begin(worker, id, predicted));
    let (idle, held) = (shared.bodies.timeouts.stream_idle, shared.in_flight.token());
    let response = pass(request, next).await;
    let outcome = response.extensions().get::<Outcome>();
    if matches!(outcome, Some(Outcome::EngineUnreachable | Outcome::EngineDied))
        || response.headers().contains_key(headers::ENGINE)
    {
        shared.state.want_look();
    }
    // What the engine refused it caches nothing of.
    let flight = flight.filter(|_| response.status().is_success());
    Ok(response.map(|inner| body::boxed(Answer::new(inner, charge, flight, idle).holding(held).leasing(leases))))
}

/// Forgets what the engine held, unless the cache is known to be kept: a call whose answer nobody saw may have emptied it too.
struct Emptied {
    state: Arc<State>,
    kept: bool,
}

impl Drop for Emptied {
    fn drop(&mut self) {
        if !self.kept {
            self.state.cache_reset();
        }
    }
}

/// The engine empties its cache without telling: forget what it held as soon as it agreed.
async fn watch_resets<N: Next>(
    shared: Arc<Shared>,
    request: Request<Body>,
    next: N,
) -> Result<Response<Body>, Refusal> {
    if !dialect::of(shared.state.kind()).clearing().contains(&request.uri().path()) {
        return Ok(pass(request, next).await);
    }
    let mut emptied = Emptied { state: Arc::clone(&shared.state), kept: false };
    let response = pass(request, next).await;
    if !response.status().is_success() {
        emptied.kept = response.status().is_client_error();
        return Ok(response);
    }
    let (head, answer) = response.into_parts();
    let answer = body::read(answer, RESET_ANSWER_MAX, shared.bodies.timeouts.first_byte).await;
    let answer = answer.map_err(|error| Refusal::EngineBroken(error.into()))?;
    // vLLM says `{"success": false}` when running requests kept it from clearing.
    emptied.kept = serde_json::from_slice::<serde_json::Value>(&answer).is_ok_and(|told| told["success"] == false);
    Ok(Response::from_parts(head, body::full(answer)))
}
