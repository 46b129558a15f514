//! The id under which vLLM keys an image (0.32, `multimodal/hasher.py`): framed blake3 over the file bytes.

use fovea_kv::MediaId;
use serde_json::{Map, Value};

/// Tags of values in the framing.
const NONE: u8 = 0;
const SEQUENCE: u8 = 1;
const MAPPING: u8 = 2;
const LEAF: u8 = 3;

/// What stands for the image in its id.
#[derive(Clone, Copy, Debug)]
pub enum Source<'a> {
    /// `bytes` = the file as received; `converted` = its pixels are not RGB (`ImageHeader::converted`).
    File { bytes: &'a [u8], converted: bool },
    /// The part's uuid, verbatim.
    Uuid(&'a str),
}

/// Options of a request that enter the id; `None` = absent or empty. Keys keep the order in which the client wrote them.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options<'a> {
    pub mm_processor: Option<&'a Map<String, Value>>,
    /// The request's `media_io_kwargs.image`.
    pub media_io: Option<&'a Map<String, Value>>,
}

impl Options<'_> {
    /// Nothing that enters an id.
    pub fn is_empty(&self) -> bool {
        self.mm_processor.is_none_or(Map::is_empty) && self.media_io.is_none_or(Map::is_empty)
    }
}

/// vLLM's default id of an image without uuid and without processor or media options.
///
/// `engine_model` = the model string given to `vllm serve`. The bytes are hashed in place. EXIF ImageID, which the
/// sender chooses, is ignored.
pub fn vllm_image_id(bytes: &[u8], converted: bool, engine_model: &str) -> MediaId {
    vllm_item_id(Source::File { bytes, converted }, Options::default(), engine_model)
}

/// vLLM's id of an image part: its uuid when it has one and no option is set, else a hash of everything that enters.
pub fn vllm_item_id(source: Source<'_>, options: Options<'_>, engine_model: &str) -> MediaId {
    if let (Source::Uuid(uuid), true) = (source, options.is_empty()) {
        return MediaId::from_engine_id(uuid);
    }
    let mut frame = Frame(blake3::Hasher::new());
    match source {
        Source::Uuid(uuid) => frame.sized(b"image").tag(LEAF).sized(uuid.as_bytes()),
        Source::File { bytes, converted } => frame.file(bytes, converted, options.media_io),
    };
    frame.options(b"image", options).sized(b"model_id").tag(LEAF).sized(engine_model.as_bytes());
    MediaId(*frame.0.finalize().as_bytes())
}

/// What an image is called that an encoder outside of the engine turns into rows; `named` = what it is called without. Of images alone.
///
/// `blake3("fovea-embedding" ‖ named ‖ fingerprint)`: an engine keys KV by it, so rows of another encoder must have another.
pub fn encoded_id(named: &MediaId, fingerprint: &[u8; 32]) -> MediaId {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"fovea-embedding").update(&named.0).update(fingerprint);
    MediaId(*hasher.finalize().as_bytes())
}

/// vLLM's id of a video part with a uuid: the uuid when no option is set, else a hash of it with them (0.33,
/// `processing/inputs.py`). `media_io` of the options is the request's `media_io_kwargs.video`, over the server's.
///
/// Without a uuid the id also depends on what was decoded, so only a video that was given one has an id known here.
pub fn vllm_video_id(uuid: &str, options: Options<'_>, engine_model: &str) -> MediaId {
    if options.is_empty() {
        return MediaId::from_engine_id(uuid);
    }
    let mut frame = Frame(blake3::Hasher::new());
    frame.options(b"video", options).sized(b"model_id").tag(LEAF).sized(engine_model.as_bytes());
    frame.sized(b"video").tag(LEAF).sized(uuid.as_bytes());
    MediaId(*frame.0.finalize().as_bytes())
}

/// What we name a video or sound by, of all the bytes of its file: a uuid for it that no two files share.
pub fn content_id(bytes: &[u8]) -> MediaId {
    MediaId(*blake3::hash(bytes).as_bytes())
}

/// Writes the framing straight into the hasher.
struct Frame(blake3::Hasher);

impl Frame {
    fn tag(&mut self, tag: u8) -> &mut Self {
        self.0.update(&[tag]);
        self
    }

    fn count(&mut self, count: u64) -> &mut Self {
        self.0.update(&count.to_le_bytes());
        self
    }

    fn file(&mut self, bytes: &[u8], converted: bool, media_io: Option<&Map<String, Value>>) -> &mut Self {
        self.sized(b"image").tag(LEAF).sized(b"image");
        if converted {
            self.tag(MAPPING).count(2).sized(b"io_config").tag(MAPPING).count(2);
            self.sized(b"image_mode").tag(LEAF).sized(b"RGB").sized(b"rgba_background_color");
            match media_io.and_then(|map| map.get("rgba_background_color")) {
                Some(color) => self.value(color),
                None => self.value(&Value::from([255, 255, 255].as_slice())),
            };
            self.sized(b"data");
        }
        self.tag(LEAF).sized(bytes)
    }

    fn options(&mut self, kind: &[u8], options: Options<'_>) -> &mut Self {
        if let Some(media_io) = options.media_io.filter(|map| !map.is_empty()) {
            self.sized(b"media_io_kwargs").tag(MAPPING).count(1).sized(kind).map(media_io);
        }
        if let Some(processor) = options.mm_processor.filter(|map| !map.is_empty()) {
            self.sized(b"mm_processor_kwargs").map(processor);
        }
        self
    }

    fn map(&mut self, map: &Map<String, Value>) -> &mut Self {
        self.tag(MAPPING).count(map.len() as u64);
        for (key, value) in map {
            self.sized(key.as_bytes()).value(value);
        }
        self
    }

    /// A JSON value as Python reads it. The depth is that of the parsed request, which is bounded.
    fn value(&mut self, value: &Value) -> &mut Self {
        match value {
            Value::Null => self.tag(NONE),
            Value::Bool(flag) => self.tag(LEAF).sized(&[u8::from(*flag)]),
            Value::String(text) => self.tag(LEAF).sized(text.as_bytes()),
            Value::Number(number) => match (number.as_i64(), number.as_f64()) {
                (Some(whole), _) => self.tag(LEAF).sized(&whole.to_le_bytes()),
                (None, real) => self.tag(LEAF).sized(&real.unwrap_or(f64::NAN).to_le_bytes()),
            },
            Value::Array(items) => {
                self.tag(SEQUENCE).count(items.len() as u64);
                items.iter().fold(self, |frame, item| frame.value(item))
            }
            Value::Object(map) => self.map(map),
        }
    }

    /// Length, then the bytes.
    fn sized(&mut self, bytes: &[u8]) -> &mut Self {
        self.count(bytes.len() as u64);
        self.0.update(bytes);
        self
    }
}

#[cfg(test)]
mod tests;
