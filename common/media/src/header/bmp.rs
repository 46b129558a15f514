//! BMP and bare DIB. The palette decides between grey and palette modes, both of which are converted.

use super::bytes::{le16, le32, u8_at};
use super::{Problem, Seen};

/// Header lengths Pillow takes for a bitmap without a file header.
const BARE: [u32; 7] = [12, 40, 52, 56, 64, 108, 124];

/// Bit masks of 32-bit pixels that have an alpha channel: (red, green, blue, alpha).
const ALPHA_MASKS: [[u32; 4]; 5] = [
    [0xff00_0000, 0x00ff_0000, 0xff00, 0xff],
    [0xff, 0xff00, 0x00ff_0000, 0xff00_0000],
    [0x00ff_0000, 0xff00, 0xff, 0xff00_0000],
    [0xff00_0000, 0xff00, 0xff, 0x00ff_0000],
    [0, 0, 0, 0],
];

/// Whether the bytes look like a bitmap without the `BM` file header.
pub(super) fn is_bare(bytes: &[u8]) -> bool {
    le32(bytes, 0).is_ok_and(|length| BARE.contains(&length))
}

pub(super) fn read(bytes: &[u8]) -> Result<Seen, Problem> {
    at(bytes, if bytes.starts_with(b"BM") { 14 } else { 0 })
}

/// Reads the bitmap header at `start`.
pub(super) fn at(bytes: &[u8], start: usize) -> Result<Seen, Problem> {
    let length = le32(bytes, start)?;
    if length == 12 {
        let (width, height) = (le16(bytes, start + 4)?, le16(bytes, start + 6)?);
        let rgb = is_rgb(le16(bytes, start + 10)?)?;
        return Ok(Seen { width: width.into(), height: height.into(), rgb, orientation: 1 });
    }
    if !BARE.contains(&length) {
        return Err(Problem::Invalid("header length"));
    }
    let (width, height) = (le32(bytes, start + 4)?, le32(bytes, start + 8)?);
    // Rows from top to bottom have a negative height, which Pillow tells by the top byte alone.
    let height = if u8_at(bytes, start + 11)? == 0xff { height.wrapping_neg() } else { height };
    let bits = le16(bytes, start + 14)?;
    let rgb = match le32(bytes, start + 16)? {
        0..=2 => is_rgb(bits)?,
        3 => is_rgb(bits)? && !(bits == 32 && has_alpha(bytes, start, length)?),
        _ => return Err(Problem::Invalid("compression")),
    };
    Ok(Seen { width, height, rgb, orientation: 1 })
}

fn is_rgb(bits: u16) -> Result<bool, Problem> {
    match bits {
        1 | 4 | 8 => Ok(false),
        16 | 24 | 32 => Ok(true),
        _ => Err(Problem::Invalid("pixel depth")),
    }
}

fn has_alpha(bytes: &[u8], start: usize, length: u32) -> Result<bool, Problem> {
    let mask = |index: usize| le32(bytes, start + 40 + 4 * index);
    let alpha = if length >= 56 { mask(3)? } else { 0 };
    Ok(ALPHA_MASKS.contains(&[mask(0)?, mask(1)?, mask(2)?, alpha]))
}
