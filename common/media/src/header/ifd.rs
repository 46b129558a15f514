//! First directory of a TIFF block: TIFF files, EXIF. Mirrors Pillow's reader, quirks included.

use super::Problem;
use super::bytes::{array, index, slice};

/// Headers Pillow takes for a TIFF block; the third and fourth are wrong but common enough.
pub(super) const HEADS: [&[u8]; 6] =
    [b"MM\x00\x2a", b"II\x2a\x00", b"MM\x2a\x00", b"II\x00\x2a", b"MM\x00\x2b", b"II\x2b\x00"];

/// Third byte of a little-endian BigTIFF.
pub(super) const WIDE: u8 = 43;

/// Tags that any reader asks for; others are walked over.
const WANTED: [u16; 12] = [
    WIDTH,
    HEIGHT,
    BITS,
    COMPRESSION,
    PHOTOMETRIC,
    FILL_ORDER,
    ORIENTATION,
    SAMPLES,
    PLANAR,
    EXTRA_SAMPLES,
    SAMPLE_FORMAT,
    XMP,
];

pub(super) const WIDTH: u16 = 256;
pub(super) const HEIGHT: u16 = 257;
pub(super) const BITS: u16 = 258;
pub(super) const COMPRESSION: u16 = 259;
pub(super) const PHOTOMETRIC: u16 = 262;
pub(super) const FILL_ORDER: u16 = 266;
pub(super) const ORIENTATION: u16 = 274;
pub(super) const SAMPLES: u16 = 277;
pub(super) const PLANAR: u16 = 284;
pub(super) const EXTRA_SAMPLES: u16 = 338;
pub(super) const SAMPLE_FORMAT: u16 = 339;
pub(super) const XMP: u16 = 700;

/// Entries of the first directory that we ask for, by tag; the first of a tag counts.
#[derive(Debug, Default)]
pub(super) struct Ifd<'a> {
    entries: Vec<(u16, Entry<'a>)>,
    big_endian: bool,
}

#[derive(Clone, Copy, Debug)]
struct Entry<'a> {
    kind: u16,
    data: &'a [u8],
}

/// Bytes of one value of a field type; `None` = a type Pillow skips.
fn unit_bytes(kind: u16) -> Option<u64> {
    match kind {
        1 | 2 | 6 | 7 => Some(1),
        3 | 8 => Some(2),
        4 | 9 | 11 | 13 => Some(4),
        5 | 10 | 12 | 16 => Some(8),
        _ => None,
    }
}

/// Fixed-size numbers in the block's byte order.
#[derive(Clone, Copy)]
struct Order {
    big: bool,
}

impl Order {
    fn number(self, part: &[u8]) -> u64 {
        let add = |value: u64, byte: &u8| value << 8 | u64::from(*byte);
        if self.big { part.iter().fold(0, add) } else { part.iter().rev().fold(0, add) }
    }

    fn at(self, bytes: &[u8], at: usize, len: usize) -> Result<u64, Problem> {
        slice(bytes, at, len).map(|part| self.number(part))
    }
}

impl<'a> Ifd<'a> {
    /// Reads a block that starts with a TIFF header.
    ///
    /// # Errors
    /// When the header itself is wrong or short. A damaged directory is no error: what stands before the damage counts.
    pub(super) fn read(block: &'a [u8]) -> Result<Self, Problem> {
        if !HEADS.iter().any(|head| block.starts_with(head)) {
            return Err(Problem::Invalid("TIFF header"));
        }
        let order = Order { big: block.starts_with(b"MM") };
        // Pillow looks at the third byte alone, so a big-endian BigTIFF is read as a classic one.
        let wide = block.get(2) == Some(&WIDE);
        let start = if wide { order.at(block, 8, 8)? } else { order.at(block, 4, 4)? };
        let mut found = Self { entries: Vec::new(), big_endian: order.big };
        // An error in the walk only ends it.
        let _ = found.walk(block, index(start), order, wide);
        Ok(found)
    }

    fn walk(&mut self, block: &'a [u8], start: usize, order: Order, wide: bool) -> Result<(), Problem> {
        let (count_len, entry_len, inline) = if wide { (8, 20, 8) } else { (2, 12, 4) };
        let count = order.at(block, start, count_len)?;
        let mut total_bytes = 0_u64;
        // Ends with the bytes of the block, whatever the count says.
        for entry in slice(block, start, block.len().saturating_sub(start))?[count_len..]
            .chunks_exact(entry_len)
            .take(index(count))
        {
            let (tag, kind) = (order.number(&entry[..2]), order.number(&entry[2..4]));
            let tag = u16::try_from(tag).unwrap_or_default();
            let kind = u16::try_from(kind).unwrap_or_default();
            let values = order.number(&entry[4..entry_len - inline]);
            let field = &entry[entry_len - inline..];
            if self.entry(tag).is_some() {
                continue;
            }
            let Some(unit) = unit_bytes(kind) else { continue };
            let size = values.saturating_mul(unit);
            let data = if size > inline as u64 {
                let offset = order.number(field);
                total_bytes = total_bytes.saturating_add(size);
                if offset >= 1 << 63 || total_bytes > block.len() as u64 {
                    continue;
                }
                slice(block, index(offset), index(size))?
            } else {
                &field[..index(size)]
            };
            if !data.is_empty() && WANTED.contains(&tag) {
                self.entries.push((tag, Entry { kind, data }));
            }
        }
        Ok(())
    }

    fn entry(&self, tag: u16) -> Option<Entry<'a>> {
        self.entries.iter().find(|(known, _)| *known == tag).map(|(_, entry)| *entry)
    }

    pub(super) fn has(&self, tag: u16) -> bool {
        self.entry(tag).is_some()
    }

    /// Raw bytes of a field, whatever its type.
    pub(super) fn data(&self, tag: u16) -> Option<&'a [u8]> {
        self.entry(tag).map(|entry| entry.data)
    }

    /// All values of an integer field; `None` when it is absent or of another type (BYTE is not an integer in Pillow).
    pub(super) fn numbers(&self, tag: u16) -> Option<impl Iterator<Item = u64> + use<'a>> {
        let Entry { kind, data } = self.entry(tag)?;
        let unit = match kind {
            3 | 4 | 6 | 8 | 9 | 13 | 16 => index(unit_bytes(kind)?),
            _ => return None,
        };
        let order = Order { big: self.big_endian };
        Some(data.chunks_exact(unit).map(move |part| order.number(part)))
    }

    /// First value of an integer field.
    pub(super) fn number(&self, tag: u16) -> Option<u64> {
        self.numbers(tag)?.next()
    }
}

/// Big-endian BigTIFF says 43 in its fourth byte.
pub(super) fn is_wide_big_endian(block: &[u8]) -> bool {
    array::<4>(block, 0).is_ok_and(|head| head == *b"MM\x00\x2b")
}
