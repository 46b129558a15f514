//! GIF: logical screen, enlarged by the first frame. Its mode is grey or palette, never RGB.

use super::bytes::{le16, u8_at};
use super::{Problem, Seen};

/// Bytes of a colour table announced by a flags byte.
fn table_bytes(flags: u8) -> usize {
    if flags & 0x80 == 0 { 0 } else { 3 << ((flags & 7) + 1) }
}

pub(super) fn read(bytes: &[u8]) -> Result<Seen, Problem> {
    let (width, height) = (u32::from(le16(bytes, 6)?), u32::from(le16(bytes, 8)?));
    let mut at = 13 + table_bytes(u8_at(bytes, 10)?);
    loop {
        match u8_at(bytes, at)? {
            b'!' => at = after_blocks(bytes, at + 2)?,
            b',' => {
                let side = |offset| le16(bytes, at + offset).map(u32::from);
                let (right, bottom) = (side(1)? + side(5)?, side(3)? + side(7)?);
                return Ok(Seen { width: width.max(right), height: height.max(bottom), rgb: false, orientation: 1 });
            }
            b';' => return Err(Problem::Invalid("frame")),
            _ => at += 1,
        }
    }
}

/// Position after a chain of sub-blocks and its terminator.
fn after_blocks(bytes: &[u8], mut at: usize) -> Result<usize, Problem> {
    loop {
        match u8_at(bytes, at)? {
            0 => return Ok(at + 1),
            length => at += 1 + usize::from(length),
        }
    }
}
