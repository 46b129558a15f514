//! PNG and APNG: all chunks, because orientation may stand behind the pixels.

use std::borrow::Cow;

use miniz_oxide::inflate::TINFLStatus;
use miniz_oxide::inflate::core::inflate_flags::{
    TINFL_FLAG_HAS_MORE_INPUT, TINFL_FLAG_PARSE_ZLIB_HEADER, TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF,
};
use miniz_oxide::inflate::core::{DecompressorOxide, decompress};

use super::bytes::{be32, index, slice, u8_at};
use super::orientation::orientation;
use super::{Problem, Seen};

pub(super) const MAGIC: &[u8] = b"\x89PNG\r\n\x1a\n";

/// Most bytes one compressed text may inflate to (Pillow's `MAX_TEXT_CHUNK`); it refuses files with more.
const TEXT_BYTES_MAX: usize = 1 << 20;

/// Metadata of a walk over the chunks; of two with one name the last counts.
#[derive(Default)]
struct Metadata<'a> {
    exif: Option<&'a [u8]>,
    raw_profile: Option<Text<'a>>,
    xmp: Option<Text<'a>>,
}

/// A text value, still compressed where the file has it so.
#[derive(Clone, Copy)]
struct Text<'a> {
    bytes: &'a [u8],
    deflated: bool,
}

pub(super) fn read(bytes: &[u8]) -> Result<Seen, Problem> {
    let at = MAGIC.len();
    let header = slice(bytes, at + 8, 13)?;
    if be32(bytes, at)? < 13 || slice(bytes, at + 4, 4)? != b"IHDR" {
        return Err(Problem::Invalid("first chunk"));
    }
    let length = index(be32(bytes, at)?);
    let checked = slice(bytes, at + 4, length.saturating_add(4))?;
    // A header chunk is 13 bytes; the limit bounds the time of a checksum over a longer one.
    if length > 64 {
        return Err(Problem::Invalid("header length"));
    }
    if be32(bytes, at + 8 + length)? != crc32(checked) {
        return Err(Problem::NoImage("header checksum of a PNG"));
    }
    let (width, height) = (be32(header, 0)?, be32(header, 4)?);
    let rgb = match (u8_at(header, 8)?, u8_at(header, 9)?) {
        (8 | 16, 2) => true,
        (1 | 2 | 4 | 8 | 16, 0) | (1 | 2 | 4 | 8, 3) | (8 | 16, 4 | 6) => false,
        _ => return Err(Problem::Invalid("colour type or depth")),
    };
    let metadata = walk(bytes, at + 12 + length);
    Ok(Seen { width, height, rgb, orientation: metadata.orientation()? })
}

/// Goes over the chunks as far as Pillow does: to IEND, to damage, or to the second frame of an animation.
fn walk(bytes: &[u8], mut at: usize) -> Metadata<'_> {
    let mut found = Metadata::default();
    let (mut frames, mut framed, mut pixels) = (None, false, false);
    while let (Ok(length), Ok(name)) = (be32(bytes, at), slice(bytes, at + 4, 4)) {
        let Ok(body) = slice(bytes, at + 8, index(length)) else { break };
        match name {
            b"IEND" => break,
            b"acTL" if !pixels => frames = be32(body, 0).ok().filter(|&count| count > 0),
            b"fcTL" if pixels && frames.is_some_and(|count| count > 1) => break,
            b"fcTL" => framed = true,
            b"IDAT" | b"fdAT" if !pixels => {
                pixels = true;
                // Pixels before the first frame header are a frame of their own.
                frames = frames.map(|count| if framed { count } else { count.saturating_add(1) });
            }
            b"eXIf" => found.exif = Some(body),
            b"tEXt" => found.plain_text(body),
            b"zTXt" => found.deflated_text(body),
            b"iTXt" => found.international_text(body),
            name if !name.iter().all(|byte| byte.is_ascii_alphanumeric() || *byte == b'_') => break,
            _ => {}
        }
        at += 12 + body.len();
    }
    found
}

/// Splits at the first zero byte.
fn split(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let at = bytes.iter().position(|&byte| byte == 0)?;
    Some((&bytes[..at], &bytes[at + 1..]))
}

