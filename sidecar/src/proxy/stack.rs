//! The whole request path, top to bottom in request order.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;

use fovea_gossip::{model_files as listed, preamble};
use http::{HeaderValue, Method, Request, Response};
use tower::{ServiceBuilder, service_fn};

use super::answer::Answer;
use super::forward::Forward;
use super::headers;
use super::model_files;
use super::paths::{self, Paths};
use super::prepare::{Bodies, Weight};
use super::refusal::{Outcome, Refusal};
use super::step::{Next, pass, step};
use crate::body::{self, Body};
use crate::metrics::{ProxyMetrics, RequestLabels};
use crate::state::State;

/// Longest answer to a reset, in bytes; a real one is a few words.
const RESET_ANSWER_MAX: usize = 64 << 10;

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
}

impl Shared {
    /// The peer is one of the balancers, by its key or by its address.
    fn trusts(&self, request: &Request<Body>) -> bool {
        let loopback = request.extensions().get::<Peer>().is_some_and(|peer| peer.0.ip().to_canonical().is_loopback());
        let sent = request.headers().get(headers::KEY);
        let key = self.key.as_ref().zip(sent).is_some_and(|(key, sent)| headers::same_key(sent, key));
        self.trust_loopback && loopback || key
    }
}

/// The client's end of the connection, put into each request by the listener.
#[derive(Clone, Copy, Debug)]
pub struct Peer(pub SocketAddr);

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
    if shared.paths.allows(request.uri().path()) { Ok(pass(request, next).await) } else { Err(Refusal::PathNotAllowed) }
}

/// Believes a preamble of balancers only, and takes away what must not reach the engine.
async fn admit<N: Next>(shared: Arc<Shared>, mut request: Request<Body>, next: N) -> Result<Response<Body>, Refusal> {
    if let Some(told) = request.headers().get(preamble::HEADER) {
        if !shared.trusts(&request) {
            return Err(Refusal::PreambleNotTrusted);
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
    let weight = match announced {
        Some(Announced(length)) => shared.bodies.with_preamble(&mut request, length).await?,
        None => {
            let scan = paths::is_scanned(request.uri().path());
            shared.bodies.plain(&mut request, scan).await?
        }
    };
    if let Some(rank) = weight.dp_rank.filter(|_| shared.state.workers().len() > 1) {
        request.headers_mut().insert(headers::RANK, HeaderValue::from(rank));
    }
    request.extensions_mut().insert(weight);
    Ok(pass(request, next).await)
}

/// Charges the rank while the request lives: waiting, from the first body byte running, then gone.
async fn account<N: Next>(shared: Arc<Shared>, request: Request<Body>, next: N) -> Result<Response<Body>, Refusal> {
    let weight = request.extensions().get::<Weight>().copied().unwrap_or_default();
    let worker = shared.state.worker_of_rank(weight.dp_rank.unwrap_or(0));
    let charge = worker.filter(|_| paths::is_computing(request.uri().path())).map(|worker| {
        let most = shared.state.max_model_len();
        worker.load.charge(weight.prompt_tokens.min(most), weight.prefill_tokens.min(most))
    });
    let idle = shared.bodies.timeouts.stream_idle;
    Ok(pass(request, next).await.map(|inner| body::boxed(Answer::new(inner, charge, idle))))
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
    if !paths::is_clearing(request.uri().path()) {
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
