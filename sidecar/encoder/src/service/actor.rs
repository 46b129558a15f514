//! The thread that owns an encoder, and the state that it shares with requests.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use tokio::sync::{Semaphore, oneshot, watch};

use super::stats::Counters;
use super::{Health, Serve, ServiceConfig};
use crate::backend::{BuildResult, Built, EncoderSpec, Preprocess, VisionEncoder};
use crate::batch::{Batch, Batcher, Done, Limits, Outcome, RequestId};
use crate::error::{BatchError, BuildError, EncodeError};
use crate::tensor::Embedding;

/// A request in the queue or in flight.
pub(super) struct Waiter {
    pub answer: oneshot::Sender<Result<Vec<Embedding>, EncodeError>>,
    pub submitted: Instant,
    pub dispatched: bool,
}

pub(super) struct Queue<I> {
    pub batcher: Batcher<I, Embedding>,
    pub waiters: HashMap<RequestId, Waiter>,
    pub closing: bool,
    /// When the oldest request in an otherwise empty queue came.
    pub since: Option<Instant>,
}

impl<I> Queue<I> {
    pub fn answer(&mut self, done: Vec<Done<Embedding>>) {
        for Done { request, result } in done {
            if let Some(waiter) = self.waiters.remove(&request) {
                // A receiver that is gone has no use for the answer.
                _ = waiter.answer.send(result);
            }
        }
    }
}

/// What requests and the thread share.
pub(super) struct Service<P: Preprocess> {
    pub config: ServiceConfig,
    pub spec: EncoderSpec,
    pub preprocess: Arc<P>,
    pub queue: Mutex<Queue<P::Item>>,
    pub work: Condvar,
    /// `None` while it serves.
    pub health: watch::Sender<Option<Health>>,
    pub counters: Counters,
    pub pool: Arc<Semaphore>,
    /// Room for images; each holds a permit from admission to answer.
    pub room: Semaphore,
}

