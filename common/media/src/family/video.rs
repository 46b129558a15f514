//! Videos of the Qwen families, their frames sampled already (transformers 5.19 `Qwen2VLVideoProcessor`, `Qwen3VLVideoProcessor`;
//! vLLM 0.32 `qwen2_vl.py`, `qwen3_vl.py`).
//!
//! From transformers 5.10 on, which vLLM 0.33 asks for, only the placeholder token itself is replaced: the marks that the template
//! writes around it stay. Qwen3-VL then writes marks of its own around each temporal patch, and the patch's time in front.

use fovea_kv::RoutingView;

use super::fields::Fields;
use super::shape::Size;
use super::smart_resize::{Defaults, SmartResize};
use super::words::{Ids, Word, Words};
use super::{ConfigError, ModelFiles, Refused};

/// More frames than any engine samples (Qwen's limit is 768); bounds the work per video.
const FRAMES_MAX: u32 = 1 << 16;

/// How a family treats time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Time {
    /// The bounds are for each frame, and time is not written.
    PerFrame,
    /// The bounds are for the whole video, and each temporal patch gets its time.
    Stamped,
}

/// Families by `model_type` of config.json.
const FAMILIES: &[(&str, Time)] = &[
    ("qwen2_vl", Time::PerFrame),
    ("qwen2_5_vl", Time::PerFrame),
    ("qwen3_vl", Time::Stamped),
    ("qwen3_vl_moe", Time::Stamped),
    ("qwen3_5", Time::Stamped),
    ("qwen3_5_moe", Time::Stamped),
];

/// Sampled frames of one video.
#[derive(Clone, Copy, Debug)]
pub struct Video {
    pub width: u32,
    pub height: u32,
    pub frames: u32,
    /// Frames per second of which these are a sample taken at indices 0, 1, 2, …
    pub fps: f64,
}

/// What a video becomes.
#[derive(Clone, Debug, PartialEq)]
pub struct VideoShape {
    /// Temporal patches, and features of each.
    patches: u32,
    features: u32,
    /// Text in front of each patch, if the family has it.
    stamps: Vec<String>,
}

/// What is needed to predict the videos of one model.
pub struct VideoModel {
    time: Time,
    resize: SmartResize,
    /// Frames in a temporal patch.
    temporal: u32,
    ids: Ids,
    pad: Word,
    start: Word,
    end: Word,
}

impl VideoModel {
    /// As [`super::VisionModel::from_files`]; the preprocessor file is `video_preprocessor_config.json`.
    ///
    /// # Errors
    /// As there.
    pub fn from_files(
        files: &ModelFiles<'_>,
        mut encode: impl FnMut(&str) -> Option<Vec<u32>>,
    ) -> Result<Self, ConfigError> {
        let fields = Fields::new(files)?;
        let wanted = fields.model_type()?;
        let family = FAMILIES.iter().find(|(name, _)| *name == wanted);
        let (_, time) = family.ok_or_else(|| ConfigError::UnknownModelType { model_type: wanted.to_owned() })?;
        let (patch, pixels_min, pixels_max) = match time {
            Time::PerFrame => (14, 128 * 28 * 28, 768 * 28 * 28),
            Time::Stamped => (16, 128 * 32 * 32, 768 * 32 * 32),
        };
        let resize = SmartResize::from_fields(&fields, Defaults { patch, pixels_min, pixels_max, ignore_size: false })?;
        let temporal = fields.image.size("/temporal_patch_size")?.unwrap_or(2);
        fields.all_options_known()?;
        let mut words = Words::default();
        let pad = words.own(fields.config.token("/video_token_id")?, "<|video_pad|>");
        let start = words.own(fields.config.token("/vision_start_token_id")?, "<|vision_start|>");
        let end = words.own(fields.config.token("/vision_end_token_id")?, "<|vision_end|>");
        let ids = words.resolve(&mut encode)?;
        Ok(Self { time: *time, resize, temporal, ids, pad, start, end })
    }

    /// What a video becomes.
    ///
    /// # Errors
    /// When the engine refuses it.
    pub fn measure(&self, video: &Video) -> Result<VideoShape, Refused> {
        let Video { width, height, frames, fps } = *video;
        if width == 0 || height == 0 {
            return Err(Refused::Empty { width, height });
        }
        let min = if self.time == Time::Stamped { self.temporal } else { 1 };
        if frames < min {
            return Err(Refused::TooFewFrames { frames, min });
        }
        let temporal = f64::from(self.temporal);
        let resize = match self.time {
            Time::PerFrame => self.resize,
            Time::Stamped => {
                let rounded = (f64::from(frames) / temporal).round_ties_even() * temporal;
                self.resize.of_volume(frames.into(), rounded)
            }
        };
        let patches = frames.div_ceil(self.temporal);
        let features = resize.tokens(Size { width, height })?;
        let all = features.checked_mul(patches.into()).filter(|&all| frames <= FRAMES_MAX && all <= u32::MAX.into());
        let features = all.and(u32::try_from(features).ok()).ok_or(Refused::TooManyTokens { width, height })?;
        let seconds = |frame: u32| f64::from(frame.min(frames - 1)) / fps;
        let stamp = |patch: u32| {
            let first = patch * self.temporal;
            format!("<{:.1} seconds>", (seconds(first) + seconds(first + self.temporal - 1)) / 2.0)
        };
        let stamps = if self.time == Time::Stamped { (0..patches).map(stamp).collect() } else { Vec::new() };
        Ok(VideoShape { patches, features, stamps })
    }

    /// Appends what replaces the placeholder. False, with part of it, when a time cannot be encoded: each is encoded on its own.
    pub fn push(
        &self,
        shape: &VideoShape,
        encode: &mut impl FnMut(&str) -> Option<Vec<u32>>,
        view: &mut RoutingView,
    ) -> bool {
        let mut push = |ids: &[u32], count| ids.iter().for_each(|id| view.push(*id, count));
        let word = |word| self.ids.get(word, 0).unwrap_or_default();
        if shape.stamps.is_empty() {
            push(word(self.pad), shape.tokens());
        }
        for stamp in &shape.stamps {
            let Some(time) = encode(stamp) else { return false };
            push(&time, 1);
            push(word(self.start), 1);
            push(word(self.pad), shape.features);
            push(word(self.end), 1);
        }
        true
    }
}

impl VideoShape {
    /// Feature tokens: positions that embeddings fill.
    pub fn tokens(&self) -> u32 {
        self.patches.saturating_mul(self.features)
    }
}
