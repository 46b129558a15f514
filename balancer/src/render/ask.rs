//! The task that asks: one probe at a time, of all pools.

use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fovea_gossip::preamble;
use http::{HeaderValue, Request, StatusCode, header};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use tokio::sync::mpsc;
use tokio::task::spawn_blocking;
use tokio::time::{sleep_until, timeout};
use tokio_util::sync::CancellationToken;

use super::metrics::{AskEnd, AskLabels, RenderMetrics};
use super::pace::Pace;
use super::probe::Probe;
use super::standing::{OFF_FOR, Page, Standing};
use super::{Entry, QUEUE_MAX, Renderer, Size, Wanted, answer};
use crate::config::render::RenderConfig;
use crate::prepare::Rendering;
use crate::secure::{Access, SidecarConnector};
use crate::workers::{Pool, PoolRef, Workers};

/// Bytes of an answer: a million tokens in full. One with processed pixels in it may be longer, and is not read.
const ANSWER_BYTES_MAX: usize = 16 << 20;
/// Models of which it is known how they stand; more are taken for new.
const STANDINGS_MAX: usize = 256;

/// What is asked of a renderer, and how that goes.
pub struct Asker {
    queue: mpsc::Receiver<Wanted>,
    workers: Arc<Workers>,
    metrics: RenderMetrics,
    client: Client<SidecarConnector, Full<Bytes>>,
    /// Proves this balancer to sidecars.
    key: Option<HeaderValue>,
    pace: Pace,
    timeout: Duration,
    /// By pool and model.
    standings: Vec<(Weak<Pool>, u64, Standing)>,
}

impl Asker {
    /// The task, and where it is told what to ask; `None` when the config wants neither. `connect` = limit of one dial.
    pub fn new(
        config: &RenderConfig,
        workers: Arc<Workers>,
        metrics: RenderMetrics,
        access: Access,
        connect: Duration,
    ) -> Option<(Self, Renderer)> {
        if !config.enabled {
            return None;
        }
        let Access { key, tls } = access;
        let connector = SidecarConnector { tls, limit: connect };
        let client = Client::builder(TokioExecutor::new()).pool_max_idle_per_host(0).build(connector);
        let (sender, queue) = mpsc::channel(QUEUE_MAX);
        let renderer = Renderer { queue: sender, dropped: metrics.dropped.clone() };
        let (pace, timeout) = (Pace::new(config.per_minute), config.timeout);
        Some((Self { queue, workers, metrics, client, key, pace, timeout, standings: Vec::new() }, renderer))
    }

    /// Sizes in the queue.
    #[cfg(test)]
    pub(super) fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Asks what requests want to know, until the stop.
    pub async fn run(mut self, stop: CancellationToken) {
        while let Some(Some(wanted)) = stop.run_until_cancelled(self.queue.recv()).await {
            if stop.run_until_cancelled(self.serve(&wanted)).await.is_none() {
                return;
            }
        }
    }

    async fn serve(&mut self, wanted: &Wanted) {
        let found = self.learn(wanted).await;
        let Some(pool) = wanted.pool.upgrade() else { return };
        match found {
            Some(entry) => pool.rendered.0.insert(wanted.size, entry),
            None => drop(pool.rendered.0.remove(&wanted.size)),
        }
    }

    /// What is known of a size from now on; `None` = it may be asked again.
    async fn learn(&mut self, wanted: &Wanted) -> Option<Entry> {
        self.standing(wanted)?.page(Instant::now())?;
        let (preparer, size) = (Arc::clone(&wanted.preparer), wanted.size);
        let probe = spawn_blocking(move || Probe::new(&preparer, size.width, size.height)).await.ok()?;
        let Some(probe) = probe.map(Arc::new) else {
            self.settle(wanted, AskEnd::Ambiguous);
            return None;
        };
        loop {
            let page = self.standing(wanted)?.page(Instant::now())?;
            let answer = self.ask(page, &probe, 1, wanted).await?;
            let read_by = Arc::clone(&probe);
            let shown = read(answer, move |body| answer::read(page, body, &read_by.own)).await;
            let end = shown.as_ref().err().copied().unwrap_or(AskEnd::Learnt);
            let other_page = self.settle(wanted, end);
            match (shown, end) {
                (Ok(rendering), _) => return self.with_its_place(wanted, page, &probe, rendering).await,
                (_, AskEnd::Refused | AskEnd::TooLong) => return Some(Entry::Refused),
                _ if other_page => {}
                _ => return None,
            }
        }
    }

    /// Finds out, once for a model, whether a second image becomes what a first one does.
    async fn with_its_place(
        &mut self,
        wanted: &Wanted,
        page: Page,
        probe: &Arc<Probe>,
        rendering: Rendering,
    ) -> Option<Entry> {
        let rendering = Arc::new(rendering);
        let repeats = match self.standing(wanted)?.repeats {
            Some(repeats) => repeats,
            None => {
                let answer = self.ask(page, probe, 2, wanted).await?;
                let (read_by, shown) = (Arc::clone(probe), Arc::clone(&rendering));
                let repeats = read(answer, move |body| answer::repeats(page, body, &read_by.own_pair, &shown)).await;
                let end = match repeats {
                    Ok(true) => AskEnd::Repeats,
                    Ok(false) => AskEnd::FirstOnly,
                    Err(end) => end,
                };
                self.settle(wanted, end);
                match end {
                    AskEnd::Repeats => true,
                    // An engine that takes one image alone refuses two.
                    AskEnd::FirstOnly | AskEnd::Refused => false,
                    _ => return None,
                }
            }
        };
        self.standing(wanted)?.repeats = Some(repeats);
        let rendering = if repeats { rendering } else { Arc::new(Arc::unwrap_or_clone(rendering).of_the_first()) };
        Some(Entry::Known(rendering))
    }

