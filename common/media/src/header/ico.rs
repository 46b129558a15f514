//! ICO: the entry with the largest area; of equals the one with the fewest colours.

use super::bytes::{index, le16, le32, slice};
use super::{Problem, Seen, bmp, png};

pub(super) const MAGIC: &[u8] = &[0, 0, 1, 0];

pub(super) fn read(bytes: &[u8]) -> Result<Seen, Problem> {
    let count = usize::from(le16(bytes, 4)?);
    let entries = slice(bytes, 6, count * 16)?;
    let side = |byte: u8| if byte == 0 { 256 } else { u32::from(byte) };
    let rank = |entry: &&[u8]| (std::cmp::Reverse(side(entry[0]) * side(entry[1])), colour_bits(entry));
    let entry = entries.chunks_exact(16).min_by_key(rank).ok_or(Problem::Invalid("entry count"))?;
    let start = index(le32(entry, 12)?);
    let frame = bytes.get(start..).ok_or(Problem::Truncated)?;
    if frame.starts_with(png::MAGIC) {
        return Ok(Seen { orientation: 1, ..png::read(frame)? });
    }
    // A bitmap of twice the height, colours over a mask; Pillow turns the mask into alpha.
    let seen = bmp::at(frame, 0)?;
    Ok(Seen { height: seen.height / 2, rgb: false, ..seen })
}

/// Bits per pixel, or what the number of colours needs; 256 when neither is said.
fn colour_bits(entry: &[u8]) -> u32 {
    match (le16(entry, 6).unwrap_or(0), entry[2]) {
        (0, 0 | 1) => 256,
        (0, colours) => 8 - (colours - 1).leading_zeros(),
        (bits, _) => bits.into(),
    }
}