impl<'a> Metadata<'a> {
    fn keep(&mut self, key: &[u8], text: Text<'a>) {
        match key {
            b"Raw profile type exif" => self.raw_profile = Some(text),
            b"XML:com.adobe.xmp" => self.xmp = Some(text),
            _ => {}
        }
    }

    fn plain_text(&mut self, body: &'a [u8]) {
        match split(body) {
            Some((b"exif", value)) => self.exif = Some(value),
            Some((key, value)) => self.keep(key, Text { bytes: value, deflated: false }),
            None => {}
        }
    }

    fn deflated_text(&mut self, body: &'a [u8]) {
        // One byte of compression method; only 0 exists.
        if let Some((key, [0, value @ ..])) = split(body) {
            self.keep(key, Text { bytes: value, deflated: true });
        }
    }

    fn international_text(&mut self, body: &'a [u8]) {
        // Key, compression flag, method, language, translated key, value.
        let Some((key, [flag, method, rest @ ..])) = split(body) else { return };
        let Some((_, (_, value))) = split(rest).and_then(|(language, rest)| Some((language, split(rest)?))) else {
            return;
        };
        if *flag == 0 || *method == 0 {
            self.keep(key, Text { bytes: value, deflated: *flag != 0 });
        }
    }

    fn orientation(&self) -> Result<u8, Problem> {
        let xmp = self.xmp.map(Text::inflate).transpose()?;
        let profile = match (self.exif, self.raw_profile) {
            (None, Some(text)) => match unhex(&text.inflate()?) {
                Some(exif) => Some(exif),
                // Pillow raises here, and vLLM goes on without a transposition.
                None => return Ok(1),
            },
            _ => None,
        };
        Ok(orientation(self.exif.or(profile.as_deref()), xmp.as_deref()))
    }
}

impl<'a> Text<'a> {
    /// The value itself. As in Pillow, damaged data stand for an empty text, and a stream cut short for what it gave.
    fn inflate(self) -> Result<Cow<'a, [u8]>, Problem> {
        if !self.deflated {
            return Ok(self.bytes.into());
        }
        // No stream inflates to more than 1032 times its length.
        let mut text = vec![0; self.bytes.len().saturating_mul(1032).min(TEXT_BYTES_MAX) + 1];
        let mut state = Box::new(DecompressorOxide::new());
        let flags = TINFL_FLAG_PARSE_ZLIB_HEADER | TINFL_FLAG_USING_NON_WRAPPING_OUTPUT_BUF | TINFL_FLAG_HAS_MORE_INPUT;
        let (status, _, length) = decompress(&mut state, self.bytes, &mut text, 0, flags);
        text.truncate(length);
        match status {
            TINFLStatus::Done | TINFLStatus::NeedsMoreInput if length <= TEXT_BYTES_MAX => Ok(text.into()),
            TINFLStatus::Done | TINFLStatus::NeedsMoreInput | TINFLStatus::HasMoreOutput => {
                Err(Problem::Invalid("text size"))
            }
            _ => Ok(Vec::new().into()),
        }
    }
}

/// Bytes of a raw profile: hex digits from the fourth line on; other white space than line ends may stand between bytes.
fn unhex(text: &[u8]) -> Option<Vec<u8>> {
    let lines = text.splitn(4, |&byte| byte == b'\n').nth(3).unwrap_or_default();
    let mut digits = lines.iter().copied().filter(|&byte| byte != b'\n').peekable();
    let mut bytes = Vec::with_capacity(lines.len() / 2);
    let value = |digit: Option<u8>| char::from(digit?).to_digit(16).and_then(|value| u8::try_from(value).ok());
    loop {
        while digits.next_if(|byte| byte.is_ascii_whitespace() || *byte == 0x0b).is_some() {}
        if digits.peek().is_none() {
            return Some(bytes);
        }
        bytes.push(value(digits.next())? << 4 | value(digits.next())?);
    }
}

/// Checksum of PNG chunks, bit by bit: it covers a few bytes only.
pub(crate) fn crc32(bytes: &[u8]) -> u32 {
    let step = |crc: u32| if crc & 1 == 0 { crc >> 1 } else { crc >> 1 ^ 0xedb8_8320 };
    !bytes.iter().fold(!0, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), |crc, _| step(crc)))
}
