//! Facts of a video or of sound from the bytes of its file: size, frames, rate, length. Nothing is decoded.
//!
//! Numbers are those that the engine's decoder works with, which for video is FFmpeg below OpenCV (4.14.0 and 5.0.0 with libavformat 62,
//! as vLLM 0.33 calls it in `video_decoders/opencv.py`): it believes headers where they contradict the pictures. What it would have
//! to find out by decoding is left out, never guessed.

mod avi;
mod bytes;
mod flac;
mod gif;
mod matroska;
mod mp3;
mod mp4;
mod ogg;
mod rate;
mod wav;

#[cfg(test)]
mod tests;

pub use rate::Rate;

use crate::header::PIXELS_MAX;

/// What a video file says of its first picture track.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VideoFacts {
    pub container: Container,
    /// As stored, in pixels, both at least 1.
    pub width: u32,
    pub height: u32,
    /// Degrees clockwise by which a player, and OpenCV, turns the pictures: 0, 90, 180 or 270.
    pub rotation: u16,
    /// Frames that the engine's decoder counts. `None` when only decoding tells.
    pub frames: Option<u32>,
    /// Frames per second on average. `None` when only decoding tells.
    pub fps: Option<Rate>,
    /// As the header has it.
    pub duration_ms: Option<u64>,
}

impl VideoFacts {
    /// (width, height) as the pictures are handed on.
    pub fn upright(&self) -> (u32, u32) {
        if self.rotation.is_multiple_of(180) { (self.width, self.height) } else { (self.height, self.width) }
    }
}

/// What a file says of its first sound track.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AudioFacts {
    pub container: Container,
    /// Per second, at least 1.
    pub sample_rate: u32,
    pub channels: u16,
    /// Of one channel, at `sample_rate`; an encoder's delay is included unless the format gives it.
    pub samples: Option<u64>,
    pub duration_ms: Option<u64>,
    /// Length taken from the file's size at the first frame's bit rate, which need not be that of the others.
    pub estimated: bool,
}

/// Containers with a reader here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Container {
    Avi,
    Flac,
    Gif,
    Matroska,
    Mp3,
    Mp4,
    Ogg,
    Wav,
}

/// The bytes at hand.
#[derive(Clone, Copy, Debug)]
pub struct File<'a> {
    bytes: &'a [u8],
    whole: bool,
}

impl<'a> File<'a> {
    pub fn whole(bytes: &'a [u8]) -> Self {
        Self { bytes, whole: true }
    }

    /// The first bytes of a longer file.
    pub fn head(bytes: &'a [u8]) -> Self {
        Self { bytes, whole: false }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ContainerError {
    #[error("media format not recognised: send MP4, WebM, AVI or GIF for video, WAV, FLAC, MP3, Ogg or MP4 for audio")]
    Unknown,
    #[error("{container:?} file: {part} lies beyond the bytes at hand: the whole file is needed")]
    NeedsWhole { container: Container, part: &'static str },
    #[error("{container:?} file ends inside {part}: send the whole file")]
    Truncated { container: Container, part: &'static str },
    #[error("{container:?} file has a wrong or unsupported {part}: encode it again")]
    Invalid { container: Container, part: &'static str },
    #[error("video of {width}x{height} pixels has more than {PIXELS_MAX} in a frame: scale it down")]
    TooManyPixels { width: u32, height: u32 },
    #[error("{container:?} file has no {kind} track")]
    NoTrack { container: Container, kind: &'static str },
}

/// Why one reader gave up.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Problem {
    /// The bytes end in front of, or inside, this.
    Ends(&'static str),
    Invalid(&'static str),
    NoTrack(&'static str),
}

impl Problem {
    fn of(self, container: Container, file: File<'_>) -> ContainerError {
        match self {
            Self::Ends(part) if file.whole => ContainerError::Truncated { container, part },
            Self::Ends(part) => ContainerError::NeedsWhole { container, part },
            Self::Invalid(part) => ContainerError::Invalid { container, part },
            Self::NoTrack(kind) => ContainerError::NoTrack { container, kind },
        }
    }
}

/// Facts of a video. O(bytes), or less where the container has an index; an edit list costs up to 2^20 steps more.
///
/// # Errors
/// When the format is unknown, the header is damaged, or it lies beyond the bytes at hand.
pub fn video(file: File<'_>) -> Result<VideoFacts, ContainerError> {
    let container = container(file.bytes).ok_or(ContainerError::Unknown)?;
    let facts = match container {
        Container::Avi => avi::video(file),
        Container::Gif => gif::video(file),
        Container::Matroska => matroska::video(file),
        Container::Mp4 => mp4::video(file),
        Container::Flac | Container::Mp3 | Container::Ogg | Container::Wav => Err(Problem::NoTrack("video")),
    }
    .map_err(|problem| problem.of(container, file))?;
    if facts.width == 0 || facts.height == 0 {
        return Err(ContainerError::Invalid { container, part: "picture size" });
    }
    let VideoFacts { width, height, .. } = facts;
    if u64::from(width) * u64::from(height) > PIXELS_MAX {
        return Err(ContainerError::TooManyPixels { width, height });
    }
    Ok(facts)
}

/// Facts of sound. O(bytes), or less where the container has an index.
///
/// # Errors
/// As [`video`].
pub fn audio(file: File<'_>) -> Result<AudioFacts, ContainerError> {
    let container = container(file.bytes).ok_or(ContainerError::Unknown)?;
    let facts = match container {
        Container::Flac => flac::audio(file),
        Container::Matroska => matroska::audio(file),
        Container::Mp3 => mp3::audio(file),
        Container::Mp4 => mp4::audio(file),
        Container::Ogg => ogg::audio(file),
        Container::Wav => wav::audio(file),
        Container::Avi | Container::Gif => Err(Problem::NoTrack("audio")),
    }
    .map_err(|problem| problem.of(container, file))?;
    if facts.sample_rate == 0 || facts.channels == 0 {
        return Err(ContainerError::Invalid { container, part: "sample rate or channels" });
    }
    Ok(facts)
}

/// Boxes that an MP4 or QuickTime file may start with.
const MP4_FIRST: [&[u8]; 7] = [b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"styp"];

fn container(bytes: &[u8]) -> Option<Container> {
    Some(match bytes {
        [b'R', b'I', b'F', b'F', _, _, _, _, b'A', b'V', b'I', b' ', ..] => Container::Avi,
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'A', b'V', b'E', ..] => Container::Wav,
        [b'G', b'I', b'F', b'8', b'7' | b'9', b'a', ..] => Container::Gif,
        [0x1a, 0x45, 0xdf, 0xa3, ..] => Container::Matroska,
        [b'f', b'L', b'a', b'C', ..] => Container::Flac,
        [b'O', b'g', b'g', b'S', ..] => Container::Ogg,
        [_, _, _, _, name @ ..] if MP4_FIRST.iter().any(|first| name.starts_with(first)) => Container::Mp4,
        _ if mp3::is_mp3(bytes) => Container::Mp3,
        _ => return None,
    })
}

/// `units` of `1/per_second` s, in whole ms.
fn millis(units: u64, per_second: u64) -> Option<u64> {
    let ms = u128::from(units) * 1000 / u128::from(per_second.max(1));
    (per_second > 0).then(|| u64::try_from(ms).ok()).flatten()
}
