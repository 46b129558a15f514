//! AVIF: properties of the primary item. Pillow reports the stored size and turns `irot` and `imir` into an orientation.

use super::bytes::{be16, be32, slice, u8_at};
use super::jp2::{boxes, child};
use super::{Problem, Seen};

/// Major brands that Pillow hands to its AVIF decoder.
pub(super) const BRANDS: [&[u8]; 4] = [b"avif", b"avis", b"mif1", b"msf1"];

/// Types of auxiliary images that are an alpha plane.
const ALPHA: [&[u8]; 2] = [b"urn:mpeg:mpegB:cicp:systems:auxiliary:alpha\0", b"urn:mpeg:hevc:2015:auxid:1\0"];

/// Bytes of version and flags that a full box starts with.
const FULL: usize = 4;

pub(super) fn read(bytes: &[u8]) -> Result<Seen, Problem> {
    let meta = child(bytes, b"meta")?.get(FULL..).ok_or(Problem::Truncated)?;
    let primary = child(meta, b"pitm")?;
    let primary = if u8_at(primary, 0)? == 0 { be16(primary, FULL)?.into() } else { be32(primary, FULL)? };
    let properties = child(meta, b"iprp")?;
    // An association has 15 bits for the index.
    let known: Vec<_> = boxes(child(properties, b"ipco")?).take(0x7fff).collect();
    let linked = associations(child(properties, b"ipma")?, primary)?;

    let (mut size, mut grey) = (None, false);
    let (mut angle, mut mirror) = (0, None);
    for (name, body) in linked.iter().filter_map(|&index| known.get(usize::from(index).checked_sub(1)?).copied()) {
        match name {
            b"ispe" => size = Some((be32(body, FULL)?, be32(body, FULL + 4)?)),
            // Monochrome bit of the codec configuration.
            b"av1C" => grey = u8_at(body, 2)? & 0x10 != 0,
            b"irot" => angle = u8_at(body, 0)? & 3,
            b"imir" => mirror = Some(u8_at(body, 0)? & 1),
            _ => {}
        }
    }
    let (width, height) = size.ok_or(Problem::Invalid("size property"))?;
    let is_alpha = |(name, body): (&[u8], &[u8])| {
        name == b"auxC" && body.get(FULL..).is_some_and(|kind| ALPHA.iter().any(|alpha| kind.starts_with(alpha)))
    };
    let rgb = !grey && !known.iter().copied().any(is_alpha);
    Ok(Seen { width, height, rgb, orientation: orientation(angle, mirror) })
}

/// EXIF orientation of a turn by `angle` quarters against the clock, then a mirror on an axis.
fn orientation(angle: u8, mirror: Option<u8>) -> u8 {
    match (angle, mirror) {
        (1, None) => 8,
        (1, Some(0)) | (3, Some(1)) => 5,
        (1, Some(_)) | (3, Some(_)) => 7,
        (2, None) => 3,
        (2, Some(0)) | (0, Some(1)) => 2,
        (2, Some(_)) | (0, Some(_)) => 4,
        (3, None) => 6,
        _ => 1,
    }
}

/// One-based indices of the properties of `item`.
fn associations(body: &[u8], item: u32) -> Result<Vec<u16>, Problem> {
    let (version, wide) = (u8_at(body, 0)?, u8_at(body, 3)? & 1 == 1);
    let (id_bytes, link_bytes) = (if version == 0 { 2 } else { 4 }, if wide { 2 } else { 1 });
    let mut at = FULL + 4;
    // Ends with the bytes of the box, whatever the count says.
    for _ in 0..be32(body, FULL)? {
        let id = if version == 0 { be16(body, at)?.into() } else { be32(body, at)? };
        let links = slice(body, at + id_bytes + 1, usize::from(u8_at(body, at + id_bytes)?) * link_bytes)?;
        if id == item {
            return Ok(match wide {
                true => links.chunks_exact(2).map(|link| u16::from_be_bytes([link[0], link[1]]) & 0x7fff).collect(),
                false => links.iter().map(|link| u16::from(link & 0x7f)).collect(),
            });
        }
        at += id_bytes + 1 + links.len();
    }
    Err(Problem::Invalid("primary item"))
}
