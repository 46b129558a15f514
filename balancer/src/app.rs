//! Puts the parts together, in order: models, ports, runtime, tasks; and takes them apart again.
//!
//! Stop: no new connections, not ready, requests in flight end within the drain time, then the sidecars' streams and the admin port.

use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fovea_balancer_core::fleet::State;
use fovea_balancer_core::health::Standing;
use fovea_service::admin::{self, Admin, Readiness};
use fovea_service::label::Snake;
use fovea_service::ready::announce;
use fovea_service::shutdown::{Drained, Shutdown};
use fovea_service::tls::reload;
use prometheus_client::registry::Registry;
use serde_json::{Value, json};
use tokio_util::sync::CancellationToken;

use crate::config::BalancerConfig;
use crate::diagnose;
use crate::fetch::{Fetcher, SetupError};
use crate::front::{self, Front, Keys};
use crate::links::{LinkError, Links};
use crate::metrics::{Metrics, StateLabels};
use crate::models::pull::Puller;
use crate::models::{ModelError, Models};
use crate::plain;
use crate::sync;
use crate::tenants::{self, TenantError, Tenants};
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
    Links(#[from] LinkError),
    #[error(transparent)]
    Tenants(#[from] TenantError),
    #[error("media: fetching cannot be set up")]
    Media(#[from] SetupError),
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
    let tenants = Arc::new(Tenants::load(&config)?);
    let listeners = Listeners {
        http: bind("listen", config.listen)?,
        admin: bind("admin", config.admin)?,
        sync: bind("sync", config.sync)?,
    };
    let threads = config.thread_count();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(threads)
        // One per request being prepared, and a few for names and files.
        .max_blocking_threads(threads + front::media_threads(threads) + 4)
        .thread_name("balancer")
        .enable_all()
        .build()
        .map_err(AppError::Runtime)?;
    let served = runtime.block_on(serve(config, models, tenants, listeners));
    runtime.shutdown_timeout(LAST_WAIT);
    served
}

fn bind(field: &'static str, address: SocketAddr) -> Result<TcpListener, AppError> {
    let bound = TcpListener::bind(address).and_then(|listener| listener.set_nonblocking(true).map(|()| listener));
    bound.map_err(|source| AppError::Bind { field, address, source })
}

async fn serve(
    config: BalancerConfig,
    models: Models,
    tenants: Arc<Tenants>,
    listeners: Listeners,
) -> Result<(), AppError> {
    let shutdown = Shutdown::on_signals().map_err(AppError::Runtime)?;
    let (links, admin_stop) = (Shutdown::new(), CancellationToken::new());
    let mut registry = Registry::default();
    let metrics = Metrics::register(&mut registry);
    let Links { clients, guard, access, watched } = Links::load(&config, &metrics.tls)?;
    let (freshness, entries_max) = (config.freshness.into(), config.limits.index_entries_max);
    let workers = Workers::with_recall(freshness, config.recall(), config.choose_settings(), entries_max);
    let workers = Arc::new(workers.with_health(config.health.into()));
    let (drain, streams_max) = (config.timeouts.drain, config.limits.sync_streams_max);
    let fetcher = Fetcher::new(&config.media, metrics.media.clone())?;
    let (front_workers, models) = (Arc::clone(&workers), Arc::new(models));
    if models.pulls() {
        let (models, workers, pull_metrics) = (Arc::clone(&models), Arc::clone(&workers), metrics.models.clone());
        let puller = Puller::new(models, workers, pull_metrics, access.clone(), config.timeouts.connect);
        links.spawn(puller.run(links.token()));
    }
    let keys = Keys {
        tenants: Arc::clone(&tenants),
        engines: tenants::engine_key(&config.access)?,
        forward: config.access.forward_authorization,
    };
    links.spawn(tenants::watch(tenants, metrics.tenants.clone(), config.access.keys_poll, links.token()));
    for engine in &config.workers {
        let (workers, metrics) = (Arc::clone(&workers), metrics.plain.clone());
        let plain = plain::follow(engine.clone(), keys.engines.clone(), workers, metrics, links.token());
        links.spawn(plain);
    }
    let front = Front::new(config, access, front_workers, models, fetcher, metrics.clone(), shutdown.token());
    let front = Arc::new(front.with_keys(keys));

    let ready = announcement(&listeners).map_err(AppError::Runtime)?;
    let http = tokio_listener(listeners.http)?;
    let sync = tokio_listener(listeners.sync)?;
    let pages = admin_pages(registry, &front, &workers);
    let admin = tokio::spawn(admin::serve(tokio_listener(listeners.admin)?, pages, admin_stop.clone()));
    links.spawn(sync::serve(sync, Arc::clone(&workers), metrics.clone(), streams_max, guard, links.clone()));
    links.spawn(reload::watch(watched, reload::LOOK_EVERY, links.token()));
    links.spawn(observe(workers, metrics, links.token()));
    shutdown.spawn(front::serve(http, front, clients, shutdown.clone()));
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
    let ready = move || match front.not_ready() {
        None => Readiness::Ready,
        Some(why) => Readiness::NotReady(why),
    };
    Admin::new(Arc::new(registry), ready).route("/debug/workers", move || debug_workers(&workers))
}

fn debug_workers(workers: &Workers) -> Value {
    let mut rows = Vec::new();
    let now = Instant::now();
    workers.each(now, |worker, state| {
        let (about, report) = (&worker.about, worker.load.last_report());
        let engine = &about.pool.facts.engine;
        rows.push(json!({
            "worker": &*about.name,
            "url": &*about.url,
            "state": format!("{state:?}").to_lowercase(),
            "dp_rank": about.dp_rank,
            "events": about.events,
            "plain": about.pool.facts.is_plain,
            "history_blocks": worker.history.blocks(),
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
            "standing": format!("{:?}", workers.standing(worker.key, now)).to_lowercase(),
        }));
    });
    let pools: Vec<_> = workers
        .pools()
        .iter()
        .map(|pool| {
            let entries = pool.index().entries();
            json!({"engine_model": pool.facts.engine.engine_model, "block_size": pool.facts.block_size, "index_entries": entries,
                "diagnosis": pool.watched.page()})
        })
        .collect();
    json!({"workers": rows, "pools": pools})
}

/// Keeps the gauges of workers and indexes.
async fn observe(workers: Arc<Workers>, metrics: Metrics, stop: CancellationToken) {
    let mut tick = tokio::time::interval(OBSERVE_EVERY);
    while stop.run_until_cancelled(tick.tick()).await.is_some() {
        let mut counts = [State::Up, State::Stale, State::Draining, State::Excluded].map(|state| (state, 0));
        let (now, mut ejected) = (Instant::now(), 0);
        workers.each(now, |worker, state| {
            ejected += i64::from(workers.standing(worker.key, now) == Standing::Ejected);
            counts.iter_mut().filter(|(counted, _)| *counted == state).for_each(|(_, count)| *count += 1);
        });
        for (state, count) in counts {
            metrics.workers.get_or_create(&StateLabels { state: Snake(state) }).set(count);
        }
        let entries: usize = workers.pools().iter().map(|pool| pool.index().entries()).sum();
        diagnose::look(&workers, &metrics.findings, Instant::now());
        metrics.workers_ejected.set(ejected);
        let ejections = workers.ejections();
        metrics.ejections.inc_by(ejections.saturating_sub(metrics.ejections.get()));
        metrics.index_entries.set(i64::try_from(entries).unwrap_or(i64::MAX));
    }
}
