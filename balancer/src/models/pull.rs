//! Pulls the files of models from a worker's sidecar and loads them, one model at a time, beside the requests.

use std::fs::Permissions;
use std::os::unix::fs::PermissionsExt;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use fovea_gossip::{model_files, preamble};
use fovea_service::snake_case_labels;
use http::{HeaderValue, Request, StatusCode};
use http_body_util::{BodyExt, Empty, LengthLimitError, Limited};
use hyper::body::Body as _;
use hyper_util::client::legacy::{Client, Error as ClientError};
use hyper_util::rt::TokioExecutor;
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_util::sync::CancellationToken;

use super::agenda::{Agenda, Seen};
use super::{Models, Source};
use crate::prepare::{ClientUuid, LoadError, Preparer};
use crate::secure::{Access, SidecarConnector};
use crate::workers::Workers;

/// Workers are looked at this often.
const LOOK_EVERY: Duration = Duration::from_millis(500);
/// All files of one model.
const MODEL_BYTES_MAX: u64 = 256 << 20;
/// To fetch them all.
const FETCH_TIME_MAX: Duration = Duration::from_secs(60);

/// How a pull ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PullEnd {
    Loaded,
    /// No connection, or it broke.
    Connect,
    /// The sidecar does not trust this balancer.
    NotTrusted,
    /// The sidecar has no such file.
    NoFile,
    /// Any other status.
    Status,
    TooLarge,
    TooSlow,
    /// The files cannot be used, or not be written.
    Load,
}

snake_case_labels!(PullEnd);

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct PullLabels {
    pub end: PullEnd,
}

#[derive(Clone, Debug)]
pub struct PullMetrics {
    pub pulls: Family<PullLabels, Counter>,
    pub pulled: Gauge,
}

impl PullMetrics {
    /// Makes all families and registers them; `registry` carries the program's prefix.
    pub fn register(registry: &mut Registry) -> Self {
        let metrics = Self { pulls: Family::default(), pulled: Gauge::default() };
        registry.register("model_pulls", "Models pulled from workers, by how it ended", metrics.pulls.clone());
        registry.register("models_pulled", "Models in memory that came from workers", metrics.pulled.clone());
        metrics
    }
}

