//! Videos of the Qwen families (transformers 5.19 `Qwen2VLVideoProcessor`, `Qwen3VLVideoProcessor`; vLLM 0.32 and 0.33
//! `qwen2_vl.py`, `qwen2_5_vl.py`, `qwen3_vl.py`). Which frames are picked is in [`sampling`](super::sampling).
//!
//! From transformers 5.10 on, which vLLM 0.33 asks for, only the placeholder token itself is replaced: the marks that the template
//! writes around it stay. Qwen3-VL then writes marks of its own around each temporal patch, and the patch's time in front. All of
//! that is keyed by the video. An engine that prunes videos (`--video-pruning-rate`) makes fewer tokens of them: not known here.

use fovea_kv::RoutingView;

use super::fields::Fields;
use super::sampling::{Loader, Sampled, by_rate};
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

impl Time {
    /// The video processor, by which vLLM chooses the loader.
    fn processor(self) -> (&'static str, Loader) {
        match self {
            Self::PerFrame => ("Qwen2VLVideoProcessor", Loader::Qwen2),
            Self::Stamped => ("Qwen3VLVideoProcessor", Loader::Qwen3),
        }
    }
}

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
    resample: Resample,
    ids: Ids,
    pad: Word,
    start: Word,
    end: Word,
}

/// How the processor picks frames once more, where the loader left none out: per second, at least, at most.
#[derive(Clone, Copy)]
struct Resample {
    fps: f64,
    min: u32,
    max: u32,
}

impl VideoModel {
    /// As [`super::VisionModel::from_files`]; the preprocessor file is `video_preprocessor_config.json`, where there is none
    /// `preprocessor_config.json`. A `video_processor` in `processor_config.json` stands before both.
    ///
    /// # Errors
    /// As there.
    pub fn from_files(
        files: &ModelFiles<'_>,
        mut encode: impl FnMut(&str) -> Option<Vec<u32>>,
    ) -> Result<Self, ConfigError> {
        let nested = files.processor.and_then(|file| file.get("video_processor"));
        let files = ModelFiles { preprocessor: nested.or(files.preprocessor), processor: None, ..*files };
        let fields = Fields::new(&files)?;
        let wanted = fields.model_type()?;
        let family = FAMILIES.iter().find(|(name, _)| *name == wanted);
        let (_, time) = family.ok_or_else(|| ConfigError::UnknownModelType { model_type: wanted.to_owned() })?;
        let (patch, pixels_min, pixels_max) = match time {
            Time::PerFrame => (14, 128 * 28 * 28, 768 * 28 * 28),
            Time::Stamped => (16, 128 * 32 * 32, 768 * 32 * 32),
        };
        let resize = SmartResize::from_fields(&fields, Defaults { patch, pixels_min, pixels_max, ignore_size: false })?;
        let temporal = fields.image.size("/temporal_patch_size")?.unwrap_or(2);
        let file = &fields.image;
        let (processor, _) = time.processor();
        if file.text("/video_processor_type")?.is_some_and(|named| named != processor) {
            return Err(file.invalid("/video_processor_type", "that of the family"));
        }
        // A bound for each frame beside that of the whole.
        file.expect_flag("/cap_pixels_per_frame", false)?;
        if *time == Time::PerFrame {
            // Absent is false here; the processor would pick from what the loader picked.
            file.expect_flag("/do_sample_frames", false)?;
        }
        let resample = Resample {
            fps: file.ratio("/fps")?.unwrap_or(2.0),
            min: file.size("/min_frames")?.unwrap_or(4),
            max: file.size("/max_frames")?.unwrap_or(768),
        };
        fields.all_options_known()?;
        let mut words = Words::default();
        let pad = words.own(fields.config.token("/video_token_id")?, "<|video_pad|>");
        let start = words.own(fields.config.token("/vision_start_token_id")?, "<|vision_start|>");
        let end = words.own(fields.config.token("/vision_end_token_id")?, "<|vision_end|>");
        let ids = words.resolve(&mut encode)?;
        Ok(Self { time: *time, resize, temporal, resample, ids, pad, start, end })
    }

    /// The loader that vLLM takes for this model, unless its options name another.
    pub fn loader(&self) -> Loader {
        self.time.processor().1
    }

    /// Whether an engine was seen to make these tokens of a video. No: counts and texts equal those of the processors of
    /// transformers 5.19, frames and rates those of OpenCV 5.0.0, and the loaders' rule was read in vLLM 0.32 and 0.33. A view that
    /// holds a video is a prediction to be confirmed.
    pub fn is_measured(&self) -> bool {
        false
    }

    /// What a video becomes, all of its frames being looked at.
    ///
    /// # Errors
    /// When the engine refuses it.
    pub fn measure(&self, video: &Video) -> Result<VideoShape, Refused> {
        let Video { width, height, frames, fps } = *video;
        self.shape(Size { width, height }, frames, |frame| f64::from(frame) / fps)
    }

    /// What a video becomes of which the loader picked frames.
    ///
    /// # Errors
    /// As [`Self::measure`].
    pub fn measure_sampled(&self, video: &Sampled) -> Result<VideoShape, Refused> {
        let Sampled { width, height, total, fps, .. } = *video;
        // vLLM lets the processor pick when its own loader took every frame.
        let again = self.time == Time::Stamped && video.indices.len() as u64 == u64::from(total);
        let again = again.then(|| by_rate(total, fps, self.resample.fps, self.resample.min, self.resample.max));
        let indices = again.as_deref().unwrap_or(&video.indices);
        let place = |frame: u32| indices.get(frame as usize).copied().unwrap_or_default();
        let frames = u32::try_from(indices.len()).unwrap_or(u32::MAX);
        self.shape(Size { width, height }, frames, |frame| f64::from(place(frame)) / fps)
    }

    /// `seconds` gives the time of each of `frames`.
    fn shape(&self, size: Size, frames: u32, seconds: impl Fn(u32) -> f64) -> Result<VideoShape, Refused> {
        let Size { width, height } = size;
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
        let features = resize.tokens(size)?;
        let all = features.checked_mul(patches.into()).filter(|&all| frames <= FRAMES_MAX && all <= u32::MAX.into());
        let features = all.and(u32::try_from(features).ok()).ok_or(Refused::TooManyTokens { width, height })?;
        let stamp = |patch: u32| {
            let first = patch * self.temporal;
            // The last frame fills up its patch.
            let [first, last] = [first, first + self.temporal - 1].map(|frame| seconds(frame.min(frames - 1)));
            format!("<{:.1} seconds>", (first + last) / 2.0)
        };
        let stamps = if self.time == Time::Stamped { (0..patches).map(stamp).collect() } else { Vec::new() };
        Ok(VideoShape { patches, features, stamps })
    }

    /// Text that stands for one video when a template takes message content as a string (vLLM's `get_placeholder_str`).
    pub fn video_text(&self) -> &'static str {
        "<|vision_start|><|video_pad|><|vision_end|>"
    }

    /// The token that a video replaces.
    pub fn placeholder(&self) -> Option<u32> {
        self.ids.get(self.pad, 0).and_then(|ids| ids.first().copied())
    }

    /// Where in `tokens` the next video goes.
    pub fn place(&self, tokens: &[u32]) -> Option<usize> {
        let pad = self.placeholder()?;
        tokens.iter().position(|&token| token == pad)
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
