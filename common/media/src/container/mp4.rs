//! MP4 and QuickTime: the index (`moov`), wherever it stands.
//!
//! Frames are those of the time table, as FFmpeg counts them (`mov.c`), less those that an edit list hides, as vLLM 0.32 and 0.33
//! find out by seeking to the end. What fragments hold is not counted, nor is AV1, of
//! which OpenCV's package 4.14.0 decodes the pictures and 5.0.0 none.

mod table;

use super::bytes::{array, be16, be32, be64, index};
use super::{AudioFacts, Container, File, Problem, Rate, VideoFacts, millis};
use table::{Edit, Times};

/// Bytes of version and flags that a full box starts with.
const FULL: usize = 4;

/// Boxes on one level: name and body. Ends at the first that the bytes do not hold whole.
fn boxes(bytes: &[u8]) -> impl Iterator<Item = ([u8; 4], &[u8])> {
    let mut at = 0_usize;
    std::iter::from_fn(move || {
        let (name, range, next) = header(bytes, at)?;
        at = next;
        Some((name, bytes.get(range)?))
    })
}

/// Name, body and end of the box at `at`; both may lie beyond the bytes.
fn header(bytes: &[u8], at: usize) -> Option<([u8; 4], std::ops::Range<usize>, usize)> {
    let (short, name) = (be32(bytes, at)?, array(bytes, at + 4)?);
    let (head, length) = match short {
        0 => (8, bytes.len() - at),
        1 => (16, index(be64(bytes, at + 8)?)),
        length => (8, index(length)),
    };
    if length < head {
        return None;
    }
    let end = at.saturating_add(length);
    Some((name, at + head..end, end))
}

fn child<'a>(bytes: &'a [u8], wanted: &[u8; 4]) -> Option<&'a [u8]> {
    boxes(bytes).find(|(name, _)| name == wanted).map(|(_, body)| body)
}

/// The index, from the top level of the file.
fn moov(file: File<'_>) -> Result<&[u8], Problem> {
    let (bytes, mut at) = (file.bytes, 0);
    while at < bytes.len() {
        let Some((name, body, next)) = header(bytes, at) else { break };
        if &name == b"moov" {
            return bytes.get(body).ok_or(Problem::Ends("its index (moov)"));
        }
        at = next;
    }
    Err(Problem::Ends("its index (moov), which stands at the end,"))
}

/// One track of a kind.
struct Track<'a> {
    header: &'a [u8],
    media: &'a [u8],
    tables: &'a [u8],
    edits: Option<&'a [u8]>,
    /// First sample entry: what the samples are.
    entry: &'a [u8],
}

/// The first track whose handler is `kind`; parts that it lacks are named.
fn track<'a>(moov: &'a [u8], kind: &[u8; 4], word: &'static str) -> Result<Track<'a>, Problem> {
    let handled = |track: &&'a [u8]| {
        let media = child(track, b"mdia").and_then(|media| child(media, b"hdlr"));
        media.and_then(|handler| handler.get(8..12)) == Some(&kind[..])
    };
    let tracks = boxes(moov).filter(|(name, _)| name == b"trak").map(|(_, body)| body);
    let track = tracks.into_iter().find(handled).ok_or(Problem::NoTrack(word))?;
    let part = |bytes, name: &[u8; 4]| child(bytes, name).ok_or(Problem::Invalid("track header"));
    let media = part(track, b"mdia")?;
    let tables = part(part(media, b"minf")?, b"stbl")?;
    Ok(Track {
        header: part(track, b"tkhd")?,
        media: part(media, b"mdhd")?,
        tables,
        edits: child(track, b"edts").and_then(|edits| child(edits, b"elst")),
        entry: part(tables, b"stsd")?.get(FULL + 4..).ok_or(Problem::Invalid("sample description"))?,
    })
}

/// Units per second, and length in them; `None` where the length is not given.
fn clock(header: &[u8]) -> Option<(u32, Option<u64>)> {
    match header.first()? {
        0 => Some((be32(header, FULL + 8)?, be32(header, FULL + 12).filter(|&all| all != u32::MAX).map(u64::from))),
        _ => Some((be32(header, FULL + 16)?, be64(header, FULL + 20).filter(|&all| all != u64::MAX))),
    }
}

pub(super) fn video(file: File<'_>) -> Result<VideoFacts, Problem> {
    let moov = moov(file)?;
    let track = track(moov, b"vide", "video")?;
    let (units, length) = clock(track.media).ok_or(Problem::Invalid("media header"))?;
    let side = |at| be16(track.entry, at).map(u32::from).ok_or(Problem::Invalid("sample description"));
    let (movie_units, _) = child(moov, b"mvhd").and_then(clock).ok_or(Problem::Invalid("movie header"))?;
    let times = Times::read(track.tables);
    let fragmented = child(moov, b"mvex").is_some();
    let times = times.filter(|times| !fragmented && times.samples > 0);
    let edit = Edit::read(track.edits, movie_units, units);
    let decoded = track.entry.get(4..8) != Some(b"av01");
    Ok(VideoFacts {
        container: Container::Mp4,
        width: side(32)?,
        height: side(34)?,
        rotation: rotation(track.header).ok_or(Problem::Invalid("track header"))?,
        frames: times.as_ref().filter(|_| decoded).and_then(|times| times.shown(edit)),
        fps: times.and_then(|times| Rate::new(u64::from(units).checked_mul(times.samples)?, times.units)),
        duration_ms: length.filter(|&length| length > 0).and_then(|length| millis(length, units.into())),
    })
}

/// Degrees clockwise of a track's matrix, as FFmpeg reads it; anything but quarter turns is not applied by OpenCV.
fn rotation(header: &[u8]) -> Option<u16> {
    let matrix = if *header.first()? == 0 { FULL + 36 } else { FULL + 48 };
    let number = |index: usize| be32(header, matrix + 4 * index).map(|bits| f64::from(bits.cast_signed()));
    let (a, b, c, d) = (number(0)?, number(1)?, number(3)?, number(4)?);
    let (x, y) = (a / a.hypot(c), b / b.hypot(d));
    let degrees = y.atan2(x).to_degrees().round();
    Some(match degrees {
        90.0 => 90,
        180.0 | -180.0 => 180,
        -90.0 => 270,
        _ => 0,
    })
}

pub(super) fn audio(file: File<'_>) -> Result<AudioFacts, Problem> {
    let moov = moov(file)?;
    let track = track(moov, b"soun", "audio")?;
    let (units, length) = clock(track.media).ok_or(Problem::Invalid("media header"))?;
    let entry = |at| be16(track.entry, at).ok_or(Problem::Invalid("sample description"));
    // Version 2 of QuickTime keeps its numbers elsewhere; rates above 65535 do not fit either.
    let sample_rate = if entry(16)? == 2 { 0 } else { u32::from(entry(32)?) };
    let sample_rate = if sample_rate == 0 { units } else { sample_rate };
    Ok(AudioFacts {
        container: Container::Mp4,
        sample_rate,
        channels: entry(24)?,
        // How much of an encoder's delay is kept is the decoder's choice.
        samples: None,
        duration_ms: length.filter(|&length| length > 0).and_then(|length| millis(length, units.into())),
        estimated: false,
    })
}
