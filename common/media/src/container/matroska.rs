//! Matroska and WebM: `Info`, `Tracks`, and the blocks where the header does not say how many frames there are.
//!
//! FFmpeg's reader takes the rate from a track's `DefaultDuration`; OpenCV then makes the number of frames of rate and duration. The
//! duration is that of the longest track: where the pictures end earlier, vLLM counts to where they end. A file without duration
//! (written to a stream) is counted by vLLM 0.33, block by block; 0.32 finds no frame in it.

use super::bytes::{array, index};
use super::{AudioFacts, Container, File, Problem, Rate, VideoFacts};

mod id {
    pub const SEGMENT: u32 = 0x1853_8067;
    pub const INFO: u32 = 0x1549_a966;
    pub const TIMESTAMP_SCALE: u32 = 0x002a_d7b1;
    pub const DURATION: u32 = 0x4489;
    pub const TRACKS: u32 = 0x1654_ae6b;
    pub const TRACK_ENTRY: u32 = 0xae;
    pub const TRACK_NUMBER: u32 = 0xd7;
    pub const TRACK_TYPE: u32 = 0x83;
    pub const DEFAULT_DURATION: u32 = 0x0023_e383;
    pub const CODEC: u32 = 0x86;
    pub const VIDEO: u32 = 0xe0;
    pub const PIXEL_WIDTH: u32 = 0xb0;
    pub const PIXEL_HEIGHT: u32 = 0xba;
    pub const AUDIO: u32 = 0xe1;
    pub const SAMPLING_FREQUENCY: u32 = 0xb5;
    pub const CHANNELS: u32 = 0x9f;
    pub const CLUSTER: u32 = 0x1f43_b675;
    pub const TIMESTAMP: u32 = 0xe7;
    pub const BLOCK_GROUP: u32 = 0xa0;
    pub const BLOCK: u32 = 0xa1;
    pub const SIMPLE_BLOCK: u32 = 0xa3;
}

/// ns per unit of time, unless the file says otherwise.
const SCALE: u64 = 1_000_000;
/// Greatest number in a frame rate (`matroskadec.c`).
const RATE_MAX: u64 = 30_000;

/// An element id with its length marker, or a size without: value and bytes.
fn varint(bytes: &[u8], at: usize, marked: bool) -> Option<(u64, usize)> {
    let first = *bytes.get(at)?;
    let length = first.leading_zeros() as usize + 1;
    if length > 8 {
        return None;
    }
    let start = if marked { first } else { first & (0xff_u8.checked_shr(length as u32).unwrap_or(0)) };
    let rest = bytes.get(at + 1..at + length)?;
    Some((rest.iter().fold(u64::from(start), |value, &byte| value << 8 | u64::from(byte)), length))
}

/// Id, start of the body, and end: `None` when the size is not given. The end may lie beyond the bytes.
fn element(bytes: &[u8], at: usize) -> Option<(u32, usize, Option<usize>)> {
    let (id, id_bytes) = varint(bytes, at, true)?;
    let (size, size_bytes) = varint(bytes, at + id_bytes, false)?;
    let unknown = size == (1_u64 << (7 * size_bytes)) - 1;
    let start = at + id_bytes + size_bytes;
    Some((u32::try_from(id).ok()?, start, (!unknown).then(|| start.saturating_add(index(size)))))
}

fn children(bytes: &[u8]) -> impl Iterator<Item = (u32, &[u8])> {
    let mut at = 0_usize;
    std::iter::from_fn(move || {
        let (id, start, end) = element(bytes, at)?;
        at = end?;
        Some((id, bytes.get(start..at)?))
    })
}

fn child(bytes: &[u8], wanted: u32) -> Option<&[u8]> {
    children(bytes).find(|(id, _)| *id == wanted).map(|(_, body)| body)
}

/// A number of up to eight bytes.
fn number_of(body: &[u8]) -> u64 {
    body.iter().take(8).fold(0, |value, &byte| value << 8 | u64::from(byte))
}

fn unsigned(bytes: &[u8], wanted: u32) -> Option<u64> {
    child(bytes, wanted).filter(|body| body.len() <= 8).map(number_of)
}

/// ns per unit of time.
fn scale(info: Option<&[u8]>) -> u64 {
    info.and_then(|info| unsigned(info, id::TIMESTAMP_SCALE)).unwrap_or(SCALE)
}

fn float(bytes: &[u8], wanted: u32) -> Option<f64> {
    let body = child(bytes, wanted)?;
    match body.len() {
        4 => array(body, 0).map(f32::from_be_bytes).map(f64::from),
        8 => array(body, 0).map(f64::from_be_bytes),
        _ => None,
    }
}

/// The parts of a file that matter.
struct Parts<'a> {
    /// Length in s.
    seconds: Option<f64>,
    track: &'a [u8],
    /// Blocks of the track; `None` unless the bytes hold the whole file.
    blocks: Option<Blocks>,
}

/// Blocks of one track.
#[derive(Clone, Copy, Default)]
struct Blocks {
    count: u32,
    /// Times of the earliest and the latest, in s.
    times: Option<(f64, f64)>,
}

impl Blocks {
    fn add(&mut self, seconds: f64) {
        self.count = self.count.saturating_add(1);
        let (first, last) = self.times.unwrap_or((seconds, seconds));
        self.times = Some((first.min(seconds), last.max(seconds)));
    }

    /// Each lasts as long as the others: from 0 on, at this rate, the last is where it must be.
    fn are_even(&self, fps: f64) -> bool {
        let last = f64::from(self.count.saturating_sub(1));
        self.times.is_some_and(|(first, end)| (first * fps).abs() < 0.5 && (end * fps - last).abs() < 0.5)
    }
}

