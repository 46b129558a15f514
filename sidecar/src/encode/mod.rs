//! The encoder beside the engine: built at start, used by the request path, and never bypassed while it is configured.
//!
//! **Invariant:** an image reaches the engine as checked rows under an identity made here of its bytes and the encoder, or its request is
//! refused. **Invariant:** what a part refers to lives until the request has ended.

mod fault;
pub mod images;
pub mod start;

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use bytes::Bytes;
use fovea_encoder::backend::RawImage;
use fovea_encoder::cache::{CacheKey, EmbeddingCache};
use fovea_encoder::handoff::{EncodedImage, HandOff, Lease};
use fovea_encoder::service::Encoder;
use fovea_encoder::tensor::{Checked, check};
use fovea_gossip::message::{EngineFacts, EngineKind};
use fovea_kv::MediaId;
use futures_util::future::try_join_all;
use serde_json::{Value, json};
use tokio::task::spawn_blocking;

use crate::config::encoder::EncoderConfig;
pub use fault::Fault;
use images::Image;

/// Engine for which a hand-off was chosen.
#[derive(Clone, Debug, PartialEq, Eq)]
struct EngineName {
    kind: EngineKind,
    version: String,
    model: String,
}

impl EngineName {
    fn of(facts: &EngineFacts) -> Self {
        Self { kind: facts.kind, version: facts.version.clone(), model: facts.engine_model.clone() }
    }
}

/// An encoder and a hand-off that fit the engine.
pub struct Ready {
    encoder: Encoder,
    hand_off: Arc<dyn HandOff>,
    cache: EmbeddingCache<Fault>,
    engine: EngineName,
}

enum Status {
    /// In words for an operator.
    NotReady(String),
    Ready(Arc<Ready>),
}

/// The encoder as the rest of the sidecar sees it.
pub struct Encoding {
    pub config: EncoderConfig,
    status: RwLock<Status>,
}

/// Parts of one request, encoded: in place of the images' own, and what must live until its end.
pub struct Encoded {
    pub parts: Vec<Bytes>,
    pub leases: Leases,
}

/// What the engine may read while it has the request. Dropped before its end, all of it stays for the grace: the engine may not have
/// heard yet that nobody waits, and one that misses a file ends.
pub struct Leases {
    held: Vec<Lease>,
    grace: Duration,
}

impl Leases {
    /// The engine has ended the request.
    pub fn ended(mut self) {
        self.held.clear();
    }
}

impl Drop for Leases {
    fn drop(&mut self) {
        let held: Vec<Lease> = std::mem::take(&mut self.held).into_iter().filter(Lease::holds).collect();
        if let (false, Ok(runtime)) = (held.is_empty(), tokio::runtime::Handle::try_current()) {
            let grace = self.grace;
            runtime.spawn(async move {
                tokio::time::sleep(grace).await;
                drop(held);
            });
        }
    }
}

impl Encoding {
    pub fn new(config: EncoderConfig) -> Self {
        Self { config, status: RwLock::new(Status::NotReady("the engine has not been seen yet".to_owned())) }
    }

    /// The encoder for this engine.
    ///
    /// # Errors
    /// While there is none, or while it was set up for another engine.
    pub fn ready(&self, facts: Option<&EngineFacts>) -> Result<Arc<Ready>, Fault> {
        match &*self.status.read().unwrap_or_else(PoisonError::into_inner) {
            Status::Ready(ready) if facts.is_some_and(|facts| EngineName::of(facts) == ready.engine) => {
                Ok(Arc::clone(ready))
            }
            _ => Err(Fault::NotReady),
        }
    }

    /// Why it is not ready, for readiness.
    pub fn problem(&self) -> Option<String> {
        match &*self.status.read().unwrap_or_else(PoisonError::into_inner) {
            Status::NotReady(problem) => Some(problem.clone()),
            Status::Ready(_) => None,
        }
    }

    fn set(&self, status: Status) {
        *self.status.write().unwrap_or_else(PoisonError::into_inner) = status;
    }