#[derive(Debug, thiserror::Error)]
enum PullError {
    #[error("cannot connect to the worker, or the connection broke")]
    Connect(#[from] ClientError),
    #[error("the connection broke in the middle of {name}")]
    Broken {
        name: &'static str,
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("the sidecar does not trust this balancer: give both the same trust.shared_key_file")]
    NotTrusted,
    #[error("the sidecar has no {name}: set model.dir in sidecar.yaml to the engine's model directory")]
    NoFile { name: &'static str },
    #[error("the sidecar answered {status} for {name}")]
    Status { name: &'static str, status: StatusCode },
    #[error("{name} is too large, alone or with the files before it")]
    TooLarge { name: &'static str },
    #[error("the files did not come within {FETCH_TIME_MAX:?}")]
    TooSlow,
    #[error("the sidecar's address makes no request")]
    Address(#[from] http::Error),
    #[error("cannot write the files; is the directory for temporary files (TMPDIR) writable?")]
    Write(#[from] std::io::Error),
    #[error("the files make no model")]
    Load(#[from] LoadError),
    #[error("loading ended in a panic")]
    Panic(#[from] tokio::task::JoinError),
}

impl PullError {
    fn end(&self) -> PullEnd {
        match self {
            Self::Connect(_) | Self::Broken { .. } | Self::Address(_) => PullEnd::Connect,
            Self::NotTrusted => PullEnd::NotTrusted,
            Self::NoFile { .. } => PullEnd::NoFile,
            Self::Status { .. } => PullEnd::Status,
            Self::TooLarge { .. } => PullEnd::TooLarge,
            Self::TooSlow => PullEnd::TooSlow,
            Self::Write(_) | Self::Load(_) | Self::Panic(_) => PullEnd::Load,
        }
    }
}

type Files = Vec<(&'static str, Bytes)>;

/// The task that pulls.
pub struct Puller {
    models: Arc<Models>,
    workers: Arc<Workers>,
    metrics: PullMetrics,
    client: Client<SidecarConnector, Empty<Bytes>>,
    /// Proves this balancer to sidecars.
    key: Option<HeaderValue>,
    agenda: Agenda,
}

impl Puller {
    /// To be called in a runtime. `connect` = limit of one dial.
    pub fn new(
        models: Arc<Models>,
        workers: Arc<Workers>,
        metrics: PullMetrics,
        access: Access,
        connect: Duration,
    ) -> Self {
        let Access { key, tls } = access;
        let connector = SidecarConnector { tls, limit: connect };
        // Pulls are rare: no connection is kept.
        let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build(connector);
        Self { models, workers, metrics, client, key, agenda: Agenda::default() }
    }

    /// Pulls whatever the connected workers make necessary, until the stop.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut tick = interval(LOOK_EVERY);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        while stop.run_until_cancelled(tick.tick()).await.is_some() {
            let Some((source, url)) = self.look(Instant::now()) else { continue };
            let Some(pulled) = stop.run_until_cancelled(self.pull(&url)).await else { return };
            self.settle(source, &url, pulled);
        }
    }

    /// Forgets what is not served any more, and finds what is to be pulled now.
    fn look(&mut self, now: Instant) -> Option<(Source, Arc<str>)> {
        let mut seen = Vec::new();
        self.workers.each(now, |worker, state| {
            let (about, takes_requests) = (&worker.about, state.takes_requests());
            let source = Source::new(&about.served_names, &about.pool.facts.engine);
            if about.pool.facts.is_plain {
                return;
            }
            seen.push(Seen { source, url: Arc::clone(&about.url), takes_requests });
        });
        seen.retain(|worker| self.models.wants(&worker.source));
        for gone in self.agenda.see(&seen, now) {
            tracing::info!(model = gone.name(), "no worker serves this model any more; its files are forgotten");
            self.models.forget(&gone);
        }
        self.observe();
        self.agenda.next(&seen, now)
    }

    fn observe(&self) {
        self.metrics.pulled.set(i64::try_from(self.models.pulled().len()).unwrap_or(i64::MAX));
    }

    fn settle(&mut self, source: Source, url: &str, pulled: Result<Preparer, PullError>) {
        let end = match pulled {
            Ok(preparer) => {
                tracing::info!(model = source.name(), worker = url, "model pulled and loaded");
                self.agenda.done(&source);
                self.models.put(source, preparer);
                PullEnd::Loaded
            }
            Err(error) => {
                let end = error.end();
                if self.agenda.failed(&source, end, Instant::now()) {
                    let error: &(dyn std::error::Error + 'static) = &error;
                    tracing::warn!(model = source.name(), worker = url, error, "cannot pull this model; trying again");
                }
                end
            }
        };
        self.metrics.pulls.get_or_create(&PullLabels { end }).inc();
        self.observe();
    }

    async fn pull(&self, url: &str) -> Result<Preparer, PullError> {
        let files = timeout(FETCH_TIME_MAX, self.fetch(url)).await.map_err(|_| PullError::TooSlow)??;
        tokio::task::spawn_blocking(move || load(&files)).await?
    }

    async fn fetch(&self, url: &str) -> Result<Files, PullError> {
        let (mut files, mut left) = (Files::new(), MODEL_BYTES_MAX);
        let names = model_files::NEEDED.map(|name| (name, true)).into_iter();
        for (name, needed) in names.chain(model_files::OPTIONAL.map(|name| (name, false))) {
            match self.get(url, name, left.min(model_files::FILE_BYTES_MAX)).await {
                Ok(file) => {
                    left -= file.len() as u64;
                    files.push((name, file));
                }
                Err(PullError::NoFile { .. }) if !needed => {}
                Err(error) => return Err(error),
            }
        }
        Ok(files)
    }

    /// One file of at most `limit` bytes.
    async fn get(&self, url: &str, name: &'static str, limit: u64) -> Result<Bytes, PullError> {
        let mut request = Request::get(format!("{url}{}{name}", model_files::PATH));
        if let Some(key) = &self.key {
            request = request.header(preamble::KEY_HEADER, key);
        }
        let answer = self.client.request(request.body(Empty::new())?).await?;
        match answer.status() {
            StatusCode::OK => {}
            StatusCode::FORBIDDEN => return Err(PullError::NotTrusted),
            StatusCode::NOT_FOUND => return Err(PullError::NoFile { name }),
            status => return Err(PullError::Status { name, status }),
        }
        if answer.body().size_hint().lower() > limit {
            return Err(PullError::TooLarge { name });
        }
        let limit = usize::try_from(limit).unwrap_or(usize::MAX);
        match Limited::new(answer.into_body(), limit).collect().await {
            Ok(file) => Ok(file.to_bytes()),
            Err(error) if error.is::<LengthLimitError>() => Err(PullError::TooLarge { name }),
            Err(source) => Err(PullError::Broken { name, source }),
        }
    }
}

/// Loads the files from a private directory that is gone afterwards. Blocking.
fn load(files: &Files) -> Result<Preparer, PullError> {
    let dir = tempfile::Builder::new().prefix("fovea-model-").permissions(Permissions::from_mode(0o700)).tempdir()?;
    for (name, bytes) in files {
        std::fs::write(dir.path().join(name), bytes)?;
    }
    Ok(Preparer::load(dir.path(), ClientUuid::Replace)?)
}

#[cfg(test)]
mod tests;
