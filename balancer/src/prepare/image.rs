//! Media of a request: bytes or name; of images, identity and size.
//!
//! Inline images are decoded and hashed each time: 0.2 ms for 640 kB. Only a cryptographic hash of the text could be the key of a
//! memory of them, and costs as much: with any other, a client could give one image's identity to another.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::PathBuf;

use bytes::Bytes;
use fovea_gossip::message::EngineKind;
use fovea_kv::{MediaId, MediaKey};
use fovea_media::data_url;
use fovea_media::header::{self, HeaderError, ImageHeader};
use fovea_media::identity::{Options, Source, vllm_image_id, vllm_item_id};
use fovea_openai::{MediaKind, MediaPart};

use super::Target;

/// Reason of an image that is larger than we let through: its decoding alone may take an engine down.
pub(super) const TOO_MANY_PIXELS: &str = "pixels";

/// Reason of an item by URL of which nothing is known here.
const LEFT_TO_THE_ENGINE: &str = "image left to the engine";

/// What is known of the files behind http(s) URLs.
#[derive(Clone, Debug, Default)]
pub enum MediaSource {
    /// Nothing: the engine fetches them, and the view ends at the first.
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
    /// Looked at, by URL as the request has it: the engine fetches them.
    Named(HashMap<String, Named>),
}

/// What a URL policy tells of an item that the engine fetches itself.
#[derive(Clone, Copy, Debug)]
pub struct Named {
    pub key: MediaKey,
    /// `None` = its first bytes did not tell, or it is no image.
    pub header: Option<ImageHeader>,
}

/// What an item's part leads to.
pub(super) enum Found<'s> {
    /// `travels` = the bytes are in the request to the engine.
    Bytes {
        bytes: Cow<'s, [u8]>,
        travels: bool,
    },
    Named(Named),
}

/// What is known of one image.
pub(super) enum Look {
    Bytes(Facts),
    Named(Named),
    /// The bytes that the engine gets are of no image that it reads.
    Unreadable(HeaderError),
}

/// What the bytes of one image tell.
#[derive(Clone, Copy, Debug)]
pub(super) struct Facts {
    /// Identity of the bytes: what is set as uuid where they travel along.
    pub content: MediaId,
    /// As vLLM keys it when no uuid is set, under the request's options.
    pub unnamed: MediaId,
    pub header: ImageHeader,
    /// The bytes travel in the request to the engine.
    pub travels: bool,
}

impl MediaSource {
    /// What is known of an image part, or why nothing is.
    pub(super) fn look_at(
        &self,
        part: &MediaPart<'_>,
        options: Options<'_>,
        target: &Target<'_>,
    ) -> Result<Look, &'static str> {
        match self.find(part)? {
            Found::Bytes { bytes, travels } => match header::read(&bytes) {
                Ok(header) => facts(&bytes, header, options, target, travels).map(Look::Bytes),
                Err(HeaderError::TooManyPixels { .. }) => Err(TOO_MANY_PIXELS),
                Err(error) if travels && error.engine_refuses() => Ok(Look::Unreadable(error)),
                Err(_) => Err("image of unknown format or size"),
            },
            Found::Named(named) => Ok(Look::Named(named)),
        }
    }

    /// The bytes or the name of a part's item.
    pub(super) fn find(&self, part: &MediaPart<'_>) -> Result<Found<'_>, &'static str> {
        let Some(url) = part.url.as_deref() else { return Err("null image") };
        let inline = |url: &str| {
            let bytes = data_url::decode(url).map_err(|_| "image data that an engine would refuse")?;
            Ok(Found::Bytes { bytes: bytes.into(), travels: true })
        };
        if data_url::is_data_url(url) {
            return inline(url);
        }
        // `input_audio` has bare base64.
        if part.kind == MediaKind::Audio && !url.contains("://") {
            return inline(&format!("data:;base64,{url}"));
        }
        match self {
            Self::EngineOnly => Err(LEFT_TO_THE_ENGINE),
            Self::Folder(folder) => {
                let path = url.split(['?', '#']).next().unwrap_or_default();
                let name = path.rsplit('/').next().filter(|name| !name.is_empty() && *name != "..");
                let file = folder.join(name.ok_or("url without a file name")?);
                let bytes = std::fs::read(file).map_err(|_| "image not in the media folder")?;
                Ok(Found::Bytes { bytes: bytes.into(), travels: false })
            }
            Self::Fetched { files, inline } => match files.get(url) {
                Some(Ok(bytes)) => Ok(Found::Bytes { bytes: Cow::Borrowed(bytes), travels: *inline }),
                Some(Err(reason)) => Err(reason),
                None => Err("image not fetched"),
            },
            Self::Named(names) => names.get(url).map(|named| Found::Named(*named)).ok_or(LEFT_TO_THE_ENGINE),
        }
    }
}

fn facts(
    bytes: &[u8],
    header: ImageHeader,
    options: Options<'_>,
    target: &Target<'_>,
    travels: bool,
) -> Result<Facts, &'static str> {
    if u64::from(header.width) * u64::from(header.height) > target.pixels_max {
        return Err(TOO_MANY_PIXELS);
    }
    if target.engine.kind != EngineKind::Vllm {
        let content = MediaId(*blake3::hash(bytes).as_bytes());
        return Ok(Facts { content, unnamed: content, header, travels });
    }
    let model = &target.engine.engine_model;
    let content = vllm_image_id(bytes, header.converted, model);
    let unnamed = match options.is_empty() {
        true => content,
        false => vllm_item_id(Source::File { bytes, converted: header.converted }, options, model),
    };
    Ok(Facts { content, unnamed, header, travels })
}
