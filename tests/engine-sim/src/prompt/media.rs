//! Media parts of a request: bytes, identity and token count, and the processor cache that lets a client leave the
//! bytes out.

use super::{Model, PromptError};
use crate::config::{EngineKind, SimConfig};
use crate::image;
use crate::sglang::identity;
use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasher, Hasher, RandomState};

/// A media part as the client wrote it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Attachment {
    /// `None`: the bytes are to come from the processor cache.
    pub url: Option<String>,
    /// The client's identity, taken verbatim (vLLM).
    pub uuid: Option<String>,
    /// `image_url.detail`.
    pub detail: Option<String>,
    /// `image_url.content_hash`: must be that of the bytes (SGLang).
    pub content_hash: Option<String>,
}

/// A media part, ready for expansion.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Resolved {
    /// The engine's identity.
    pub id: String,
    /// Placeholder tokens.
    pub tokens: usize,
}

/// Token counts of processed images by identity, as vLLM's processor cache: a known identity wins over new bytes.
#[derive(Debug, Default)]
pub struct MediaCache {
    tokens: HashMap<String, usize>,
    order: VecDeque<String>,
    /// Look-ups and hits, for the metrics.
    pub queries: u64,
    pub hits: u64,
}

/// Items kept; the oldest leaves first.
const CACHE_ITEMS_MAX: usize = 4096;

impl MediaCache {
    /// Forgets all items (`/reset_mm_cache`).
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.order.clear();
    }

    fn get(&mut self, id: &str) -> Option<usize> {
        self.queries += 1;
        let found = self.tokens.get(id).copied();
        self.hits += u64::from(found.is_some());
        found
    }

    fn insert(&mut self, id: &str, tokens: usize) {
        if self.tokens.insert(id.to_owned(), tokens).is_none() {
            self.order.push_back(id.to_owned());
        }
        if self.order.len() > CACHE_ITEMS_MAX
            && let Some(oldest) = self.order.pop_front()
        {
            self.tokens.remove(&oldest);
        }
    }
}

impl Model {
    /// Identity and token count of one part. `bytes` is `None` when the part has no URL.
    ///
    /// # Errors
    /// Not a picture, a shape that the model refuses, or left out and unknown.
    pub fn resolve(
        &self,
        index: usize,
        uuid: Option<&str>,
        bytes: Option<&[u8]>,
        engine_model: &str,
        cache: &mut MediaCache,
    ) -> Result<Resolved, PromptError> {
        let Some(bytes) = bytes else {
            let id = uuid.unwrap_or_default().to_owned();
            let missing = || format!("Cache miss for image at index {index} but data is not provided.");
            let tokens = cache.get(&id).ok_or_else(|| PromptError::bad(missing()))?;
            return Ok(Resolved { id, tokens });
        };
        let unknown = || PromptError::bad("Failed to load image: cannot identify image file <_io.BytesIO object>");
        let picture = image::read(bytes).ok_or_else(unknown)?;
        let id = match uuid {
            Some(uuid) => uuid.to_owned(),
            None => image::default_id(bytes, picture.converted, engine_model),
        };
        if let Some(tokens) = cache.get(&id) {
            return Ok(Resolved { id, tokens });
        }
        let refused = || PromptError::bad("absolute aspect ratio must be smaller than 200");
        let tokens = self.image_tokens(picture.width, picture.height).ok_or_else(refused)?;
        cache.insert(&id, tokens);
        Ok(Resolved { id, tokens })
    }
}

impl Model {
    /// Identity and token count of one part as SGLang and TensorRT-LLM have them: their hash of the content, whatever
    /// the client says. TensorRT-LLM's is BLAKE3 of pixels; ours of the file's bytes.
    ///
    /// # Errors
    /// No bytes, not a picture, a shape that the model refuses, or other bytes than `content_hash` says.
    pub fn resolve_hashed(
        &self,
        part: &Attachment,
        bytes: Option<&[u8]>,
        config: &SimConfig,
    ) -> Result<Resolved, PromptError> {
        let bytes = bytes.ok_or_else(|| PromptError::bad("image_url: url is required"))?;
        let unknown = || PromptError::bad("Failed to load image: cannot identify image file");
        let picture = image::read(bytes).ok_or_else(unknown)?;
        if part.content_hash.as_ref().is_some_and(|hash| *hash != identity::content_hash(bytes)) {
            return Err(PromptError::bad("content_hash does not match the image's bytes"));
        }
        let id = match (config.engine_kind, config.random_media_hash) {
            (EngineKind::Trtllm, _) => {
                blake3::Hasher::new_derive_key("engine-sim trtllm image").update(bytes).finalize().to_hex().to_string()
            }
            (_, true) => identity::span_id(RandomState::new().build_hasher().finish()),
            (_, false) => {
                let detail = part.detail.as_deref();
                identity::span_id(identity::item_hash(bytes, detail, &config.processor_fingerprint))
            }
        };
        let refused = || PromptError::bad("absolute aspect ratio must be smaller than 200");
        let tokens = self.image_tokens(picture.width, picture.height).ok_or_else(refused)?;
        Ok(Resolved { id, tokens })
    }
}

/// Bytes of a base64 `data:` URL.
///
/// # Errors
/// Not base64, or another encoding.
pub fn decode_data_url(url: &str) -> Result<Vec<u8>, PromptError> {
    let rest = url.strip_prefix("data:").unwrap_or(url);
    let (kind, data) = rest.split_once(',').ok_or_else(|| PromptError::bad("Invalid data URL: no comma"))?;
    if !kind.ends_with(";base64") {
        return Err(PromptError::bad("Only base64 data URLs are supported for now."));
    }
    let decoded = base64_simd::STANDARD.decode_to_vec(data);
    decoded.map_err(|_| PromptError::bad("Failed to load image: Invalid base64-encoded string"))
}
