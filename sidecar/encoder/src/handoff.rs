//! Ways to give an engine an image's rows, one per kind of engine; which of them is used is chosen once, at start.
//!
//! **Invariant:** a part made here carries an identity that we made, 16 to 64 lower-case hex digits, and nothing of the client's.
//! **Invariant:** either all images of a request are handed off or none: vLLM answers 400 to a mix of pixels and embeddings.
//!
//! [`HandOff::part`] may write megabytes and block for some milliseconds: call it where blocking is allowed.

pub mod choose;
pub mod ec_shm;
pub mod flags;
pub mod image_embeds;
pub mod prompt_embeds;
pub mod sglang_epd;
pub mod trtllm;

#[cfg(test)]
mod tests;

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use bytes::Bytes;
use fovea_kv::MediaId;

use crate::format::FormatError;
use crate::format::base64;
use crate::tensor::{CheckError, Checked, Expect};
use flags::Requirement;

/// One image of a request, encoded and checked.
#[derive(Clone, Debug)]
pub struct EncodedImage {
    /// What the engine keys the image by: see [`crate::cache::identity`].
    pub id: MediaId,
    pub embedding: Arc<Checked>,
}

/// Keeps what a part refers to alive. Hold it until the engine has ended the request: a preempted request loads its images again, and
/// an engine that misses one ends. Shared holders keep the thing until the last one goes.
#[must_use = "dropping a lease lets what the engine will read go away"]
#[derive(Default)]
pub struct Lease(Option<Box<dyn Any + Send + Sync>>);

impl Lease {
    /// For parts that carry all they need.
    pub fn none() -> Self {
        Self(None)
    }

    pub fn holding(held: impl Any + Send + Sync) -> Self {
        Self(Some(Box::new(held)))
    }

    /// Whether something is kept alive at all.
    pub fn holds(&self) -> bool {
        self.0.is_some()
    }
}

impl fmt::Debug for Lease {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Lease").field(&self.holds()).finish()
    }
}

/// Why an image cannot be handed to the engine.
#[derive(Debug, thiserror::Error)]
pub enum HandOffError {
    #[error("embedding does not fit this engine")]
    Unfit(#[from] CheckError),
    #[error("embedding has no form that this engine reads")]
    Format(#[from] FormatError),
    #[error(
        "encoder cache needs {needed} bytes and has {free} of {budget} that no request holds: raise encoder.handoff.bytes or admit fewer requests"
    )]
    Full { needed: u64, free: u64, budget: u64 },
    #[error("encoder cache is written by another request, which took longer than {waited_ms} ms")]
    Busy { waited_ms: u64 },
    #[error("encoder cache: cannot {action} {path}")]
    Io {
        action: &'static str,
        path: String,
        #[source]
        source: std::io::Error,
    },
    #[error("too many images wait for their engine, {max} at most: admit fewer requests")]
    TooManyWaiting { max: usize },
}

impl HandOffError {
    /// HTTP status of the answer: 503 when waiting helps, else 500. Nothing here is the client's fault.
    pub fn status(&self) -> u16 {
        match self {
            Self::Full { .. } | Self::Busy { .. } | Self::TooManyWaiting { .. } => 503,
            Self::Unfit(_) | Self::Format(_) | Self::Io { .. } => 500,
        }
    }
}

/// One way to give an engine its rows.
pub trait HandOff: Send + Sync + fmt::Debug {
    /// Name in configuration and metrics.
    fn name(&self) -> &'static str;

    /// What an image's embedding must be; `rows` = tokens that the balancer counted.
    fn expect(&self, rows: Option<u32>) -> Expect;

    /// Flags that the engine must have been started with.
    fn requirements(&self) -> Vec<Requirement>;

    /// JSON of the content part that stands in place of the image's own, and what must live until the request ends.
    ///
    /// # Errors
    /// When the embedding was checked for another model, or there is no room for it.
    fn part(&self, image: &EncodedImage) -> Result<(Bytes, Lease), HandOffError>;

    /// Figures of the files that it writes, if it writes any.
    fn files(&self) -> Option<ec_shm::EcStats> {
        None
    }
}

/// `{"type":"image_embeds","uuid":"…","image_embeds":` with room for `more` bytes.
fn part_head(id: &MediaId, more: usize) -> Vec<u8> {
    let mut out = Vec::with_capacity(160 + more);
    out.extend_from_slice(format!(r#"{{"type":"image_embeds","uuid":"{id}","image_embeds":"#).as_bytes());
    out
}

/// Appends a JSON string of base64 over pieces that are not joined first.
fn push_base64(out: &mut Vec<u8>, pieces: &[&[u8]]) {
    out.push(b'"');
    let mut encoder = base64::Encoder::new(out);
    pieces.iter().for_each(|piece| encoder.push(piece));
    encoder.finish();
    out.push(b'"');
}
