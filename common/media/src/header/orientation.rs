//! Orientation from EXIF and, only when EXIF has no such tag, from XMP: the rule of Pillow's `getexif`.

use super::ifd::{Ifd, ORIENTATION, WIDE};

const PREFIX: &[u8] = b"Exif\0\0";

/// Orientation 1..=8 of an image with these metadata; 1 = as stored.
///
/// A block with a broken TIFF header hides the XMP too: Pillow raises, and vLLM goes on without a transposition.
pub(super) fn orientation(exif: Option<&[u8]>, xmp: Option<&[u8]>) -> u8 {
    let from_xmp = || xmp.and_then(search_xmp).map_or(1, valid);
    let Some(mut block) = exif else { return from_xmp() };
    for _ in 0..2 {
        block = block.strip_prefix(PREFIX).unwrap_or(block);
    }
    if block.is_empty() {
        return from_xmp();
    }
    // Pillow reads 8 bytes of header, too few for BigTIFF.
    let classic = block.get(2) != Some(&WIDE);
    let Some(ifd) = Ifd::read(block).ok().filter(|_| classic) else { return 1 };
    in_ifd(&ifd).unwrap_or_else(from_xmp)
}

/// Orientation in a directory; `None` when it has no such tag. A tag of another type counts as 1.
pub(super) fn in_ifd(ifd: &Ifd<'_>) -> Option<u8> {
    ifd.has(ORIENTATION).then(|| ifd.number(ORIENTATION).map_or(1, valid))
}

/// Values other than 2..=8 mean nothing.
fn valid(value: u64) -> u8 {
    u8::try_from(value).ok().filter(|value| (2..=8).contains(value)).unwrap_or(1)
}

/// First `tiff:Orientation="N` or `tiff:Orientation>N`: a text search, as in Pillow.
pub(super) fn search_xmp(xmp: &[u8]) -> Option<u64> {
    const NAME: &[u8] = b"tiff:Orientation";
    let mut rest = xmp;
    while let Some(at) = rest.windows(NAME.len()).position(|window| window == NAME) {
        rest = &rest[at + NAME.len()..];
        let value = rest.strip_prefix(b"=\"").or_else(|| rest.strip_prefix(b">"));
        if let Some(digit) = value.and_then(|value| value.first()).filter(|digit| digit.is_ascii_digit()) {
            return Some(u64::from(digit - b'0'));
        }
    }
    None
}
