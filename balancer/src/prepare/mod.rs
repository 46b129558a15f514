//! A request's meaning: body in, routing view, hashes and preamble out. CPU work only; never on a network thread.
//!
//! **Invariant:** what cannot be predicted exactly ends the view there and is named (`ViewKind`); a guess is never passed on as exact.
//! **Invariant:** an identity is set only on a part whose bytes travel in the same request; clients' uuids are cut from all others.

mod chat;
mod completion;
mod dialect;
mod error;
mod files;
mod image;
mod inline;
mod isolation;
mod item;
mod key;
mod learnt;
mod place;
mod rendering;
mod view;

use std::path::Path;

use fovea_gossip::message::EngineFacts;
use fovea_gossip::preamble::Preamble;
use fovea_kv::{BlockSize, MediaId, SequenceHash};
use fovea_media::data_url;
use fovea_media::estimate::{Estimate, VideoHints, audio_tokens};
use fovea_media::family::{VideoModel, VisionModel};
use fovea_media::header::HeaderError;
use fovea_openai::{ChatRequest, Common, CompletionRequest, Hazard, MediaKind, MediaPart};
use fovea_prompt::PromptModel;
use xxhash_rust::xxh3::xxh3_64;

pub use error::{LoadError, PrepareError};
use files::Files;
pub use image::{MediaSource, Named};
pub use isolation::Isolation;
pub use learnt::{Learnt, LearntMedia, NothingLearnt};
pub use rendering::Rendering;

/// Bytes of text in one token, and tokens of a media item of which nothing is known: rough means, for guesses.
const TEXT_BYTES_PER_TOKEN: usize = 4;
const TOKENS_PER_MEDIA: u32 = 1024;

/// Reason of a request to a model whose files are not at hand.
const NO_MODEL: &str = "no_model_dir";

/// Which part of the OpenAI API a body is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ApiPath {
    ChatCompletions,
    Completions,
}

impl ApiPath {
    /// The end point of a request path, `None` for every other.
    pub fn parse(path: &str) -> Option<Self> {
        match path {
            "/v1/chat/completions" => Some(Self::ChatCompletions),
            "/v1/completions" => Some(Self::Completions),
            _ => None,
        }
    }
}

/// How far the view is known to equal what the engine will cache.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ViewKind {
    Exact,
    /// As exact, and rests on what an engine was seen to use for the media in it.
    Learnt,
    /// As exact, and rests on what an engine's renderer showed of images of the same size.
    Rendered,
    /// Exact up to where it ends; what follows is not known.
    Prefix {
        reason: &'static str,
    },
    /// Nothing is known; routed by load alone.
    None {
        reason: &'static str,
    },
}

impl ViewKind {
    /// Nothing is known for want of the model's files.
    pub fn lacks_model(&self) -> bool {
        matches!(self, Self::None { reason } if *reason == NO_MODEL)
    }

    /// The view reaches to the end of the prompt.
    pub fn is_whole(&self) -> bool {
        matches!(self, Self::Exact | Self::Learnt | Self::Rendered)
    }
}

impl std::fmt::Display for ViewKind {
    /// `exact`, `exact;by=learnt`, `exact;by=renderer`, `prefix;reason=…` or `none;reason=…`.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exact => f.write_str("exact"),
            Self::Learnt => f.write_str("exact;by=learnt"),
            Self::Rendered => f.write_str("exact;by=renderer"),
            Self::Prefix { reason } => write!(f, "prefix;reason={reason}"),
            Self::None { reason } => write!(f, "none;reason={reason}"),
        }
    }
}

/// One media item whose place in the prompt is known.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Media {
    pub kind: MediaKind,
    /// As the engine keys it; `None` where its tokens are its identity (SGLang).
    pub id: Option<MediaId>,
    /// As the engine measures it, in pixels; 0 = not known.
    pub width: u32,
    pub height: u32,
    /// Placeholder positions it fills, and the first of them.
    pub tokens: u32,
    pub start: u32,
}

