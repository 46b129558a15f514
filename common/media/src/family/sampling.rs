//! Which frames of a video the engine looks at (vLLM 0.32 and 0.33, `multimodal/video.py` and `multimodal/media/video.py`).
//!
//! vLLM picks frames in a loader of its own. The loader is that of the model's video processor, or the one that `video_backend` of
//! the server's `media_io_kwargs` names; `num_frames` counts in the uniform one alone.

use serde_json::{Map, Value};

use crate::container::{Rate, VideoFacts};

/// Frames picked at once, at most, whatever a request asks (the Qwen loaders' own limit).
const FRAMES_MAX: u32 = 768;
/// The Qwen loaders' own limit of a request's rate.
const FPS_MAX: f64 = 30.0;
/// `num_frames` of the uniform loader when nothing sets it.
const UNIFORM_FRAMES: i64 = 32;
/// More frames than any file of a sane length has; bounds the work for one video.
const TOTAL_MAX: u32 = 1 << 24;
/// Most frames of a uniform sample: more would not fit into any engine's context.
const UNIFORM_MAX: u32 = 1 << 16;

/// How frames are picked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Loader {
    /// `opencv`: evenly, at most `num_frames` (32) of them, and at most `fps` (no limit) per second.
    Uniform,
    /// `qwen2_vl`: `fps` (2) per second, an even number, 4 to 768.
    Qwen2,
    /// `qwen3_vl`: `fps` (2) per second, 4 to 768.
    Qwen3,
}

/// `media_io_kwargs.video`, as far as it picks frames.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct VideoIo {
    pub loader: Option<Loader>,
    pub num_frames: Option<i64>,
    pub fps: Option<f64>,
    pub min_frames: Option<u32>,
    pub max_frames: Option<u32>,
}

/// Why it is not known which frames are picked.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsampled {
    #[error("media_io_kwargs.video: effect of `{key}` is not known: leave it out to have videos predicted")]
    Option { key: String },
    #[error("number or rate of the video's frames is not in its header: encode it again, to a constant rate")]
    Uncounted,
    #[error("video of {total} frames is too short or too long to pick frames from")]
    Length { total: u32 },
}

/// Frames of one video that the engine looks at.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampled {
    /// Upright, in pixels.
    pub width: u32,
    pub height: u32,
    /// Of all frames of the file, in order. Exact for [`Loader::Qwen2`] in number alone: it computes in single precision, and
    /// nothing depends on the places.
    pub indices: Vec<u32>,
    /// Frames per second of the file.
    pub fps: f64,
    /// Frames of the file.
    pub total: u32,
}

impl VideoIo {
    /// The server's options with a request's on top. One that sets `num_frames` or `fps` alone takes the other away.
    ///
    /// # Errors
    /// When there is an option that may pick other frames.
    pub fn merge(server: Option<&Map<String, Value>>, request: Option<&Map<String, Value>>) -> Result<Self, Unsampled> {
        let mut io = Self::default();
        server.into_iter().flatten().try_for_each(|(key, value)| io.set(key, value, true))?;
        let has = |key| request.is_some_and(|request| request.contains_key(key));
        match (has("num_frames"), has("fps")) {
            (true, false) => io.fps = None,
            (false, true) => io.num_frames = None,
            _ => {}
        }
        request.into_iter().flatten().try_for_each(|(key, value)| io.set(key, value, false))?;
        Ok(io)
    }

    fn set(&mut self, key: &str, value: &Value, server: bool) -> Result<(), Unsampled> {
        let unknown = || Unsampled::Option { key: key.to_owned() };
        let count = || value.as_u64().and_then(|count| u32::try_from(count).ok()).ok_or_else(unknown);
        match key {
            "num_frames" => self.num_frames = Some(value.as_i64().ok_or_else(unknown)?),
            "fps" => self.fps = Some(value.as_f64().filter(|fps| fps.is_finite()).ok_or_else(unknown)?),
            "min_frames" => self.min_frames = Some(count()?),
            "max_frames" => self.max_frames = Some(count()?),
            "video_backend" if server => {
                self.loader = Some(match value.as_str() {
                    Some("opencv") => Loader::Uniform,
                    Some("qwen2_vl") => Loader::Qwen2,
                    Some("qwen3_vl") => Loader::Qwen3,
                    _ => return Err(unknown()),
                });
            }
            // The decoder whose counts `container` mirrors.
            "backend" if value == "opencv" => {}
            // Of other loaders.
            "max_duration" => {}
            _ => return Err(unknown()),
        }
        Ok(())
    }

