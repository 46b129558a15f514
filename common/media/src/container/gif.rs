//! GIF as a video: FFmpeg counts the frames, and knows their rate from their delays.

use super::bytes::le16;
use super::{Container, File, Problem, Rate, VideoFacts};

const FRAMES: Problem = Problem::Ends("its frames");

/// In 1/100 s: what FFmpeg takes for an absent delay, or 0.
const DELAY_DEFAULT: u16 = 10;

fn table_bytes(flags: u8) -> usize {
    if flags & 0x80 == 0 { 0 } else { 3 << ((flags & 7) + 1) }
}

pub(super) fn video(file: File<'_>) -> Result<VideoFacts, Problem> {
    let bytes = file.bytes;
    let side = |at| le16(bytes, at).map(u32::from).ok_or(Problem::Ends("screen size"));
    let (width, height) = (side(6)?, side(8)?);
    let mut at = 13 + table_bytes(*bytes.get(10).ok_or(FRAMES)?);
    let (mut frames, mut hundredths, mut even) = (0_u32, 0_u64, None);
    let mut delay = DELAY_DEFAULT;
    loop {
        match bytes.get(at) {
            Some(b'!') => {
                if bytes.get(at + 1) == Some(&0xf9) {
                    delay = le16(bytes, at + 4).ok_or(FRAMES)?;
                    if delay == 0 {
                        delay = DELAY_DEFAULT;
                    }
                }
                at = after_blocks(bytes, at + 2)?;
            }
            Some(b',') => {
                frames += 1;
                hundredths += u64::from(delay);
                let same = even.get_or_insert((delay, true));
                same.1 &= same.0 == delay;
                at += 10 + table_bytes(*bytes.get(at + 9).ok_or(FRAMES)?);
                at = after_blocks(bytes, at + 1)?;
            }
            Some(b';') => break,
            Some(_) => at += 1,
            // A file without its last byte is shown nevertheless.
            None if file.whole && frames > 0 => break,
            None => return Err(FRAMES),
        }
    }
    // FFmpeg estimates the rate of uneven frames from those it happens to look at.
    let fps = even.filter(|(_, same)| *same && frames > 1).and_then(|(delay, _)| Rate::new(100, delay.into()));
    Ok(VideoFacts {
        container: Container::Gif,
        width,
        height,
        rotation: 0,
        frames: Some(frames).filter(|&frames| frames > 0),
        fps,
        duration_ms: Some(hundredths * 10),
    })
}

/// Position after a chain of sub-blocks and its terminator.
fn after_blocks(bytes: &[u8], mut at: usize) -> Result<usize, Problem> {
    loop {
        match *bytes.get(at).ok_or(FRAMES)? {
            0 => return Ok(at + 1),
            length => at += 1 + usize::from(length),
        }
    }
}
