//! What an encoder must be able to do to be served.

use std::num::NonZeroU32;
use std::sync::Arc;

use bytes::Bytes;
use fovea_kv::MediaId;

use crate::error::{BatchError, BuildError, ItemError};
use crate::tensor::{DType, Embedding};

/// One image of a request, as its client sent it.
#[derive(Clone, Debug)]
pub struct RawImage {
    /// The file: a JPEG, a PNG …
    pub bytes: Bytes,
    /// As the client named it, when it did.
    pub mime: Option<String>,
    pub id: MediaId,
    /// Place among the request's images, from 0.
    pub index: usize,
}

/// An image ready for a forward pass.
#[derive(Clone, Debug)]
pub struct Preprocessed<I> {
    pub item: I,
    /// In the encoder's unit, at least 1; often the rows of its embedding.
    pub cost: u32,
    /// Images of different keys never share a batch.
    pub key: u64,
}

/// What an encoder says of itself once it is built.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EncoderSpec {
    /// Columns of its embeddings, when known before the first one.
    pub width: Option<u32>,
    pub dtype: Option<DType>,
    /// `None`: no limit.
    pub max_batch_cost: Option<NonZeroU32>,
    pub max_batch_items: Option<NonZeroU32>,
    /// Costs for which it is prepared, ascending.
    pub buckets: Vec<u32>,
    /// Images preprocessed at once; 0: preprocessing does nothing worth a thread.
    pub preprocess_concurrency: usize,
    /// Equal images give equal bytes, alone and in any batch.
    pub deterministic: bool,
    /// Hash of all that an embedding depends on besides the image.
    pub fingerprint: [u8; 32],
}

/// How a built encoder is now.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackendStatus {
    pub available: bool,
    /// Times that it was started again since it was built.
    pub restarts: u64,
}

/// The part of an encoder that any thread may use.
pub trait Preprocess: Send + Sync + 'static {
    type Item: Send + 'static;

    /// Decodes, resizes, cuts into patches. May block: it runs on a thread of its own kind.
    ///
    /// # Errors
    /// What is wrong with this image alone.
    fn preprocess(&self, raw: RawImage) -> Result<Preprocessed<Self::Item>, ItemError>;

    fn status(&self) -> BackendStatus {
        BackendStatus { available: true, restarts: 0 }
    }
}

/// The part of an encoder that lives on one thread, from its build to its end.
pub trait VisionEncoder: 'static {
    type Item: Send + 'static;
    type Pre: Preprocess<Item = Self::Item>;

    /// One result per item, in order. `bucket`: the smallest of the encoder's buckets that holds the batch's cost.
    ///
    /// # Errors
    /// What befell the batch as a whole.
    fn forward_batch(
        &mut self,
        items: &[Self::Item],
        bucket: Option<u32>,
    ) -> Result<Vec<Result<Embedding, ItemError>>, BatchError>;

    /// Called once, after the last batch, unless the encoder panicked.
    fn close(&mut self) {}
}

/// A backend's three parts.
pub struct Built<B: VisionEncoder> {
    pub encoder: B,
    pub preprocess: Arc<B::Pre>,
    pub spec: EncoderSpec,
}

/// What a build gives. It runs on the thread that will run the encoder.
pub type BuildResult<B> = Result<Built<B>, BuildError>;