    /// Frames that `loader` picks, unless the options name another.
    ///
    /// # Errors
    /// When the file's header does not say how many there are, or there are none to pick.
    pub fn sample(&self, loader: Loader, facts: &VideoFacts) -> Result<Sampled, Unsampled> {
        let (Some(total), Some(fps)) = (facts.frames, facts.fps.map(Rate::per_second)) else {
            return Err(Unsampled::Uncounted);
        };
        let (width, height) = facts.upright();
        let picked = if total <= TOTAL_MAX { self.pick(self.loader.unwrap_or(loader), total, fps) } else { None };
        let indices = picked.filter(|indices| !indices.is_empty()).ok_or(Unsampled::Length { total })?;
        Ok(Sampled { width, height, indices, fps, total })
    }

    fn pick(&self, loader: Loader, total: u32, fps: f64) -> Option<Vec<u32>> {
        let (min, max) = (self.min_frames.unwrap_or(4), self.max_frames.unwrap_or(FRAMES_MAX).min(FRAMES_MAX));
        let wanted = self.fps.unwrap_or(2.0).min(FPS_MAX);
        match loader {
            Loader::Uniform => self.uniform(total, fps),
            Loader::Qwen3 => Some(by_rate(total, fps, wanted, min, max)),
            Loader::Qwen2 => Some(in_pairs(total, f64::from(total) / fps * wanted, min, max)),
        }
    }

    fn uniform(&self, total: u32, fps: f64) -> Option<Vec<u32>> {
        let mut frames = f64::from(total);
        let wanted = self.num_frames.unwrap_or(UNIFORM_FRAMES);
        if wanted > 0 {
            frames = frames.min(wanted as f64);
        }
        if let Some(limit) = self.fps.filter(|&limit| limit > 0.0) {
            frames = frames.min((f64::from(total) / fps * limit).floor());
        }
        let frames = frames.max(1.0) as u32;
        (frames <= UNIFORM_MAX).then(|| evenly(total, frames, f64::floor))
    }
}

/// Qwen3-VL's rule, of vLLM's loader and of the processor alike: `wanted` frames per second, `min` to `max` of them, evenly.
pub(super) fn by_rate(total: u32, fps: f64, wanted: f64, min: u32, max: u32) -> Vec<u32> {
    // Truncated, as Python's `int`; the cast bounds what is not a number of frames.
    let frames = (f64::from(total) / fps * wanted) as u32;
    evenly(total, frames.max(min).min(max).min(total), f64::round_ties_even)
}

/// Qwen2-VL's rule: an even number of frames. The number is that of the steps of `total / frames` below `total`, of which a
/// rounding error makes one more now and then.
fn in_pairs(total: u32, frames: f64, min: u32, max: u32) -> Vec<u32> {
    let even = |count: f64| (count / 2.0).floor() * 2.0;
    let max = even(max.min(total).into());
    let frames = even(frames.max(min.into()).min(max).min(total.into()));
    if frames < 1.0 {
        return Vec::new();
    }
    let step = f64::from(total) / frames;
    let steps = (f64::from(total) / step).ceil() as u32;
    (0..steps).map(|index| ((f64::from(index) * step) as f32 as u32).min(total - 1)).collect()
}

/// NumPy's `linspace(0, total - 1, frames)`, each made whole.
fn evenly(total: u32, frames: u32, whole: impl Fn(f64) -> f64) -> Vec<u32> {
    let last = f64::from(total.saturating_sub(1));
    let step = last / f64::from(frames.saturating_sub(1).max(1));
    let place = |index: u32| if index > 0 && index + 1 == frames { last } else { whole(f64::from(index) * step) };
    (0..frames).map(|index| place(index) as u32).collect()
}

#[cfg(test)]
mod tests;