    /// For `/debug/state`.
    pub fn debug(&self) -> Value {
        match &*self.status.read().unwrap_or_else(PoisonError::into_inner) {
            Status::NotReady(problem) => json!({"ready": false, "problem": problem}),
            Status::Ready(ready) => ready.debug(),
        }
    }
}

impl Ready {
    pub fn fingerprint(&self) -> [u8; 32] {
        self.encoder.spec().fingerprint
    }

    fn key(&self, image: &Image) -> CacheKey {
        CacheKey { media: image.media, options: 0, fingerprint: self.fingerprint() }
    }

    /// What the engine is to call the image.
    pub fn identity(&self, image: &Image) -> MediaId {
        self.key(image).identity()
    }

    pub fn engine_model(&self) -> &str {
        &self.engine.model
    }

    /// Encodes all images of a request, in order. Dropping the future takes those that wait out of the encoder's queue.
    ///
    /// # Errors
    /// The first image that fails; then none is handed off.
    pub async fn encode(&self, images: &[Image], config: &EncoderConfig) -> Result<Encoded, Fault> {
        let rows = try_join_all(images.iter().map(|image| self.rows(image, config.join_timeout))).await?;
        let encoded: Vec<EncodedImage> = images
            .iter()
            .zip(rows)
            .map(|(image, embedding)| EncodedImage { id: self.identity(image), embedding })
            .collect();
        let (hand_off, grace) = (Arc::clone(&self.hand_off), config.handoff.grace);
        let handed = spawn_blocking(move || {
            let mut parts = Vec::with_capacity(encoded.len());
            let mut held = Vec::with_capacity(encoded.len());
            for image in &encoded {
                let (part, lease) = hand_off.part(image)?;
                parts.push(part);
                held.push(lease);
            }
            // Nothing was sent yet if this fails half-way: those leases need no grace.
            Ok::<_, Fault>(Encoded { parts, leases: Leases { held, grace } })
        });
        handed.await.unwrap_or(Err(Fault::Internal))
    }

    async fn rows(&self, image: &Image, wait_max: Duration) -> Result<Arc<Checked>, Fault> {
        let index = image.index;
        let raw = RawImage { bytes: image.bytes.clone(), mime: None, id: image.media, index };
        let encode = || async move {
            let rows = self.encoder.encode(vec![raw]).await.map_err(|error| {
                tracing::debug!(index, error = error.detail(), "an image was not encoded");
                Fault::Encode(error)
            })?;
            let one = rows.into_iter().next().ok_or(Fault::Internal)?;
            let checked = check(one, &self.hand_off.expect(None)).map_err(|error| Fault::unfit(index, &error))?;
            Ok(Arc::new(checked))
        };
        let rows = self.cache.get(self.key(image), wait_max, encode).await;
        let rows = rows.map_err(|error| Fault::got(index, error))?;
        rows.suits(&self.hand_off.expect(image.rows)).map_err(|error| Fault::unfit(index, &error))?;
        Ok(rows)
    }

    fn debug(&self) -> Value {
        let (stats, cache) = (self.encoder.stats(), self.cache.stats());
        let files = self.hand_off.files().map(|files| {
            json!({
                "files": files.files, "bytes": files.bytes, "leases": files.leases, "written": files.written,
                "reused": files.reused, "evicted": files.evicted, "refused": files.refused,
            })
        });
        json!({
            "ready": true,
            "health": format!("{:?}", self.encoder.health()).to_lowercase(),
            "fingerprint": MediaId(self.fingerprint()).to_string(),
            "handoff": self.hand_off.name(),
            "requests": stats.requests, "images": stats.images, "batches": stats.batches,
            "restarts": stats.restarts, "queued_cost": stats.queued_cost, "pending_images": stats.pending_images,
            "errors": stats.errors.iter().sum::<u64>(),
            "cache": {
                "hits": cache.hits, "misses": cache.misses, "joins": cache.joins, "evictions": cache.evictions,
                "bytes": cache.bytes, "entries": cache.entries,
            },
            "files": files,
        })
    }
}
