//! One request's way: room, preprocessing, queue, answer.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::oneshot;

use super::actor::{Service, Waiter};
use super::{Encoding, Health, Serve, Stats};
use crate::backend::{BackendStatus, EncoderSpec, Preprocess, Preprocessed, RawImage};
use crate::batch::{RequestId, Work};
use crate::error::{EncodeError, ItemError};
use crate::tensor::Embedding;

impl<P: Preprocess> Serve for Service<P> {
    fn encode(&self, images: Vec<RawImage>) -> Encoding<'_> {
        Box::pin(async move {
            self.counters.request(images.len());
            // Counts a request whose future is dropped as cancelled.
            let mut outcome = Outcome { service: self, error: Some(EncodeError::Cancelled) };
            let result = self.answer(images).await;
            outcome.error = result.as_ref().err().cloned();
            result
        })
    }

    fn spec(&self) -> &EncoderSpec {
        &self.spec
    }

    fn stopped(&self) -> Option<Health> {
        *self.health.borrow()
    }

    fn status(&self) -> BackendStatus {
        self.preprocess.status()
    }

    fn stats(&self) -> Stats {
        let pending = self.config.max_pending_images.saturating_sub(self.room.available_permits() as u64);
        Stats {
            restarts: self.status().restarts,
            queued_cost: self.lock().batcher.queued_cost(),
            pending_images: pending,
            ..self.counters.snapshot()
        }
    }

    fn begin_close(&self) {
        let mut queue = self.lock();
        queue.closing = true;
        let done = queue.batcher.close();
        queue.answer(done);
        drop(queue);
        self.work.notify_all();
    }

    fn closed(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>> {
        Box::pin(async move {
            let mut health = self.health.subscribe();
            // The sender lives as long as the service.
            _ = health.wait_for(Option::is_some).await;
        })
    }
}

struct Outcome<'a, P: Preprocess> {
    service: &'a Service<P>,
    error: Option<EncodeError>,
}

impl<P: Preprocess> Drop for Outcome<'_, P> {
    fn drop(&mut self) {
        let Some(error) = &self.error else { return };
        self.service.counters.failed(error);
        tracing::debug!(error = error.detail(), "images not encoded");
    }
}

type Answer = oneshot::Receiver<Result<Vec<Embedding>, EncodeError>>;

/// Takes a request out of the queue unless it was answered.
struct Queued<'a, P: Preprocess> {
    service: &'a Service<P>,
    request: RequestId,
}

impl<P: Preprocess> Drop for Queued<'_, P> {
    fn drop(&mut self) {
        let mut queue = self.service.lock();
        if queue.waiters.remove(&self.request).is_some() {
            queue.batcher.cancel(self.request);
        }
    }
}

impl<P: Preprocess> Service<P> {
    async fn answer(&self, images: Vec<RawImage>) -> Result<Vec<Embedding>, EncodeError> {
        if images.is_empty() {
            return Ok(Vec::new());
        }
        self.check_open()?;
        let _room = self.admit(images.len())?;
        let started = Instant::now();
        let preprocessed = self.preprocess_all(images).await;
        self.counters.preprocessed(started.elapsed());
        let (queued, answer) = self.submit(preprocessed?)?;
        let result = answer.await.unwrap_or(Err(EncodeError::Unavailable));
        drop(queued);
        result
    }

    fn check_open(&self) -> Result<(), EncodeError> {
        match self.stopped() {
            Some(Health::Closed) => Err(EncodeError::Closed),
            Some(_) => Err(EncodeError::Unavailable),
            None if self.lock().closing => Err(EncodeError::Closed),
            None if !self.status().available => Err(EncodeError::Unavailable),
            None => Ok(()),
        }
    }

    fn admit(&self, images: usize) -> Result<tokio::sync::SemaphorePermit<'_>, EncodeError> {
        let max = self.config.max_pending_images;
        if images as u64 > max {
            let error = ItemError::TooLarge { cost: images as u64, max };
            return Err(EncodeError::Item { index: None, error });
        }
        let permits = u32::try_from(images).ok().and_then(|images| self.room.try_acquire_many(images).ok());
        permits.ok_or_else(|| {
            let queued = max.saturating_sub(self.room.available_permits() as u64);
            EncodeError::Busy { queued, max }
        })
    }

    /// All images, or the first error in their order once all are through.
    async fn preprocess_all(&self, images: Vec<RawImage>) -> Result<Vec<Preprocessed<P::Item>>, EncodeError> {
        let named = |index, error| EncodeError::Item { index: Some(index), error };
        if self.spec.preprocess_concurrency == 0 {
            let all = images.into_iter().enumerate();
            return all.map(|(index, raw)| self.preprocess.preprocess(raw).map_err(|e| named(index, e))).collect();
        }
        let mut tasks = Vec::with_capacity(images.len());
        for raw in images {
            tasks.push(tokio::spawn(on_pool(self.pool.clone(), self.preprocess.clone(), raw)));
        }
        let _guard = Abort(tasks.iter().map(tokio::task::JoinHandle::abort_handle).collect());
        let (mut done, mut first) = (Vec::with_capacity(tasks.len()), None);
        for (index, task) in tasks.into_iter().enumerate() {
            let result = task.await.unwrap_or_else(|_| Err(ItemError::Internal("preprocessing panicked".into())));
            match result {
                Ok(item) => done.push(item),
                Err(error) => _ = first.get_or_insert(named(index, error)),
            }
        }
        first.map_or(Ok(done), Err)
    }

    fn submit(&self, images: Vec<Preprocessed<P::Item>>) -> Result<(Queued<'_, P>, Answer), EncodeError> {
        let work = images.into_iter().map(|Preprocessed { item, cost, key }| Work { item, cost, key }).collect();
        let (answer, receiver) = oneshot::channel();
        let request = {
            let mut queue = self.lock();
            if queue.closing {
                return Err(EncodeError::Closed);
            }
            let request = queue.batcher.submit(work)?;
            queue.waiters.insert(request, Waiter { answer, submitted: Instant::now(), dispatched: false });
            request
        };
        self.work.notify_one();
        Ok((Queued { service: self, request }, receiver))
    }
}

/// Ends what has not begun when the request is dropped.
struct Abort(Vec<tokio::task::AbortHandle>);

impl Drop for Abort {
    fn drop(&mut self) {
        self.0.iter().for_each(tokio::task::AbortHandle::abort);
    }
}

async fn on_pool<P: Preprocess>(
    pool: Arc<tokio::sync::Semaphore>,
    preprocess: Arc<P>,
    raw: RawImage,
) -> Result<Preprocessed<P::Item>, ItemError> {
    let lost = |_| ItemError::Unavailable;
    let permit = pool.acquire_owned().await.map_err(lost)?;
    let work = move || {
        let _permit = permit;
        preprocess.preprocess(raw)
    };
    let result = tokio::task::spawn_blocking(work).await;
    result.unwrap_or_else(|_| Err(ItemError::Internal("preprocessing panicked".into())))
}
