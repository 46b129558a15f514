//! Wires the parts together: binds the ports, starts the tasks, and ends them in order.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use fovea_service::admin::{self, Admin, Readiness};
use fovea_service::shutdown::{Drained, Shutdown};
use fovea_service::tls::reload;
use prometheus_client::registry::Registry;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::closed_loop;
use crate::config::{Config, base_url};
use crate::debug;
use crate::discover::Entry;
use crate::encode::Encoding;
use crate::encode::start::Starter;
use crate::engine::watch::Watch;
use crate::gossip::Gossip;
use crate::gossip::link::Credentials;
use crate::links::{Links, LinksError};
use crate::metrics::Metrics;
use crate::proxy::budget::Budget;
use crate::proxy::drain::drain;
use crate::proxy::forward::{Forward, Target, client};
use crate::proxy::paths::Paths;
use crate::proxy::prepare::Bodies;
use crate::proxy::serve::serve;
use crate::proxy::stack::Shared;
use crate::state::State;
use crate::worker::new_epoch;

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("cannot bind {field} ({address}); is another program there?")]
    Bind {
        field: &'static str,
        address: SocketAddr,
        #[source]
        source: io::Error,
    },
    #[error(transparent)]
    Links(#[from] LinksError),
    #[error("engine.url: is no base url; write one such as `http://127.0.0.1:8200`")]
    EngineUrl,
}

/// A sidecar that serves.
pub struct App {
    /// Where it listens, with the port that was given for port 0.
    pub http: SocketAddr,
    pub admin: SocketAddr,
    pub state: Arc<State>,
    config: Arc<Config>,
    shutdown: Shutdown,
    /// Ends admin port and balancer streams, after the requests.
    late: CancellationToken,
    in_flight: TaskTracker,
    encoding: Option<Arc<Encoding>>,
}

impl App {
    /// Binds and starts everything. The engine need not be there yet.
    ///
    /// # Errors
    /// A port is taken, or the key file cannot be read.
    pub async fn start(config: Config, shutdown: Shutdown) -> Result<Self, StartError> {
        let config = Arc::new(config);
        let target = base_url(&config.engine.url).as_ref().and_then(Target::new).ok_or(StartError::EngineUrl)?;
        let (listener, http) = bind("listen", config.listen).await?;
        let (admin_listener, admin) = bind("admin", config.admin).await?;
        let mut registry = Registry::default();
        let metrics = Metrics::register(&mut registry);
        let Links { requests, balancers, key, watched } = Links::load(&config, &metrics.tls)?;
        let state = State::new(&config);
        let budget = Budget::new(config.limits.bodies_max.as_u64(), config.timeouts.budget);
        let engine = client(config.timeouts.connect);
        let in_flight = TaskTracker::new();
        let encoding = config.encoder.is_on().then(|| Arc::new(Encoding::new(config.encoder.clone())));
        let shared = Arc::new(Shared {
            state: Arc::clone(&state),
            metrics: metrics.proxy.clone(),
            paths: Paths::new(&config.allow_paths),
            bodies: Bodies {
                budget: budget.clone(),
                limits: config.limits.clone(),
                timeouts: config.timeouts.clone(),
                client_embeddings: config.trust.client_embeddings,
            },
            trust_loopback: config.trust.loopback,
            key,
            model_dir: config.model.dir.clone(),
            flights: AtomicU64::new(new_epoch(0)),
            in_flight: in_flight.clone(),
            encoding: encoding.clone(),
            forward: Forward {
                client: engine.clone(),
                target: Arc::new(target),
                first_byte: config.timeouts.first_byte,
            },
        });
        let app = Self { http, admin, state, config, shutdown, late: CancellationToken::new(), in_flight, encoding };
        app.shutdown.spawn(serve(listener, shared, requests, app.config.limits.connections_max, app.shutdown.clone()));
        tokio::spawn(reload::watch(watched, reload::LOOK_EVERY, app.late.clone()));
        let settling = closed_loop::run(Arc::clone(&app.state), metrics.closed_loop.clone(), app.late.clone());
        tokio::spawn(settling);
        app.encode(engine.clone());
        app.watch(engine, metrics.clone(), budget);
        app.gossip(metrics, balancers);
        app.serve_admin(admin_listener, registry);
        Ok(app)
    }

    /// Waits for the stop, then for the requests in flight, then ends the rest.
    pub async fn run(self) {
        self.shutdown.requested().await;
        self.state.set_stopping();
        // Streams and admin port stand while requests drain, so they are not among what is waited for.
        let drained = self.shutdown.drain(self.config.timeouts.drain).await;
        self.late.cancel();
        if let Drained::Cut { tasks } = drained {
            tracing::warn!(tasks, "requests were cut at the end of the drain");
        }
    }

    fn watch(&self, client: crate::engine::discover::EngineClient, metrics: Metrics, budget: Budget) {
        let (config, state) = (Arc::clone(&self.config), Arc::clone(&self.state));
        let watch = Watch { client, config, state, metrics, budget, shutdown: self.shutdown.clone() };
        self.shutdown.spawn(watch.run());
    }

    fn encode(&self, client: crate::engine::discover::EngineClient) {
        let Some(encoding) = self.encoding.clone() else { return };
        let (config, state, stop) = (Arc::clone(&self.config), Arc::clone(&self.state), self.late.clone());
        tokio::spawn(Starter { encoding, state, config, client, stop }.run());
    }

    fn gossip(&self, metrics: Metrics, credentials: Credentials) {
        let gossip = Gossip {
            balancers: self.config.balancers.iter().filter_map(|text| Entry::parse(text).ok()).collect(),
            credentials,
            https: self.config.tls.is_some(),
            config: self.config.gossip.clone(),
            http_port: self.http.port(),
            state: Arc::clone(&self.state),
            metrics: metrics.gossip,
            stop: self.late.clone(),
        };
        tokio::spawn(gossip.run());
    }

    fn serve_admin(&self, listener: TcpListener, registry: Registry) {
        let (ready, debugged, diverged) = (Arc::clone(&self.state), Arc::clone(&self.state), Arc::clone(&self.state));
        let (encoding, debugged_encoding) = (self.encoding.clone(), self.encoding.clone());
        let ready = move || match (ready.is_draining(), ready.is_up()) {
            (true, _) => Readiness::NotReady("draining".to_owned()),
            (_, false) => Readiness::NotReady("the engine does not answer".to_owned()),
            _ => match encoding.as_ref().and_then(|encoding| encoding.problem()) {
                Some(problem) => Readiness::NotReady(format!("encoder: {problem}")),
                None => Readiness::Ready,
            },
        };
        let admin = Admin::new(Arc::new(registry), ready)
            .route("/debug/state", move || debug::state(&debugged, debugged_encoding.as_deref()))
            .route("/debug/divergences", move || closed_loop::divergences(&diverged))
            .action("/drain", drain(Arc::clone(&self.state), self.in_flight.clone(), self.config.timeouts.drain));
        tokio::spawn(admin::serve(listener, admin, self.late.clone()));
    }
}

impl Drop for App {
    fn drop(&mut self) {
        self.late.cancel();
    }
}

async fn bind(field: &'static str, address: SocketAddr) -> Result<(TcpListener, SocketAddr), StartError> {
    let failed = |source| StartError::Bind { field, address, source };
    let listener = TcpListener::bind(address).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((listener, bound))
}