/// Goes over the file's elements, into those that hold others, until it has the header, or to the end for the blocks.
fn parts<'a>(file: File<'a>, kind: u64, word: &'static str) -> Result<Parts<'a>, Problem> {
    const TRACKS: Problem = Problem::Ends("its tracks");
    let bytes = file.bytes;
    let (mut at, mut info, mut tracks) = (0, None, None);
    let (mut number, mut blocks, mut cluster) = (None, Blocks::default(), 0);
    let mut complete = file.whole;
    while let Some((id, start, end)) = element(bytes, at) {
        let body = end.and_then(|end| bytes.get(start..end));
        complete &= end.is_none_or(|end| end <= bytes.len());
        match id {
            id::SEGMENT | id::CLUSTER | id::BLOCK_GROUP => {
                at = start;
                continue;
            }
            id::INFO => info = Some(body.ok_or(TRACKS)?),
            id::TRACKS => {
                let entries = children(body.ok_or(TRACKS)?).filter(|(id, _)| *id == id::TRACK_ENTRY);
                let mut found =
                    entries.map(|(_, entry)| entry).filter(|entry| unsigned(entry, id::TRACK_TYPE) == Some(kind));
                let entry = found.next().ok_or(Problem::NoTrack(word))?;
                number = unsigned(entry, id::TRACK_NUMBER);
                tracks = Some(entry);
            }
            id::TIMESTAMP => cluster = body.map_or(0, number_of),
            id::SIMPLE_BLOCK | id::BLOCK => {
                let block = varint(bytes, start, false).filter(|(track, _)| Some(*track) == number);
                let offset = block.and_then(|(_, length)| array(bytes, start + length)).map(i16::from_be_bytes);
                let scale = scale(info) as f64 / 1e9;
                offset.into_iter().for_each(|offset| blocks.add((cluster as f64 + f64::from(offset)) * scale));
            }
            _ => {}
        }
        if tracks.is_some() && info.is_some() && !file.whole {
            break;
        }
        // An element without size holds others that are not known here.
        at = end.ok_or(Problem::Invalid("element without size"))?;
    }
    let track = tracks.ok_or(TRACKS)?;
    let units = info.and_then(|info| float(info, id::DURATION)).filter(|&units| units > 0.0 && units.is_finite());
    let seconds = units.map(|units| units * scale(info) as f64 / 1e9);
    Ok(Parts { seconds, track, blocks: complete.then_some(blocks) })
}

/// Longest file that is believed, in s: a year.
const SECONDS_MAX: f64 = 3.2e7;

impl Parts<'_> {
    fn duration_ms(&self) -> Option<u64> {
        self.seconds.filter(|&seconds| seconds < SECONDS_MAX).map(|seconds| (seconds * 1000.0) as u64)
    }

    /// Frames as the engine counts them. `None` without all blocks, and when they contradict the header and do not last as long as it
    /// says.
    fn frames(&self, fps: Option<Rate>) -> Option<u32> {
        let Some(seconds) = self.seconds else {
            return self.blocks.map(|blocks| blocks.count).filter(|&count| count > 0);
        };
        let fps = fps?.per_second();
        // FFmpeg keeps the duration in whole µs.
        let frames = ((seconds * 1e6).trunc() / 1e6 * fps + 0.5).floor();
        let frames = (seconds < SECONDS_MAX && frames >= 1.0).then_some(frames as u32)?;
        match self.blocks? {
            // vLLM takes one frame for a mistake of the header.
            blocks if blocks.count.abs_diff(frames) <= 1 => Some(frames),
            blocks if blocks.count < frames && blocks.are_even(fps) => Some(blocks.count),
            _ => None,
        }
    }
}

pub(super) fn video(file: File<'_>) -> Result<VideoFacts, Problem> {
    let parts = parts(file, 1, "video")?;
    let fps = unsigned(parts.track, id::DEFAULT_DURATION).and_then(|ns| Rate::nearest(1_000_000_000, ns, RATE_MAX));
    let video = child(parts.track, id::VIDEO).ok_or(Problem::Invalid("video track"))?;
    let side = |wanted| {
        let pixels = unsigned(video, wanted).and_then(|pixels| u32::try_from(pixels).ok());
        pixels.ok_or(Problem::Invalid("picture size"))
    };
    Ok(VideoFacts {
        container: Container::Matroska,
        width: side(id::PIXEL_WIDTH)?,
        height: side(id::PIXEL_HEIGHT)?,
        rotation: 0,
        // Not every OpenCV package decodes AV1.
        frames: if child(parts.track, id::CODEC) == Some(b"V_AV1") { None } else { parts.frames(fps) },
        fps,
        duration_ms: parts.duration_ms(),
    })
}

pub(super) fn audio(file: File<'_>) -> Result<AudioFacts, Problem> {
    let parts = parts(file, 2, "audio")?;
    let audio = child(parts.track, id::AUDIO).ok_or(Problem::Invalid("audio track"))?;
    // The format's own defaults.
    let rate = float(audio, id::SAMPLING_FREQUENCY).unwrap_or(8000.0);
    Ok(AudioFacts {
        container: Container::Matroska,
        sample_rate: rate.clamp(0.0, f64::from(u32::MAX)) as u32,
        channels: unsigned(audio, id::CHANNELS).unwrap_or(1).try_into().unwrap_or(0),
        samples: None,
        duration_ms: parts.duration_ms(),
        estimated: false,
    })
}