/// What the balancer needs to route a request and the sidecar to serve it.
#[derive(Clone, Debug)]
pub struct Prepared {
    pub view: ViewKind,
    /// Tokens of the prompt as far as known; all prompts together when the request has several.
    pub prompt_tokens: u32,
    /// Lengths of the single prompts when there are several; empty otherwise.
    pub prompts: Vec<u32>,
    /// Full blocks of the prompt; prompts one after another when there are several.
    pub hashes: Vec<SequenceHash>,
    /// In prompt order, as far as hashed.
    pub media: Vec<Media>,
    /// The first media part whose image has more pixels than we let through.
    pub oversized: Option<usize>,
    /// The first media part whose bytes no engine reads as an image, and why.
    pub unreadable: Option<(usize, HeaderError)>,
    /// Name of the first media item, where it has one: equal items shall meet.
    pub affinity: Option<[u8; 32]>,
    /// `prompt_tokens` are those of the whole prompt.
    pub counted: bool,
    /// The engine looks into its cache for this prompt: it does not for one whose log probabilities are asked for, and stores it all the
    /// same.
    pub reads_cache: bool,
    /// Hash of the client's session key, for session affinity.
    pub session: Option<u64>,
    /// Model name as the client wrote it; empty when absent.
    pub model: String,
    pub stream: bool,
    pub preamble: Preamble,
}

/// A request as scanned from its body, before anything is known of who will serve it.
#[derive(Debug)]
pub enum Request<'a> {
    Chat(Box<ChatRequest<'a>>),
    Completion(Box<CompletionRequest<'a>>),
}

impl<'a> Request<'a> {
    /// Scans a body; O(bytes), image data stays where it is.
    ///
    /// # Errors
    /// Only for a body that no engine would take.
    pub fn parse(path: ApiPath, body: &'a [u8]) -> Result<Self, PrepareError> {
        let body = std::str::from_utf8(body).map_err(|error| PrepareError::NotUtf8 { offset: error.valid_up_to() })?;
        Ok(match path {
            ApiPath::ChatCompletions => Self::Chat(Box::new(ChatRequest::parse(body)?)),
            ApiPath::Completions => Self::Completion(Box::new(CompletionRequest::parse(body)?)),
        })
    }

    /// Model name as the client wrote it; empty when absent.
    pub fn model(&self) -> &str {
        self.common().model.as_deref().unwrap_or_default()
    }

    /// As the client wrote it, for the engine's queue and ours; 0 when absent.
    pub fn priority(&self) -> i64 {
        self.common().priority.unwrap_or_default()
    }

    /// Tokens of the prompt, by the length of its text and an estimate of its media: for the load that a prompt makes which cannot be
    /// predicted.
    pub fn guessed_tokens(&self, body_bytes: usize, guess: Guess<'_>) -> u32 {
        let media_bytes: usize = self.media().iter().filter_map(|part| part.url.as_deref()).map(str::len).sum();
        let text = body_bytes.saturating_sub(media_bytes) / TEXT_BYTES_PER_TOKEN;
        let media = self.media().iter().map(|part| guess.tokens(part)).fold(0, u32::saturating_add);
        u32::try_from(text).unwrap_or(u32::MAX).saturating_add(media.min(guess.media_max))
    }

    /// Media items in the request.
    pub fn media_count(&self) -> usize {
        self.media().len()
    }

    fn media(&self) -> &[MediaPart<'a>] {
        match self {
            Self::Chat(request) => &request.media,
            Self::Completion(_) => &[],
        }
    }

    /// Images, and videos if wanted, that are given by URL: place among all media parts, kind, URL.
    pub fn media_urls(&self, videos: bool) -> Vec<(usize, MediaKind, &str)> {
        let wanted = |kind| kind == MediaKind::Image || videos && kind == MediaKind::Video;
        let parts = self.media().iter().enumerate().filter(|(_, part)| wanted(part.kind));
        let urls = parts.filter_map(|(place, part)| Some((place, part.kind, part.url.as_deref()?)));
        urls.filter(|(.., url)| !data_url::is_data_url(url)).collect()
    }

    /// What parts this client's cache from others'; empty = nothing.
    pub fn cache_salt(&self) -> &str {
        self.common().cache_salt.as_deref().unwrap_or_default()
    }

    /// The first thing in it that an engine must not see.
    pub fn hazard(&self, embeddings_allowed: bool) -> Option<Hazard> {
        match self {
            Self::Chat(request) => request.hazard(embeddings_allowed),
            Self::Completion(request) => request.hazard(embeddings_allowed),
        }
    }

    fn common(&self) -> &Common<'a> {
        match self {
            Self::Chat(request) => &request.common,
            Self::Completion(request) => &request.common,
        }
    }
}

