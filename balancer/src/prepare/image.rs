//! Images of a request: bytes, identity and size. A repeated image costs one pass over its text.
//!
//! Only inline (`data:`) images have bytes here. An http(s) image is left to the engine, unless a local folder stands in for the web
//! (`explain` on captures).

use std::hash::{BuildHasher, RandomState};
use std::path::PathBuf;

use fovea_kv::MediaId;
use fovea_media::{data_url, header, identity};
use fovea_openai::{MediaKind, MediaPart};
use quick_cache::sync::Cache;
use xxhash_rust::xxh3::{xxh3_64_with_seed, xxh3_128_with_seed};

/// Images remembered, about 120 bytes each.
const MEMO_MAX: usize = 32_768;

/// Where bytes of http(s) images come from.
#[derive(Clone, Debug, Default)]
pub enum MediaSource {
    /// Nowhere: the engine fetches them, and the view ends at the first.
    #[default]
    EngineOnly,
    /// A folder whose files stand in for URLs with the same last path segment.
    Folder(PathBuf),
}

/// What is known of one image.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    pub id: MediaId,
    /// As stored, then upright, (width, height) in pixels.
    pub stored: (u32, u32),
    pub upright: (u32, u32),
    /// The bytes travel in the request.
    pub inline: bool,
}

/// Reads images, and remembers inline ones.
pub(super) struct Images {
    source: MediaSource,
    /// Key: two hashes of the text under secret seeds, so that no client can craft two texts that meet, and its length.
    memo: Cache<(u128, u64, usize), Facts>,
    seed: u64,
}

impl Images {
    pub fn new(source: MediaSource) -> Self {
        Self { source, memo: Cache::new(MEMO_MAX), seed: RandomState::new().hash_one("fovea") }
    }

    /// Facts of an image part, or why there are none.
    pub fn look_at(&self, part: &MediaPart<'_>, engine_model: &str) -> Result<Facts, &'static str> {
        match part.kind {
            MediaKind::Image => {}
            MediaKind::Video => return Err("video"),
            MediaKind::Audio => return Err("audio"),
            MediaKind::Embedding | MediaKind::PromptEmbedding => return Err("embeddings"),
        }
        let Some(url) = part.url.as_deref() else { return Err("null image") };
        if data_url::is_data_url(url) {
            return self.inline(url, engine_model);
        }
        match &self.source {
            MediaSource::EngineOnly => Err("image left to the engine"),
            MediaSource::Folder(folder) => {
                let path = url.split(['?', '#']).next().unwrap_or_default();
                let name = path.rsplit('/').next().filter(|name| !name.is_empty() && *name != "..");
                let file = folder.join(name.ok_or("url without a file name")?);
                let bytes = std::fs::read(file).map_err(|_| "image not in the media folder")?;
                facts(&bytes, engine_model, false)
            }
        }
    }

    fn inline(&self, url: &str, engine_model: &str) -> Result<Facts, &'static str> {
        let model = xxh3_64_with_seed(engine_model.as_bytes(), self.seed);
        let key = (xxh3_128_with_seed(url.as_bytes(), model), xxh3_64_with_seed(url.as_bytes(), !model), url.len());
        if let Some(known) = self.memo.get(&key) {
            return Ok(known);
        }
        let bytes = data_url::decode(url).map_err(|_| "image data that an engine would refuse")?;
        let found = facts(&bytes, engine_model, true)?;
        self.memo.insert(key, found);
        Ok(found)
    }
}

fn facts(bytes: &[u8], engine_model: &str, inline: bool) -> Result<Facts, &'static str> {
    let header = header::read(bytes).map_err(|_| "image of unknown format or size")?;
    let id = identity::vllm_image_id(bytes, header.converted, engine_model);
    Ok(Facts { id, stored: (header.width, header.height), upright: header.upright(), inline })
}
