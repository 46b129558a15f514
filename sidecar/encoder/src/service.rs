//! One encoder, served: requests in, embeddings out.
//!
//! A thread of its own builds the encoder, runs every forward pass and closes it, because devices bind their state to a thread.
//! **Invariant:** a request's images are all preprocessed before any is queued, so a bad image costs no forward pass.
//! **Invariant:** every wait ends: by an answer, by the encoder's end, or by the caller dropping the future.

mod actor;
mod request;
mod stats;
#[cfg(test)]
mod tests;

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use crate::backend::{BackendStatus, BuildResult, EncoderSpec, RawImage, VisionEncoder};
use crate::error::{BuildError, EncodeError};
use crate::tensor::Embedding;

pub use stats::Stats;

/// How an encoder is served.
#[derive(Clone, Debug)]
pub struct ServiceConfig {
    /// Cost that may wait for a forward pass, in the encoder's unit; more is answered by [`EncodeError::Busy`].
    pub max_queued_cost: u64,
    /// Images in preprocessing, queue and forward pass together.
    pub max_pending_images: u64,
    /// Wait for more images before a batch that is not full. Zero: none.
    pub coalesce: Duration,
    /// In place of the encoder's own bound, when lower.
    pub max_batch_items: Option<std::num::NonZeroU32>,
}

impl Default for ServiceConfig {
    fn default() -> Self {
        Self { max_queued_cost: 65_536, max_pending_images: 1024, coalesce: Duration::ZERO, max_batch_items: None }
    }
}

/// How an encoder is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Health {
    Ready,
    /// Lost, and coming back by itself.
    Restarting,
    /// Lost for good: restart the program.
    Failed,
    Closed,
}

type Encoding<'a> = Pin<Box<dyn Future<Output = Result<Vec<Embedding>, EncodeError>> + Send + 'a>>;

/// What the handle needs of a service, whatever its encoder's types.
trait Serve: Send + Sync {
    fn encode(&self, images: Vec<RawImage>) -> Encoding<'_>;
    fn spec(&self) -> &EncoderSpec;
    fn stopped(&self) -> Option<Health>;
    fn status(&self) -> BackendStatus;
    fn stats(&self) -> Stats;
    fn begin_close(&self);
    fn closed(&self) -> Pin<Box<dyn Future<Output = ()> + Send + '_>>;
}

/// Handle to a served encoder; clones share it. The last one dropped closes it.
#[derive(Clone)]
pub struct Encoder {
    service: Arc<Handle>,
}

struct Handle(Arc<dyn Serve>);

impl Drop for Handle {
    fn drop(&mut self) {
        self.0.begin_close();
    }
}

impl Encoder {
    /// Builds an encoder on its own thread and serves it.
    ///
    /// # Errors
    /// When the build fails or panics, or its spec makes no sense; the encoder is not closed then.
    pub async fn start<B, F>(config: ServiceConfig, build: F) -> Result<Self, BuildError>
    where
        B: VisionEncoder,
        F: FnOnce() -> BuildResult<B> + Send + 'static,
    {
        let service = actor::start(config, build).await?;
        Ok(Self { service: Arc::new(Handle(service)) })
    }

    /// Embeddings of a request's images, in order. Dropping the future takes the images out of the queue.
    ///
    /// # Errors
    /// The first image that is at fault, in order; or that the encoder is full, lost or closed.
    pub async fn encode(&self, images: Vec<RawImage>) -> Result<Vec<Embedding>, EncodeError> {
        self.service.0.encode(images).await
    }

    pub fn spec(&self) -> &EncoderSpec {
        self.service.0.spec()
    }

    pub fn health(&self) -> Health {
        match self.service.0.stopped() {
            Some(health) => health,
            None if self.service.0.status().available => Health::Ready,
            None => Health::Restarting,
        }
    }

    /// Counters since the start, for metrics.
    pub fn stats(&self) -> Stats {
        self.service.0.stats()
    }

    /// Fails what waits, lets the forward pass in flight finish, closes the encoder and waits for its thread to end.
    pub async fn close(&self) {
        self.service.0.begin_close();
        self.service.0.closed().await;
    }
}
