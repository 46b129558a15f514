//! WebP: RIFF chunks. Alpha is what libwebp's `WebPGetFeatures` says.

use super::bytes::{index, le16, le24, le32, slice, u8_at};
use super::orientation::orientation;
use super::{Problem, Seen};

const ALPHA_FLAG: u8 = 0x10;
const EXIF_FLAG: u8 = 0x08;
const XMP_FLAG: u8 = 0x04;
const ANIMATION_FLAG: u8 = 0x02;

pub(super) fn read(bytes: &[u8]) -> Result<Seen, Problem> {
    let body = chunk(bytes, 12)?.1;
    match slice(bytes, 12, 4)? {
        b"VP8 " => {
            let (width, height) = lossy(body)?;
            Ok(Seen { width, height, rgb: true, orientation: 1 })
        }
        b"VP8L" => {
            let (width, height, alpha) = lossless(body)?;
            Ok(Seen { width, height, rgb: !alpha, orientation: 1 })
        }
        b"VP8X" => extended(bytes, body),
        _ => Err(Problem::Invalid("first chunk")),
    }
}

/// Name and body of the chunk at `at`; a body cut short by the end of the file is as long as it is.
fn chunk(bytes: &[u8], at: usize) -> Result<(&[u8], &[u8], usize), Problem> {
    let name = slice(bytes, at, 4)?;
    let length = index(le32(bytes, at + 4)?);
    let rest = &bytes[at + 8..];
    let body = &rest[..length.min(rest.len())];
    Ok((name, body, (at + 8).saturating_add(length).saturating_add(length & 1)))
}

fn lossy(body: &[u8]) -> Result<(u32, u32), Problem> {
    if slice(body, 3, 3)? != b"\x9d\x01\x2a" {
        return Err(Problem::Invalid("frame start"));
    }
    let side = |at| le16(body, at).map(|side| u32::from(side & 0x3fff));
    Ok((side(6)?, side(8)?))
}

fn lossless(body: &[u8]) -> Result<(u32, u32, bool), Problem> {
    if u8_at(body, 0)? != 0x2f {
        return Err(Problem::Invalid("frame start"));
    }
    let bits = le32(body, 1)?;
    Ok(((bits & 0x3fff) + 1, (bits >> 14 & 0x3fff) + 1, bits >> 28 & 1 == 1))
}

/// Canvas size, alpha and metadata. A metadata chunk counts only when its flag is set; of two the first.
fn extended(bytes: &[u8], body: &[u8]) -> Result<Seen, Problem> {
    let flags = u8_at(body, 0)?;
    let (width, height) = (le24(body, 4)? + 1, le24(body, 7)? + 1);
    let mut alpha = flags & ALPHA_FLAG != 0;
    let mut sought = flags & ANIMATION_FLAG == 0;
    let (mut exif, mut xmp) = (None, None);
    let mut at = chunk(bytes, 12)?.2;
    while let Ok((name, body, next)) = chunk(bytes, at) {
        match name {
            b"ALPH" if sought => alpha = true,
            b"VP8 " => sought = false,
            b"VP8L" if sought => {
                alpha = lossless(body)?.2;
                sought = false;
            }
            b"EXIF" if flags & EXIF_FLAG != 0 => exif = exif.or(Some(body)),
            b"XMP " if flags & XMP_FLAG != 0 => xmp = xmp.or(Some(body)),
            _ => {}
        }
        at = next;
    }
    Ok(Seen { width, height, rgb: !alpha, orientation: orientation(exif, xmp) })
}
