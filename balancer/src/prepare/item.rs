//! One media item of a request with all that its place in the routing view needs.

use std::borrow::Cow;
use std::sync::Arc;

use fovea_kv::{MediaId, MediaKey};
use fovea_media::container::{self, File};
use fovea_media::family::{Shape, VideoIo, VideoModel, VideoShape, VisionModel};
use fovea_media::header::{HeaderError, ImageHeader};
use fovea_media::identity::{Options, Source, vllm_item_id};
use fovea_openai::{MediaKind, MediaPart};
use serde_json::Value;

use super::chat::Chat;
use super::dialect::{Form, Keyed};
use super::image::{Facts, Found, Look, Named};
use super::key::{NamedOptions, Naming, content_key, url_key};
use super::{ClientUuid, Rendering};

/// Options of `media_io_kwargs.image` that change the identity alone, not the count.
const IMAGE_IO_OPTIONS: [&str; 1] = ["rgba_background_color"];

/// What an item becomes, by a model's rule or as its engine's renderer showed it.
#[derive(Clone, Debug)]
pub(super) enum Made {
    Image(Shape),
    Video(VideoShape),
    Rendered(Arc<Rendering>),
}

impl Made {
    /// Feature tokens: positions that embeddings fill; of what was only shown, all positions.
    pub fn tokens(&self) -> u32 {
        match self {
            Self::Image(shape) => shape.tokens(),
            Self::Video(shape) => shape.tokens(),
            Self::Rendered(rendering) => rendering.expansion().len(),
        }
    }
}

/// A media item, known as far as it can be.
#[derive(Clone, Debug)]
pub(super) struct Item {
    pub kind: MediaKind,
    /// What we call it; `None` = nothing names it.
    pub key: Option<MediaKey>,
    /// What brings equal items to one worker.
    pub affinity: Option<[u8; 32]>,
    /// Identity to set on its part.
    pub set: Option<MediaId>,
    /// As the engine measures it, (width, height) in pixels; (0, 0) = not known.
    pub size: (u32, u32),
    /// What it becomes by the model's rule, or why no rule tells.
    pub shape: Result<Made, &'static str>,
    /// As the engine keys it, or why that is not known.
    pub keyed: Result<Keyed, &'static str>,
    /// Its bytes were not seen: a name stands for them.
    pub by_name: bool,
    /// Why every engine refuses the bytes that it gets.
    pub unreadable: Option<HeaderError>,
    /// Why it cannot have a place in the view at all.
    pub fault: Option<&'static str>,
}

impl Item {
    fn new(kind: MediaKind, fault: Option<&'static str>) -> Self {
        let unknown = fault.unwrap_or("media");
        Self {
            kind,
            key: None,
            affinity: None,
            set: None,
            size: (0, 0),
            shape: Err(unknown),
            keyed: Err(unknown),
            by_name: false,
            unreadable: None,
            fault,
        }
    }

    pub fn id(&self) -> Option<MediaId> {
        match &self.keyed {
            Ok(Keyed { form: Form::Span(id), .. }) => Some(*id),
            _ => None,
        }
    }

    /// Why the view ends before it, where it is not known whole.
    pub fn reason(&self) -> Option<&'static str> {
        self.fault.or(self.keyed.as_ref().err().copied()).or(match &self.keyed {
            Ok(keyed) if keyed.tokens == 0 => self.shape.as_ref().err().copied(),
            _ => None,
        })
    }
}

