//! MP3: the first frame, and the Xing or Info record in it.

use super::bytes::{be16, be32, index};
use super::{AudioFacts, Container, File, Problem, millis};

/// kbit/s by index, of layer III: MPEG-1, then MPEG-2 and 2.5.
const KBITS: [[u32; 16]; 2] = [
    [0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320, 0],
    [0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160, 0],
];
const RATES: [u32; 3] = [44_100, 48_000, 32_000];

/// Header of a layer III frame.
struct Frame {
    mpeg1: bool,
    mono: bool,
    sample_rate: u32,
    /// bit/s
    bits: u32,
    padded: bool,
}

impl Frame {
    fn read(bytes: &[u8], at: usize) -> Option<Self> {
        let head = be32(bytes, at)?;
        let (version, layer) = (head >> 19 & 3, head >> 17 & 3);
        // Eleven bits of sync; version 1 is reserved, layer 1 is layer III.
        if head >> 21 != 0x7ff || version == 1 || layer != 1 {
            return None;
        }
        let mpeg1 = version == 3;
        let bits = KBITS[usize::from(!mpeg1)][(head >> 12 & 15) as usize] * 1000;
        let rate = RATES.get((head >> 10 & 3) as usize)? >> (3 - version).min(2);
        (bits > 0).then_some(Self {
            mpeg1,
            mono: head >> 6 & 3 == 3,
            sample_rate: rate,
            bits,
            padded: head >> 9 & 1 == 1,
        })
    }

    fn samples(&self) -> u64 {
        if self.mpeg1 { 1152 } else { 576 }
    }

    fn length(&self) -> usize {
        (self.samples() / 8 * u64::from(self.bits) / u64::from(self.sample_rate)) as usize + usize::from(self.padded)
    }

    /// Where the Xing or Info record stands, behind the side information.
    fn record(&self) -> usize {
        4 + match (self.mpeg1, self.mono) {
            (true, false) => 32,
            (true, true) | (false, false) => 17,
            (false, true) => 9,
        }
    }
}

/// Start of the first frame: after an ID3 tag.
fn start(bytes: &[u8]) -> Option<usize> {
    if !bytes.starts_with(b"ID3") {
        return Some(0);
    }
    // Seven bits per byte.
    let length = bytes.get(6..10)?.iter().fold(0_u32, |length, &byte| length << 7 | u32::from(byte & 0x7f));
    Some(10 + index(length))
}

/// A tag, or a frame whose successor, if there, is one too.
pub(super) fn is_mp3(bytes: &[u8]) -> bool {
    bytes.starts_with(b"ID3")
        || Frame::read(bytes, 0)
            .is_some_and(|frame| bytes.len() < frame.length() + 4 || Frame::read(bytes, frame.length()).is_some())
}

pub(super) fn audio(file: File<'_>) -> Result<AudioFacts, Problem> {
    const FRAME: Problem = Problem::Ends("its first frame");
    let bytes = file.bytes;
    let at = start(bytes).filter(|at| at + 4 <= bytes.len()).ok_or(FRAME)?;
    let frame = Frame::read(bytes, at).ok_or(Problem::Invalid("first frame"))?;
    let record = at + frame.record();
    let marked = |name: &[u8; 4]| bytes.get(record..record + 4) == Some(&name[..]);
    let counted = if marked(b"Xing") || marked(b"Info") {
        // Flag 1: the number of frames follows. LAME writes behind 120 bytes more how much is padding.
        be32(bytes, record + 4).filter(|flags| flags & 1 == 1).and_then(|_| be32(bytes, record + 8)).map(|frames| {
            let all = u64::from(frames) * frame.samples();
            all.saturating_sub(padding(bytes, record))
        })
    } else {
        None
    };
    let guess = || {
        let milliseconds = file.whole.then(|| millis((bytes.len() - at) as u64 * 8, frame.bits.into())).flatten()?;
        Some(milliseconds)
    };
    let duration_ms = counted.map_or_else(guess, |samples| millis(samples, frame.sample_rate.into()));
    Ok(AudioFacts {
        container: Container::Mp3,
        sample_rate: frame.sample_rate,
        channels: if frame.mono { 1 } else { 2 },
        samples: counted,
        duration_ms,
        estimated: counted.is_none(),
    })
}

/// Samples that LAME put in front and behind: 12 bits each, after a full record of 120 bytes and 21 of its own.
fn padding(bytes: &[u8], record: usize) -> u64 {
    let full = be32(bytes, record + 4) == Some(15);
    let coder = bytes.get(record + 120..record + 124);
    let known = coder.is_some_and(|coder| coder == b"LAME" || coder == b"Lavf" || coder == b"Lavc");
    let at = record + 141;
    match (be16(bytes, at), bytes.get(at + 2)) {
        (Some(high), Some(&low)) if full && known => {
            u64::from(high >> 4) + u64::from((high & 15) << 8 | u16::from(low))
        }
        _ => 0,
    }
}
