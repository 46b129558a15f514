//! Ogg with Opus or Vorbis: the first page's header and the last page's position.

use super::bytes::{index, le16, le32, le64};
use super::{AudioFacts, Container, File, Problem, millis};

/// Opus positions count at this rate, whatever went in.
const OPUS_RATE: u32 = 48_000;

pub(super) fn audio(file: File<'_>) -> Result<AudioFacts, Problem> {
    const HEAD: Problem = Problem::Ends("its first page");
    let bytes = file.bytes;
    let serial = le32(bytes, 14).ok_or(HEAD)?;
    let packet = bytes.get(27 + usize::from(*bytes.get(26).ok_or(HEAD)?)..).ok_or(HEAD)?;
    let (sample_rate, channels, skip) = if packet.starts_with(b"OpusHead") {
        (OPUS_RATE, packet.get(9), u64::from(le16(packet, 10).ok_or(HEAD)?))
    } else if packet.starts_with(b"\x01vorbis") {
        (le32(packet, 12).ok_or(HEAD)?, packet.get(11), 0)
    } else {
        return Err(Problem::Invalid("codec"));
    };
    let channels = u16::from(*channels.ok_or(HEAD)?);
    let samples = last_position(file, serial).map(|position| position.saturating_sub(skip));
    let duration_ms = samples.and_then(|samples| millis(samples, sample_rate.into()));
    Ok(AudioFacts { container: Container::Ogg, sample_rate, channels, samples, duration_ms, estimated: false })
}

/// Position of the last page of a stream on which a packet ends, page by page.
fn last_position(file: File<'_>, serial: u32) -> Option<u64> {
    let (bytes, mut at, mut last) = (file.bytes, 0, None);
    while file.whole && bytes.get(at..)?.starts_with(b"OggS") {
        let position = le64(bytes, at + 6)?;
        // All ones: no packet ends here.
        if le32(bytes, at + 14)? == serial && position != u64::MAX {
            last = Some(position);
        }
        let segments = index(*bytes.get(at + 26)?);
        let sizes = bytes.get(at + 27..at + 27 + segments)?;
        at += 27 + segments + sizes.iter().map(|&size| usize::from(size)).sum::<usize>();
    }
    last
}