impl<P: Preprocess> Service<P> {
    /// The queue stays consistent across a panic: nothing that can panic runs under the lock.
    pub fn lock(&self) -> MutexGuard<'_, Queue<P::Item>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Spawns the thread and waits for its build.
pub(super) async fn start<B, F>(config: ServiceConfig, build: F) -> Result<Arc<dyn Serve>, BuildError>
where
    B: VisionEncoder,
    F: FnOnce() -> BuildResult<B> + Send + 'static,
{
    let (built, ready) = oneshot::channel();
    let body = move || {
        let start =
            catch_unwind(AssertUnwindSafe(build)).unwrap_or_else(|_| Err(BuildError::Failed("panicked".into())));
        match start.and_then(|built| prepare(config, built)) {
            Ok((encoder, service)) => {
                // Nobody waits when the start was cancelled: the loop finds the queue closed.
                if built.send(Ok(service.clone())).is_err() {
                    service.lock().closing = true;
                }
                run(encoder, &service);
            }
            Err(error) => _ = built.send(Err(error)),
        }
    };
    let spawned = std::thread::Builder::new().name("encoder".into()).spawn(body);
    spawned.map_err(|error| BuildError::Failed(format!("no thread: {error}")))?;
    let service = ready.await.unwrap_or_else(|_| Err(BuildError::Failed("its thread ended".into())))?;
    Ok(service)
}

/// An encoder and what it shares.
type Prepared<B> = (B, Arc<Service<<B as VisionEncoder>::Pre>>);

fn prepare<B: VisionEncoder>(config: ServiceConfig, built: Built<B>) -> Result<Prepared<B>, BuildError> {
    let Built { mut encoder, preprocess, spec } = built;
    let items = [spec.max_batch_items, config.max_batch_items].into_iter().flatten().min();
    let limits = Limits::new(spec.max_batch_cost, items, config.max_queued_cost, spec.buckets.clone());
    let limits = match limits {
        Ok(limits) => limits,
        Err(error) => {
            encoder.close();
            return Err(BuildError::Config(error.to_string()));
        }
    };
    let room = usize::try_from(config.max_pending_images).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
    let queue = Queue { batcher: Batcher::new(limits), waiters: HashMap::new(), closing: false, since: None };
    let service = Service {
        pool: Arc::new(Semaphore::new(spec.preprocess_concurrency.clamp(1, 1024))),
        room: Semaphore::new(room),
        config,
        spec,
        preprocess,
        queue: Mutex::new(queue),
        work: Condvar::new(),
        health: watch::channel(None).0,
        counters: Counters::default(),
    };
    Ok((encoder, Arc::new(service)))
}

/// Why the loop ended.
enum End {
    Closed,
    Lost(EncodeError),
    Panicked,
}

fn run<B: VisionEncoder>(mut encoder: B, service: &Service<B::Pre>) {
    let end = serve(&mut encoder, service);
    let health = match end {
        End::Closed => Health::Closed,
        End::Lost(_) | End::Panicked => Health::Failed,
    };
    if let End::Lost(error) = &end {
        finish_all(service, error);
    }
    if let End::Panicked = end {
        tracing::error!("encoder panicked, no longer serving");
        finish_all(service, &EncodeError::Unavailable);
    } else if catch_unwind(AssertUnwindSafe(|| encoder.close())).is_err() {
        tracing::error!("encoder panicked while closing");
    }
    if catch_unwind(AssertUnwindSafe(|| drop(encoder))).is_err() {
        tracing::error!("encoder panicked while being dropped");
    }
    service.health.send_replace(Some(health));
}

fn finish_all<P: Preprocess>(service: &Service<P>, error: &EncodeError) {
    let mut queue = service.lock();
    queue.closing = true;
    let done = queue.batcher.abort(error);
    queue.answer(done);
}

fn serve<B: VisionEncoder>(encoder: &mut B, service: &Service<B::Pre>) -> End {
    while let Some(batch) = next(service) {
        let started = Instant::now();
        service.counters.batch(batch.items().len(), batch.cost(), batch.bucket());
        let forward = || encoder.forward_batch(batch.items(), batch.bucket());
        let Ok(outcome) = catch_unwind(AssertUnwindSafe(forward)) else { return End::Panicked };
        service.counters.forward(started.elapsed());
        if let Some(end) = finish(service, batch, outcome) {
            return end;
        }
    }
    End::Closed
}

fn finish<P: Preprocess>(service: &Service<P>, batch: Batch<P::Item>, outcome: Outcome<Embedding>) -> Option<End> {
    let lost = match &outcome {
        Err(error @ BatchError::DeviceLost(_)) => {
            tracing::error!(%error, "encoder lost, no longer serving");
            Some(End::Lost(EncodeError::Unavailable))
        }
        Err(error) => {
            tracing::warn!(%error, images = batch.items().len(), "batch failed");
            None
        }
        Ok(_) => None,
    };
    let mut queue = service.lock();
    let done = queue.batcher.finish(batch, outcome);
    queue.answer(done);
    lost
}

/// Waits for a batch; `None` when the service closes.
fn next<P: Preprocess>(service: &Service<P>) -> Option<Batch<P::Item>> {
    let mut queue = service.lock();
    loop {
        if queue.closing {
            // Whatever a failed batch put back.
            let done = queue.batcher.close();
            queue.answer(done);
            return None;
        }
        let wait = coalesce(&mut queue, service.config.coalesce);
        if let Some(wait) = wait {
            queue = service.work.wait_timeout(queue, wait).unwrap_or_else(PoisonError::into_inner).0;
            continue;
        }
        if let Some(batch) = queue.batcher.next_batch() {
            queue.since = None;
            mark_dispatched(&mut queue, &batch, &service.counters);
            return Some(batch);
        }
        queue = service.work.wait(queue).unwrap_or_else(PoisonError::into_inner);
    }
}

/// How long a batch that is not full may still wait for company.
fn coalesce<I>(queue: &mut Queue<I>, delay: Duration) -> Option<Duration> {
    if delay.is_zero() || queue.batcher.queued_cost() == 0 || queue.batcher.is_full() {
        return None;
    }
    let since = *queue.since.get_or_insert_with(Instant::now);
    delay.checked_sub(since.elapsed()).filter(|left| !left.is_zero())
}

fn mark_dispatched<I>(queue: &mut Queue<I>, batch: &Batch<I>, counters: &Counters) {
    for request in batch.requests() {
        if let Some(waiter) = queue.waiters.get_mut(&request).filter(|waiter| !waiter.dispatched) {
            waiter.dispatched = true;
            counters.queued(waiter.submitted.elapsed());
        }
    }
}