/// What the tokens of media are guessed by.
#[derive(Clone, Copy)]
pub struct Guess<'a> {
    pub estimate: &'a Estimate,
    /// What the request's headers say of every video in it.
    pub videos: VideoHints,
    /// Most tokens of all its media together.
    pub media_max: u32,
}

impl Guess<'_> {
    fn tokens(&self, part: &MediaPart<'_>) -> u32 {
        let url = part.url.as_deref().unwrap_or_default();
        match (part.kind, url.split_once(':')) {
            (MediaKind::Image, _) => self.estimate.image_tokens(url),
            (MediaKind::Video, _) => self.estimate.video_tokens(&self.videos),
            (MediaKind::Audio, Some(("data", data))) => {
                audio_tokens(data.split_once(',').map_or(data, |(_, data)| data), "")
            }
            // Bare base64: a URL has a colon.
            (MediaKind::Audio, None) if !url.is_empty() => audio_tokens(url, ""),
            (MediaKind::Audio | MediaKind::Embedding | MediaKind::PromptEmbedding, _) => TOKENS_PER_MEDIA,
        }
    }
}

/// A request to a model whose files are not at hand: nothing is predicted, but what clients must not set is cut all the same.
pub fn unprepared(request: &Request<'_>) -> Prepared {
    let common = request.common();
    let uuids = request.media().iter().filter_map(|part| part.uuid_cut.clone());
    let cuts = common.cuts.iter().cloned().chain(uuids).collect();
    Prepared::unknown(common, NO_MODEL).with_edits(Vec::new(), cuts)
}

/// As [`unprepared`], with the tenant's salt put into the body. `None` = the body stays as it is.
pub fn unprepared_body(
    request: &Request<'_>,
    isolation: Option<&Isolation>,
    body: &[u8],
) -> (Prepared, Option<Vec<u8>>) {
    let (mut prepared, common) = (unprepared(request), request.common());
    let salt = isolation.map(|isolation| isolation.salt(common.cache_salt.as_deref().unwrap_or_default()));
    let replacements = salt.map(|salt| inline::salt(common, &salt)).into_iter().collect();
    let body = inline::replace(body, replacements, &mut prepared.preamble);
    (prepared, body)
}

/// What a prediction depends on besides the request and the model's files.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    pub engine: &'a EngineFacts,
    pub block_size: BlockSize,
    /// Adapter that the request asks for; "" = the base model.
    pub lora: &'a str,
    /// What is known of media given by URL.
    pub media: &'a MediaSource,
    /// Most pixels of one image, by its header.
    pub pixels_max: u64,
    /// What engines like this one were seen to use.
    pub learnt: &'a dyn Learnt,
    /// False = what the engine caches of media was not what was predicted: views end before the first item.
    pub media_trusted: bool,
    /// Predict videos by a rule that no engine was seen to follow. Else the view ends before a video.
    pub unmeasured_videos: bool,
    /// Sets the request apart from other tenants'. `None` = it shares with all who are not set apart.
    pub isolation: Option<&'a Isolation>,
    /// Fingerprint of the encoder that takes the images in the engine's place.
    pub encoder: Option<[u8; 32]>,
}

/// What becomes of uuids that clients send.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ClientUuid {
    /// Replaced by the content's own identity.
    #[default]
    Replace,
    /// Taken as the identity, and parts without one get none. For trusted, single-tenant use: a uuid can read another client's image.
    Keep,
}

