//! llm-d's estimate of media tokens, for engines and models whose rule is not known: the same numbers from the same configuration
//! (llm-d-router ebab68792, `dataproducer/tokenizer/{estimate,mm_estimate}.go`).
//!
//! **Invariant:** no count is above [`TOKENS_MAX`], whatever a client writes into a header or a picture; llm-d has no such limit.

mod headers;
mod picture;

#[cfg(test)]
mod tests;

use serde::Deserialize;

pub use headers::{VIDEO_DURATION, VIDEO_FPS, VIDEO_RESOLUTION, VideoHints, positive_float, resolution};
pub use picture::size_of_data_url;

/// Most tokens that one item is counted for: more fill no engine's context.
pub const TOKENS_MAX: u32 = 1 << 20;

const WIDTH: i64 = 640;
const HEIGHT: i64 = 360;
/// Pixels of a token.
const FACTOR: i64 = 1024;
/// s
const DURATION: f64 = 10.0;
const SAMPLE_FPS: f64 = 2.0;
const SOURCE_FPS: f64 = 24.0;

/// The `estimate` block of llm-d's `token-producer`, its keys unchanged. As there, a number that is absent, 0 or negative stands for
/// its default, and an unknown `mode` for the default one.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Estimate {
    pub image: Image,
    pub video: Video,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Image {
    /// `dynamic` (default): pixels / factor; `static`: the same for every image.
    pub mode: String,
    /// Pixels, where the picture's own cannot be read.
    pub default_resolution: Resolution,
    pub dynamic: Dynamic,
    #[serde(rename = "static")]
    pub fixed: StaticImage,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Video {
    /// Pixels, where no header gives them.
    pub default_resolution: Resolution,
    /// s, where no header gives it.
    pub default_duration: f64,
    /// 0 = no limit but [`TOKENS_MAX`].
    pub max_video_tokens: i64,
    pub tokens_per_frame: TokensPerFrame,
    pub frames: Frames,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Resolution {
    pub width: i64,
    pub height: i64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Dynamic {
    /// Pixels of a token.
    pub factor: i64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct StaticImage {
    pub static_token: i64,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct TokensPerFrame {
    /// `dynamic` (default) or `static`.
    pub mode: String,
    pub dynamic: Dynamic,
    #[serde(rename = "static")]
    pub fixed: StaticFrame,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct StaticFrame {
    pub num_tokens_per_frame: i64,
}

#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Frames {
    /// `sampled` (default): some per second; `strided`: every n-th.
    pub mode: String,
    pub min_frames: i64,
    /// 0 = no limit. It wins over `min_frames`.
    pub max_frames: i64,
    pub sampled: Sampled,
    pub strided: Strided,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Sampled {
    #[serde(rename = "sampleFPS")]
    pub sample_fps: f64,
    /// Frames that become one, after the limits.
    pub temporal_patch_size: i64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Strided {
    #[serde(rename = "defaultSourceFPS")]
    pub default_source_fps: f64,
    pub frame_stride: i64,
}

impl Estimate {
    /// Tokens of an image by its URL; only a `data:` URL says more than the defaults.
    pub fn image_tokens(&self, url: &str) -> u32 {
        self.image_tokens_of(if self.image.mode == "static" { None } else { size_of_data_url(url) })
    }

    /// Tokens of an image of (width, height) pixels, where they are known.
    pub fn image_tokens_of(&self, size: Option<(u32, u32)>) -> u32 {
        let image = &self.image;
        if image.mode == "static" {
            return bounded(image.fixed.static_token);
        }
        let size = size.map(|(width, height)| Resolution { width: width.into(), height: height.into() });
        bounded(size.unwrap_or_default().or(image.default_resolution).tokens(image.dynamic))
    }

    /// Tokens of each video of a request with these headers.
    pub fn video_tokens(&self, hints: &VideoHints) -> u32 {
        let video = &self.video;
        let duration = hints.duration.unwrap_or(positive(video.default_duration, DURATION));
        let frames = video.frames.count(duration, hints.fps);
        let per_frame = match video.tokens_per_frame.mode.as_str() {
            "static" => video.tokens_per_frame.fixed.num_tokens_per_frame.max(1),
            _ => {
                let size = hints.resolution.map(|(width, height)| Resolution { width, height });
                let size = size.unwrap_or_default().or(video.default_resolution);
                size.tokens(video.tokens_per_frame.dynamic).max(1)
            }
        };
        let tokens = frames.saturating_mul(per_frame);
        bounded(if video.max_video_tokens > 0 { tokens.min(video.max_video_tokens) } else { tokens })
    }
}

/// Tokens of an `input_audio` part: four bytes of its base64 text and format each. llm-d reads no `audio_url`.
pub fn audio_tokens(data: &str, format: &str) -> u32 {
    bounded(i64::try_from((data.len() + format.len()).div_ceil(4)).unwrap_or(i64::MAX))
}

impl Frames {
    fn count(&self, duration: f64, fps: Option<f64>) -> i64 {
        let strided = self.mode == "strided";
        // The casts stop at the ends of the range, where llm-d's overflow.
        let mut frames = if strided {
            let fps = fps.unwrap_or(positive(self.strided.default_source_fps, SOURCE_FPS));
            (duration * fps) as i64 / self.strided.frame_stride.max(1)
        } else {
            (duration * positive(self.sampled.sample_fps, SAMPLE_FPS)) as i64
        };
        if self.min_frames > 0 {
            frames = frames.max(self.min_frames);
        }
        if self.max_frames > 0 {
            frames = frames.min(self.max_frames);
        }
        if strided { frames } else { frames / self.sampled.temporal_patch_size.max(1) }
    }
}

impl Resolution {
    /// The other where this one has no size at all; sides that are still absent get their default.
    fn or(self, other: Self) -> Self {
        let Self { width, height } = if self.width > 0 && self.height > 0 { self } else { other };
        let side = |side: i64, default| if side > 0 { side } else { default };
        Self { width: side(width, WIDTH), height: side(height, HEIGHT) }
    }

    fn tokens(self, dynamic: Dynamic) -> i64 {
        self.width.saturating_mul(self.height) / if dynamic.factor > 0 { dynamic.factor } else { FACTOR }
    }
}

fn positive(value: f64, default: f64) -> f64 {
    if value > 0.0 { value } else { default }
}

fn bounded(tokens: i64) -> u32 {
    u32::try_from(tokens.max(1)).unwrap_or(TOKENS_MAX).min(TOKENS_MAX)
}