impl Chat<'_> {
    /// What is known of one media part.
    pub(super) fn item(&self, part: &MediaPart<'_>) -> Item {
        match part.kind {
            MediaKind::Image => self.image(part),
            MediaKind::Video => self.video(part),
            MediaKind::Audio => self.unplaced(part, "audio").0,
            MediaKind::Embedding | MediaKind::PromptEmbedding => Item::new(part.kind, Some("embeddings")),
        }
    }

    fn image(&self, part: &MediaPart<'_>) -> Item {
        let (options, odd) = self.options();
        match self.target.media.look_at(part, options, &self.target) {
            Err(reason) => Item::new(part.kind, Some(reason)),
            Ok(Look::Bytes(facts)) => self.image_by_bytes(part, &facts, options, odd),
            Ok(Look::Named(named)) => self.image_by_name(part, &named, odd),
            Ok(Look::Unreadable(error)) => {
                Item { unreadable: Some(error), ..Item::new(part.kind, Some("image that no engine reads")) }
            }
        }
    }

    fn image_by_bytes(
        &self,
        part: &MediaPart<'_>,
        facts: &Facts,
        options: Options<'_>,
        odd: Option<&'static str>,
    ) -> Item {
        let sets = self.target.sets_identities();
        let under = |uuid: &str| vllm_item_id(Source::Uuid(uuid), options, &self.target.engine.engine_model);
        let named = self.target.image_named(facts.content);
        // An encoder's sidecar names every image itself.
        let client_uuid = self.target.encoder.map_or(self.model.client_uuid, |_| ClientUuid::Replace);
        let (naming, own) = match (client_uuid, &part.uuid) {
            (ClientUuid::Keep, Some(uuid)) if sets => (Naming::Client(uuid), under(uuid)),
            (ClientUuid::Replace, _) if sets && facts.travels => (Naming::Ours, under(&named.to_string())),
            _ => (Naming::Engine, facts.unnamed),
        };
        let content = if matches!(naming, Naming::Ours) { named } else { facts.content };
        let key = content_key(&content.0, naming, self.lora(), &self.all_options(part));
        let mut keyed = self.target.keyed(Some(&key), odd.map_or(Ok(own), Err));
        let size = self.size(&facts.header);
        let (shape, fault) = self.shape(part, size, odd);
        if let (Ok(keyed), true) = (&mut keyed, sets && shape.is_ok()) {
            // A span may share a token with its neighbour, which who counts positions cannot tell.
            keyed.tokens = 0;
        }
        Item {
            key: Some(key),
            affinity: Some(if sets && odd.is_none() { own.0 } else { key.0 }),
            set: (sets && facts.travels && client_uuid == ClientUuid::Replace).then_some(named),
            size,
            shape,
            keyed,
            ..Item::new(part.kind, fault)
        }
    }

    /// An image that the engine fetches: the name may stand for other bytes by the time it does, so it is never set as an identity.
    fn image_by_name(&self, part: &MediaPart<'_>, named: &Named, odd: Option<&'static str>) -> Item {
        let key = url_key(named.key, self.lora(), &self.all_options(part));
        let size = named.header.map_or((0, 0), |header| self.size(&header));
        let (shape, fault) = match size {
            (0, 0) => (Err("size of the image is not known"), None),
            _ => self.shape(part, size, odd),
        };
        let keyed = self.target.keyed(Some(&key), Err("media_not_learnt"));
        Item { key: Some(key), affinity: Some(key.0), size, shape, keyed, by_name: true, ..Item::new(part.kind, fault) }
    }

    fn size(&self, header: &ImageHeader) -> (u32, u32) {
        if self.target.engine.exif { header.upright() } else { (header.width, header.height) }
    }

    /// A video: by its bytes in vLLM alone. Elsewhere it ends the view.
    fn video(&self, part: &MediaPart<'_>) -> Item {
        let (item, bytes) = self.unplaced(part, "video");
        let (Some(model), Some(bytes)) = (&self.model.video, bytes.filter(|_| self.target.sets_identities())) else {
            return item;
        };
        let (size, shape) = match self.video_shape(model, &bytes) {
            Ok((size, shape)) => (size, shape),
            Err(reason) => return Item { fault: Some(reason), ..item },
        };
        if !model.is_measured() && !self.target.unmeasured_videos {
            return Item { fault: Some("video_not_measured"), ..item };
        }
        let common = &self.request.common;
        let plain = common.mm_processor_kwargs.is_empty() && common.media_io_kwargs.is_empty();
        let own = item.set.filter(|_| plain).ok_or("video_without_name");
        let keyed = self.target.keyed(item.key.as_ref(), own);
        Item { size, shape: Ok(Made::Video(shape)), keyed, fault: None, ..item }
    }

    fn video_shape(&self, model: &VideoModel, bytes: &[u8]) -> Result<((u32, u32), VideoShape), &'static str> {
        let common = &self.request.common;
        if !common.mm_processor_kwargs.is_empty() {
            return Err("request processor kwargs");
        }
        let facts = container::video(File::whole(bytes)).map_err(|_| "video of unknown format or size")?;
        let io = match common.media_io_kwargs.get("video") {
            None => VideoIo::default(),
            Some(Value::Object(map)) => VideoIo::merge(None, Some(map)).map_err(|_| "request media kwargs")?,
            Some(_) => return Err("request media kwargs"),
        };
        let sampled = io.sample(model.loader(), &facts).map_err(|_| "video of unknown length")?;
        let shape = model.measure_sampled(&sampled).map_err(|_| "engine_refuses")?;
        Ok(((sampled.width, sampled.height), shape))
    }

    /// An item whose place is not known, named by its bytes: equal ones meet, and no client names them.
    fn unplaced<'p>(&'p self, part: &MediaPart<'_>, fault: &'static str) -> (Item, Option<Cow<'p, [u8]>>) {
        let item = Item::new(part.kind, Some(fault));
        match self.target.media.find(part) {
            Err(_) => (item, None),
            Ok(Found::Named(named)) => (Item { affinity: Some(named.key.0), ..item }, None),
            Ok(Found::Bytes { bytes, travels }) => {
                let content = MediaId(*blake3::hash(&bytes).as_bytes());
                let named = self.target.sets_identities() && travels && self.model.client_uuid == ClientUuid::Replace;
                let content = if named { self.target.named(content) } else { content };
                let naming = if named { Naming::Ours } else { Naming::Engine };
                let key = Some(content_key(&content.0, naming, self.lora(), &self.all_options(part)));
                (Item { key, affinity: Some(content.0), set: named.then_some(content), ..item }, Some(bytes))
            }
        }
    }

    /// What an image of this size becomes; and whether the engine refuses it.
    fn shape(
        &self,
        part: &MediaPart<'_>,
        size: (u32, u32),
        odd: Option<&'static str>,
    ) -> (Result<Made, &'static str>, Option<&'static str>) {
        // Only vLLM's options are in the rule.
        let foreign = !self.target.sets_identities() && self.all_options(part).iter().any(|(_, map)| !map.is_empty());
        if let Some(reason) = odd.or(foreign.then_some("request media options")) {
            return (Err(reason), None);
        }
        let vision: Result<&VisionModel, _> = self.vision.as_deref().map_err(|reason| *reason);
        match vision.map(|vision| vision.measure(size.0, size.1)) {
            Ok(Ok(shape)) => (Ok(Made::Image(shape)), None),
            Ok(Err(_)) => (Err("engine_refuses"), Some("engine_refuses")),
            Err(reason) => (self.rendering(part, size).unwrap_or(Err(reason)), None),
        }
    }

    /// What a renderer showed of images of this size: where there is no rule, in vLLM alone. Elsewhere an item's identity must be seen
    /// first, and its count is seen with it.
    fn rendering(&self, part: &MediaPart<'_>, (width, height): (u32, u32)) -> Option<Result<Made, &'static str>> {
        let plain = self.request.common.mm_processor_kwargs.is_empty();
        let wanted = plain && self.model.vision.is_none() && self.target.sets_identities() && self.target.media_trusted;
        let rendering = wanted.then(|| self.target.learnt.rendering(width, height))??;
        let first = self.request.media.iter().find(|part| part.kind == MediaKind::Image);
        let shown = !rendering.is_first_only() || first.is_some_and(|first| std::ptr::eq(first, part));
        Some(if shown { Ok(Made::Rendered(rendering)) } else { Err("image_after_the_first") })
    }

    /// Options of the request that enter vLLM's identities, and why their effect is not known, if so.
    fn options(&self) -> (Options<'_>, Option<&'static str>) {
        let common = &self.request.common;
        let (media_io, odd) = match common.media_io_kwargs.get("image") {
            None => (None, None),
            Some(Value::Object(map)) if map.keys().all(|key| IMAGE_IO_OPTIONS.contains(&key.as_str())) => {
                (Some(map), None)
            }
            Some(_) => (None, Some("request media kwargs")),
        };
        (Options { mm_processor: Some(&common.mm_processor_kwargs), media_io }, odd)
    }

    /// The adapter by whose name vLLM keys media apart when it is told to (`--enable-tower-connector-lora`).
    fn lora(&self) -> &str {
        if self.target.sets_identities() { self.target.lora } else { "" }
    }

    /// Everything in the request that may change what this engine makes of an item, for its key.
    fn all_options<'p>(&'p self, part: &'p MediaPart<'_>) -> Vec<NamedOptions<'p>> {
        let common = &self.request.common;
        let mut options =
            vec![("mm_processor_kwargs", &common.mm_processor_kwargs), ("media_io_kwargs", &common.media_io_kwargs)];
        if !self.target.sets_identities() {
            options.extend([("part", &part.options), ("patches", &common.patch_options)]);
        }
        options
    }
}
