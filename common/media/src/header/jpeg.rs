//! JPEG and MPO: markers up to the start of scan.

use super::bytes::{be16, slice, u8_at};
use super::orientation::orientation;
use super::{Problem, Seen};

const XMP: &[u8] = b"http://ns.adobe.com/xap/1.0/\0";
const EXIF: &[u8] = b"Exif\0\0";

/// Walks the markers; thumbnails inside APP segments are never looked at. The last frame header before the scan counts.
pub(super) fn read(bytes: &[u8]) -> Result<Seen, Problem> {
    let mut at = 2;
    let mut frame = None;
    let (mut exif, mut xmp) = (None, None);
    while let Some(marker) = next_marker(bytes, &mut at) {
        match marker {
            // Markers without a length.
            0xc8 | 0xd0..=0xd9 | 0xf0..=0xfd => continue,
            0xc0..=0xfe => {}
            _ => return Err(Problem::Invalid("marker")),
        }
        let length = usize::from(be16(bytes, at)?);
        let body = slice(bytes, at + 2, length.saturating_sub(2))?;
        at += 2 + body.len();
        match marker {
            // Start of frame: baseline to arithmetic, and hierarchical; not the tables C4 and CC.
            0xc0..=0xc3 | 0xc5..=0xcb | 0xcd..=0xcf | 0xde => frame = Some(frame_header(body)?),
            0xda => break,
            // A second EXIF segment only continues the first, whose directory comes first.
            0xe1 if body.starts_with(EXIF) => {
                exif = exif.filter(|first: &&[u8]| first.len() > EXIF.len()).or(Some(body));
            }
            0xe1 if body.starts_with(XMP) => xmp = Some(&body[XMP.len()..]),
            _ => {}
        }
    }
    let (width, height, rgb) = frame.ok_or(Problem::Truncated)?;
    Ok(Seen { width, height, rgb, orientation: orientation(exif, xmp) })
}

/// Next marker byte; skips junk, fill bytes (any run of 0xFF) and stuffed zeros.
fn next_marker(bytes: &[u8], at: &mut usize) -> Option<u8> {
    loop {
        *at += bytes.get(*at..)?.iter().position(|&byte| byte == 0xff)?;
        *at += bytes[*at..].iter().position(|&byte| byte != 0xff)?;
        let marker = bytes[*at];
        *at += 1;
        if marker != 0 {
            return Some(marker);
        }
    }
}

fn frame_header(body: &[u8]) -> Result<(u32, u32, bool), Problem> {
    if u8_at(body, 0)? != 8 {
        return Err(Problem::Invalid("sample precision"));
    }
    let (height, width) = (be16(body, 1)?, be16(body, 3)?);
    match u8_at(body, 5)? {
        components @ (1 | 3 | 4) => Ok((width.into(), height.into(), components == 3)),
        _ => Err(Problem::Invalid("component count")),
    }
}