/// Everything that one model needs to be predicted, loaded once. Shared by all threads.
pub struct Preparer {
    prompt: PromptModel,
    /// `None` for a text model, or one of a family without a rule: the view then ends at the first image of a size that no renderer showed.
    vision: Option<VisionModel>,
    /// Likewise for videos.
    video: Option<VideoModel>,
    files: Files,
    placeholders: view::Placeholders,
    /// The token of which an image is a run and nothing else; without a rule, the image token of the config.
    pad: Option<u32>,
    client_uuid: ClientUuid,
}

impl Preparer {
    /// Loads tokenizer, chat template and image rules from a model directory. Blocking; takes a second for a large vocabulary.
    ///
    /// # Errors
    /// When a file that every model has is missing or damaged. An unknown family is no error: its images end the view.
    pub fn load(dir: &Path, client_uuid: ClientUuid) -> Result<Self, LoadError> {
        let files = Files::read(dir)?;
        let prompt = PromptModel::load(dir)?;
        let vision = files
            .vision(&prompt, None)
            .inspect_err(|error| tracing::info!(dir = %dir.display(), %error, "images of this model are not predicted"))
            .ok();
        let video = files.video(&prompt).ok();
        let placeholders = view::Placeholders::new(&files.config);
        let pad = match &vision {
            Some(vision) => place::pad_of(vision, placeholders.image),
            None => placeholders.image,
        };
        Ok(Self { prompt, vision, video, files, placeholders, pad, client_uuid })
    }

    /// Images of this model are worth fetching: they can be predicted, or learnt.
    pub fn predicts_images(&self) -> bool {
        self.vision.is_some() || self.pad.is_some() || self.files.config.get("vision_config").is_some()
    }

    /// Token ids of a chat before any image is expanded, as its engine would have them; the config's image token. `None` when it cannot
    /// be rendered.
    pub fn unexpanded(&self, body: &str) -> Option<(Vec<u32>, Option<u32>)> {
        let request = ChatRequest::parse(body).ok()?;
        Some((self.chat_tokens(&request, self.vision.as_ref()).ok()?, self.placeholders.image))
    }

    /// Videos of this model are worth fetching.
    pub fn predicts_videos(&self) -> bool {
        self.video.is_some()
    }

    /// As [`prepare`](Self::prepare), with fetched media put into the body where the source says so. `None` = the body stays as it is.
    pub fn prepare_body(&self, request: &Request<'_>, target: Target<'_>, body: &[u8]) -> (Prepared, Option<Vec<u8>>) {
        let mut prepared = self.prepare(request, target);
        let mut replacements = match target.media {
            MediaSource::Fetched { files, inline: true } => inline::images(request.media(), files),
            _ => Vec::new(),
        };
        let (common, client) = (request.common(), request.common().cache_salt.as_deref());
        let salt = target.isolation.map(|isolation| isolation.salt(client.unwrap_or_default()));
        replacements.extend(salt.map(|salt| inline::salt(common, &salt)));
        let body = inline::replace(body, replacements, &mut prepared.preamble);
        (prepared, body)
    }

    /// What a request means to engines like `target`. Whatever cannot be told ends the view.
    pub fn prepare(&self, request: &Request<'_>, target: Target<'_>) -> Prepared {
        let prepared = match request {
            Request::Chat(request) => self.chat(request, target),
            Request::Completion(request) => self.completion(request, target),
        };
        let longest = prepared.prompts.iter().copied().max().unwrap_or(prepared.prompt_tokens);
        match target.engine.max_model_len {
            // At least one token must be left for the answer.
            limit if limit > 0 && longest >= limit => prepared.without_hashes("longer than max_model_len"),
            _ => prepared,
        }
    }
}

/// Hash of what names the client's session: its own key first, then the cache key, then the user.
fn session(common: &Common<'_>) -> Option<u64> {
    let key = common.session_id.as_deref().or(common.prompt_cache_key.as_deref()).or(common.user.as_deref());
    key.filter(|key| !key.is_empty()).map(|key| xxh3_64(key.as_bytes()))
}

#[cfg(test)]
mod tests;
