//! Puts the parts together, in order: models, ports, runtime, tasks; and takes them apart again.
//!
//! Stop: no new connections, not ready, requests in flight end within the drain time, then the sidecars' streams and the admin port.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fovea_balancer_core::fleet::State;
use fovea_service::admin::{self, Admin, Readiness};
use fovea_service::config::{KeyError, read_key};
use fovea_service::label::Snake;
use fovea_service::ready::announce;
use fovea_service::shutdown::{Drained, Shutdown};
use http::HeaderValue;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::config::{BalancerConfig, Trust};
use crate::fetch::{Fetcher, SetupError};
use crate::front::{self, Front};
use crate::metrics::{Metrics, StateLabels};
use crate::models::pull::Puller;
use crate::models::{ModelError, Models};
use crate::sync;
use crate::workers::Workers;

/// Gauges that nobody sets on change are renewed this often.
const OBSERVE_EVERY: Duration = Duration::from_secs(1);
/// For what remains after the drain: streams of sidecars, admin requests.
const LAST_WAIT: Duration = Duration::from_secs(2);

#[derive(Debug, thiserror::Error)]
pub enum AppError {
    #[error(transparent)]
    Models(#[from] ModelError),
    #[error("{field}: cannot listen on {address}; is the port taken?")]
    Bind {
        field: &'static str,
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Key(#[from] KeyError),
    #[error("media: fetching cannot be set up")]
    Media(#[from] SetupError),
    #[error("trust.shared_key has characters that no header takes: use letters, digits and punctuation")]
    KeyCharacters,
    #[error("cannot set up the runtime or its signals")]
    Runtime(#[source] io::Error),
}

struct Listeners {
    http: TcpListener,
    admin: TcpListener,
    sync: TcpListener,
}

/// Serves until SIGTERM or SIGINT and the drain that follows.
///
/// # Errors
/// When a model cannot be loaded or a port cannot be taken. Nothing serves before all of that went well.
pub fn run(config: BalancerConfig) -> Result<(), AppError> {
    crate::memory::return_large_blocks();
    let models = Models::load(&config)?;
    let key = key(&config.trust)?;
    let listeners = Listeners {
        http: bind("listen", config.listen)?,
        admin: bind("admin", config.admin)?,
        sync: bind("sync", config.sync)?,
    };
    let threads = config.thread_count();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        // One per request being prepared, and a few for names and files.
        .max_blocking_threads(threads + 4)
        .thread_name("balancer")
        .enable_all()
        .build()
        .map_err(AppError::Runtime)?;
    let served = runtime.block_on(serve(config, key, models, listeners));
    runtime.shutdown_timeout(LAST_WAIT);
    served
}

fn bind(field: &'static str, address: SocketAddr) -> Result<TcpListener, AppError> {
    let bound = TcpListener::bind(address).and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
    bound.map_err(|source| AppError::Bind { field, address, source })
}

/// The key as it goes out, never to be logged.
fn key(trust: &Trust) -> Result<Option<HeaderValue>, AppError> {
    let Some(key) = read_key("trust.shared_key_file", &trust.shared_key, trust.shared_key_file.as_deref())? else {
        return Ok(None);
    };
    let mut key = HeaderValue::from_bytes(&key).map_err(|_| AppError::KeyCharacters)?;
    key.set_sensitive(true);
    Ok(Some(key))
}

async fn serve(
    config: BalancerConfig,
    key: Option<HeaderValue>,
    models: Models,
    listeners: Listeners,
) -> Result<(), AppError> {
    let shutdown = Shutdown::on_signals().map_err(AppError::Runtime)?;
    let (links, admin_stop) = (Shutdown::new(), CancellationToken::new());
    let mut registry = Registry::default();
    let metrics = Metrics::register(&mut registry);
    let workers =
        Arc::new(Workers::new(config.freshness.into(), config.choose_settings(), config.limits.index_entries_max));
    let (drain, streams_max) = (config.timeouts.drain, config.limits.sync_streams_max);
    let fetcher = Fetcher::new(&config.media, metrics.media.clone())?;
    let (front_workers, models) = (Arc::clone(&workers), Arc::new(models));
    if models.pulls() {
        let (models, workers, pull_metrics) = (Arc::clone(&models), Arc::clone(&workers), metrics.models.clone());
        let puller = Puller::new(models, workers, pull_metrics, key.clone(), config.timeouts.connect);
        links.spawn(puller.run(links.token()));
    }
    let front = Front::new(config, key, front_workers, models, fetcher, metrics.clone(), shutdown.token());
    let front = Arc::new(front);

    let ready = announcement(&listeners).map_err(AppError::Runtime)?;
    let http = tokio_listener(listeners.http)?;
    let sync = tokio_listener(listeners.sync)?;
    let pages = admin_pages(registry, &front, &workers);
    let admin = tokio::spawn(admin::serve(tokio_listener(listeners.admin)?, pages, admin_stop.clone()));
    links.spawn(sync::serve(sync, Arc::clone(&workers), metrics.clone(), streams_max, links.clone()));
    links.spawn(observe(workers, metrics, links.token()));
    shutdown.spawn(front::serve(http, front, shutdown.clone()));
    if let Err(error) = announce(&ready) {
        tracing::warn!(%error, "cannot write the ready line");
    }

    shutdown.requested().await;
    if let Drained::Cut { tasks } = shutdown.drain(drain).await {
        tracing::warn!(connections = tasks, "stopped with requests in flight");
    }
    links.request();
    links.drain(LAST_WAIT).await;
    admin_stop.cancel();
    let _ = tokio::time::timeout(LAST_WAIT, admin).await;
    Ok(())
}

fn tokio_listener(listener: TcpListener) -> Result<tokio::net::TcpListener, AppError> {
    tokio::net::TcpListener::from_std(listener).map_err(AppError::Runtime)
}

fn announcement(listeners: &Listeners) -> io::Result<Value> {
    Ok(json!({
        "ready": true,
        "http": listeners.http.local_addr()?.to_string(),
        "admin": listeners.admin.local_addr()?.to_string(),
        "sync": listeners.sync.local_addr()?.to_string(),
    }))
}

fn admin_pages(registry: Registry, front: &Arc<Front>, workers: &Arc<Workers>) -> Admin {
    let (front, workers) = (Arc::clone(front), Arc::clone(workers));
    let ready = move || match front.ready() {
        true => Readiness::Ready,
        false => Readiness::NotReady("no worker takes requests, or stopping".to_owned()),
    };
    Admin::new(Arc::new(registry), ready).route("/debug/workers", move || debug_workers(&workers))
}

fn debug_workers(workers: &Workers) -> Value {
    let mut rows = Vec::new();
    workers.each(Instant::now(), |worker, state| {
        let (about, report) = (&worker.about, worker.load.last_report());
        let engine = &about.pool.facts.engine;
        rows.push(json!({
            "worker": &*about.name,
            "url": &*about.url,
            "state": format!("{state:?}").to_lowercase(),
            "dp_rank": about.dp_rank,
            "events": about.events,
            "served_names": &*about.served_names,
            "lora_names": &*about.lora_names,
            "engine": format!("{:?}", engine.kind).to_lowercase(),
            "engine_version": engine.version,
            "engine_model": engine.engine_model,
            "block_size": about.pool.facts.block_size,
            "running": report.running,
            "waiting": report.waiting,
            "waiting_tokens": worker.load.waiting_tokens(),
            "decode_tokens": worker.load.decode_tokens(),
            "booked_requests": worker.load.booked(),
        }));
    });
    let pools: Vec<_> = workers
        .pools()
        .iter()
        .map(|pool| {
            let entries = pool.index().entries();
            json!({"engine_model": pool.facts.engine.engine_model, "block_size": pool.facts.block_size, "index_entries": entries})
        })
        .collect();
    json!({"workers": rows, "pools": pools})
}

/// Keeps the gauges of workers and indexes.
async fn observe(workers: Arc<Workers>, metrics: Metrics, stop: CancellationToken) {
    let mut tick = tokio::time::interval(OBSERVE_EVERY);
    while stop.run_until_cancelled(tick.tick()).await.is_some() {
        let mut counts = [State::Up, State::Stale, State::Draining, State::Excluded].map(|state| (state, 0));
        workers.each(Instant::now(), |_, state| {
            counts.iter_mut().filter(|(counted, _)| *counted == state).for_each(|(_, count)| *count += 1);
        });
        for (state, count) in counts {
            metrics.workers.get_or_create(&StateLabels { state: Snake(state) }).set(count);
        }
        let entries: usize = workers.pools().iter().map(|pool| pool.index().entries()).sum();
        metrics.index_entries.set(i64::try_from(entries).unwrap_or(i64::MAX));
    }
}
