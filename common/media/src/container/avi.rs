//! AVI: the headers of the first picture stream.

use super::bytes::{le32, riff};
use super::{Container, File, Problem, Rate, VideoFacts, millis};

const HEAD: Problem = Problem::Ends("stream header");

pub(super) fn video(file: File<'_>) -> Result<VideoFacts, Problem> {
    let lists = file.bytes.get(12..).unwrap_or_default();
    let list = |bytes, wanted: [u8; 4]| {
        riff(bytes).filter(move |(name, body)| name == b"LIST" && body.starts_with(&wanted)).map(|(_, body)| &body[4..])
    };
    for stream in list(lists, *b"hdrl").take(1).flat_map(|header| list(header, *b"strl")) {
        let chunk = |wanted: &[u8; 4]| riff(stream).find(|(name, _)| name == wanted).map(|(_, body)| body);
        let header = chunk(b"strh").ok_or(HEAD)?;
        if header.starts_with(b"vids") {
            let format = chunk(b"strf").ok_or(HEAD)?;
            return stream_facts(header, format).ok_or(HEAD);
        }
    }
    // Lists are cut at the end of the bytes, so an absent stream may be one beyond it.
    Err(if file.whole { Problem::NoTrack("video") } else { HEAD })
}

fn stream_facts(header: &[u8], format: &[u8]) -> Option<VideoFacts> {
    let (scale, rate, frames) = (le32(header, 20)?, le32(header, 24)?, le32(header, 32)?);
    // Rows from the top down have a negative height.
    let height = le32(format, 8)?;
    Some(VideoFacts {
        container: Container::Avi,
        width: le32(format, 4)?,
        height: height.min(height.wrapping_neg()),
        rotation: 0,
        frames: Some(frames).filter(|&frames| frames > 0),
        fps: Rate::new(rate.into(), scale.into()),
        duration_ms: millis(u64::from(frames) * u64::from(scale), rate.into()),
    })
}
