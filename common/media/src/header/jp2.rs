//! JPEG 2000: the `ihdr` box of a file, or the SIZ segment of a bare code stream. Pillow reads no EXIF in it.

use super::bytes::{be16, be32, be64, index, slice, u8_at};
use super::{Problem, Seen};

pub(super) const BOX_MAGIC: &[u8] = b"\0\0\0\x0cjP  \r\n\x87\n";
pub(super) const STREAM_MAGIC: &[u8] = b"\xff\x4f\xff\x51";

pub(super) fn read(bytes: &[u8]) -> Result<Seen, Problem> {
    if bytes.starts_with(STREAM_MAGIC) {
        let field = |at| be32(bytes, at);
        let (width, height) = (field(8)?.checked_sub(field(16)?), field(12)?.checked_sub(field(20)?));
        let (width, height) = width.zip(height).ok_or(Problem::Invalid("image offset"))?;
        return seen(width, height, be16(bytes, 40)?);
    }
    let header = child(&bytes[BOX_MAGIC.len()..], b"jp2h")?;
    let image = child(header, b"ihdr")?;
    u8_at(image, 10)?;
    seen(be32(image, 4)?, be32(image, 0)?, be16(image, 8)?)
}

fn seen(width: u32, height: u32, components: u16) -> Result<Seen, Problem> {
    if !(1..=4).contains(&components) {
        return Err(Problem::Invalid("component count"));
    }
    Ok(Seen { width, height, rgb: components == 3, orientation: 1 })
}

/// Name and body of the boxes one after another, up to the first damaged one. Shared with AVIF.
pub(super) fn boxes(mut rest: &[u8]) -> impl Iterator<Item = (&[u8], &[u8])> {
    std::iter::from_fn(move || {
        let whole = first_box(rest).ok()?;
        rest = &rest[whole.len()..];
        let head = if be32(whole, 0) == Ok(1) { 16 } else { 8 };
        Some((&whole[4..8], whole.get(head..)?))
    })
}

/// The box at the start with its head, at least 8 bytes.
fn first_box(bytes: &[u8]) -> Result<&[u8], Problem> {
    let length = match be32(bytes, 0)? {
        // 0 = to the end of the file.
        0 => bytes.len(),
        1 => index(be64(bytes, 8)?),
        length => index(length),
    };
    slice(bytes, 0, length.max(8))
}

/// Body of the first box of this name.
pub(super) fn child<'a>(bytes: &'a [u8], name: &[u8]) -> Result<&'a [u8], Problem> {
    boxes(bytes).find(|(found, _)| *found == name).map(|(_, body)| body).ok_or(Problem::Invalid("box structure"))
}