    /// `None` when the pool is gone.
    fn standing(&mut self, Wanted { pool, size, .. }: &Wanted) -> Option<&mut Standing> {
        self.standings.retain(|(pool, ..)| pool.strong_count() > 0);
        pool.upgrade()?;
        let of_it = |(known, model, _): &(Weak<Pool>, u64, Standing)| known.ptr_eq(pool) && *model == size.model;
        let place = match self.standings.iter().position(of_it) {
            Some(place) => place,
            None => {
                self.standings.truncate(STANDINGS_MAX - 1);
                self.standings.push((Weak::clone(pool), size.model, Standing::default()));
                self.standings.len() - 1
            }
        };
        self.standings.get_mut(place).map(|(.., standing)| standing)
    }

    /// Takes note of an ask's end. True = the other page may know.
    fn settle(&mut self, wanted: &Wanted, end: AskEnd) -> bool {
        self.metrics.asks.get_or_create(&AskLabels { end }).inc();
        let Some(standing) = self.standing(wanted) else { return false };
        let other_page = standing.settle(end, Instant::now());
        if other_page || !standing.is_new(end) {
            return other_page;
        }
        let (model, Size { width, height, .. }) = (wanted.base_names.first().map_or("", String::as_str), wanted.size);
        match end {
            AskEnd::Learnt => {
                tracing::info!(
                    model,
                    width,
                    height,
                    "images of this model are predicted as its engine's renderer shows them"
                );
            }
            AskEnd::Repeats => {}
            AskEnd::FirstOnly => {
                tracing::warn!(
                    model,
                    "an image's place among others changes what it becomes: the second one ends the view"
                );
            }
            AskEnd::Closed => {
                tracing::warn!(model, off = ?OFF_FOR, "no renderer to ask: images of this model end the view");
            }
            AskEnd::Disagrees | AskEnd::Ambiguous => {
                tracing::warn!(
                    model,
                    ?end,
                    "the engine's prompt is not ours with an image in it: is the template or the tokenizer another one? Images of this model end the view"
                );
            }
            _ => tracing::warn!(model, width, height, ?end, "an image size could not be asked"),
        }
        false
    }

    /// Base URL of a worker of the pool that serves the model: another one after each failure.
    fn worker(&mut self, wanted: &Wanted) -> Option<Arc<str>> {
        let failures = self.standing(wanted)?.failures() as usize;
        let pool = wanted.pool.upgrade()?;
        let mut ready = Vec::new();
        self.workers.each(Instant::now(), |worker, state| {
            let about = &worker.about;
            let serves = PoolRef::ptr_eq(&about.pool, &pool) && *about.served_names == *wanted.base_names;
            if serves && state.takes_requests() {
                ready.push(Arc::clone(&about.url));
            }
        });
        let turn = failures.checked_rem(ready.len())?;
        Some(ready.swap_remove(turn))
    }

    /// Sends one probe when its turn comes. `None` = nobody is there to be asked.
    async fn ask(
        &mut self,
        page: Page,
        probe: &Probe,
        images: usize,
        wanted: &Wanted,
    ) -> Option<Result<Bytes, AskEnd>> {
        if let Some(due) = self.pace.wait_until(Instant::now()) {
            sleep_until(due.into()).await;
        }
        let url = self.worker(wanted)?;
        self.pace.note(Instant::now());
        let model = wanted.base_names.first().map_or("", String::as_str);
        let (path, body) = probe.request(page, model, images);
        Some(timeout(self.timeout, self.exchange(format!("{url}{path}"), body)).await.unwrap_or(Err(AskEnd::TooSlow)))
    }

    async fn exchange(&self, url: String, body: String) -> Result<Bytes, AskEnd> {
        let mut request = Request::post(url).header(header::CONTENT_TYPE, "application/json");
        if let Some(key) = &self.key {
            request = request.header(preamble::KEY_HEADER, key);
        }
        let request = request.body(Full::new(Bytes::from(body))).map_err(|_| AskEnd::Connect)?;
        let answer = self.client.request(request).await.map_err(|error| {
            tracing::debug!(%error, "no answer of a renderer");
            AskEnd::Connect
        })?;
        match answer.status() {
            StatusCode::OK => {}
            StatusCode::UNAUTHORIZED
            | StatusCode::FORBIDDEN
            | StatusCode::NOT_FOUND
            | StatusCode::METHOD_NOT_ALLOWED
            | StatusCode::NOT_IMPLEMENTED => return Err(AskEnd::Closed),
            StatusCode::BAD_REQUEST | StatusCode::PAYLOAD_TOO_LARGE | StatusCode::UNPROCESSABLE_ENTITY => {
                return Err(AskEnd::Refused);
            }
            _ => return Err(AskEnd::Status),
        }
        match Limited::new(answer.into_body(), ANSWER_BYTES_MAX).collect().await {
            Ok(body) => Ok(body.to_bytes()),
            Err(error) if error.is::<LengthLimitError>() => Err(AskEnd::TooLarge),
            Err(_) => Err(AskEnd::Connect),
        }
    }
}

/// Reads an answer beside the network threads.
async fn read<T: Send + 'static>(
    answer: Result<Bytes, AskEnd>,
    read: impl FnOnce(&[u8]) -> Result<T, AskEnd> + Send + 'static,
) -> Result<T, AskEnd> {
    let body = answer?;
    spawn_blocking(move || read(&body)).await.unwrap_or(Err(AskEnd::Malformed))
}
