//! Images of a request: bytes, identity and size.
//!
//! Inline images are decoded and hashed each time: 0.2 ms for 640 kB. Only a cryptographic hash of the text could be the key of a
//! memory of them, and costs as much: with any other, a client could give one image's identity to another.

use std::collections::HashMap;
use std::path::PathBuf;

use bytes::Bytes;
use fovea_kv::MediaId;
use fovea_media::data_url;
use fovea_media::header::{self, HeaderError};
use fovea_media::identity::{Options, Source, vllm_image_id, vllm_item_id};
use fovea_openai::{MediaKind, MediaPart};

/// Reason of an image that is larger than we let through: its decoding alone may take an engine down.
pub(super) const TOO_MANY_PIXELS: &str = "pixels";

/// Where bytes of http(s) images come from.
#[derive(Clone, Debug, Default)]
pub enum MediaSource {
    /// Nowhere: the engine fetches them, and the view ends at the first.
    #[default]
    EngineOnly,
    /// A folder whose files stand in for URLs with the same last path segment.
    Folder(PathBuf),
    /// Fetched before, by URL as the request has it; or why not.
    Fetched {
        files: HashMap<String, Result<Bytes, &'static str>>,
        /// They are passed on inline, in place of their URLs; otherwise the engine fetches them once more.
        inline: bool,
    },
}

/// What is known of one image.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    /// Identity of the bytes: what is set as uuid where they travel along.
    pub content: MediaId,
    /// As the engine keys it when no uuid is set, under the request's options.
    pub unnamed: MediaId,
    /// As stored, then upright, (width, height) in pixels.
    pub stored: (u32, u32),
    pub upright: (u32, u32),
    /// The bytes travel in the request to the engine.
    pub travels: bool,
}

impl MediaSource {
    /// What is known of an image part, or why nothing is.
    pub(super) fn look_at(
        &self,
        part: &MediaPart<'_>,
        options: Options<'_>,
        engine_model: &str,
        pixels_max: u64,
    ) -> Result<Facts, &'static str> {
        match part.kind {
            MediaKind::Image => {}
            MediaKind::Video => return Err("video"),
            MediaKind::Audio => return Err("audio"),
            MediaKind::Embedding | MediaKind::PromptEmbedding => return Err("embeddings"),
        }
        let Some(url) = part.url.as_deref() else { return Err("null image") };
        let facts = |bytes: &[u8], travels| {
            let found = facts(bytes, options, engine_model, travels)?;
            let pixels = u64::from(found.stored.0) * u64::from(found.stored.1);
            if pixels > pixels_max { Err(TOO_MANY_PIXELS) } else { Ok(found) }
        };
        if data_url::is_data_url(url) {
            let bytes = data_url::decode(url).map_err(|_| "image data that an engine would refuse")?;
            return facts(&bytes, true);
        }
        match self {
            Self::EngineOnly => Err("image left to the engine"),
            Self::Folder(folder) => {
                let path = url.split(['?', '#']).next().unwrap_or_default();
                let name = path.rsplit('/').next().filter(|name| !name.is_empty() && *name != "..");
                let file = folder.join(name.ok_or("url without a file name")?);
                facts(&std::fs::read(file).map_err(|_| "image not in the media folder")?, false)
            }
            Self::Fetched { files, inline } => match files.get(url) {
                Some(Ok(bytes)) => facts(bytes, *inline),
                Some(Err(reason)) => Err(reason),
                None => Err("image not fetched"),
            },
        }
    }
}

fn facts(bytes: &[u8], options: Options<'_>, engine_model: &str, travels: bool) -> Result<Facts, &'static str> {
    let header = header::read(bytes).map_err(|error| match error {
        HeaderError::TooManyPixels { .. } => TOO_MANY_PIXELS,
        _ => "image of unknown format or size",
    })?;
    let content = vllm_image_id(bytes, header.converted, engine_model);
    let unnamed = match options.is_empty() {
        true => content,
        false => vllm_item_id(Source::File { bytes, converted: header.converted }, options, engine_model),
    };
    Ok(Facts { content, unnamed, stored: (header.width, header.height), upright: header.upright(), travels })
}
