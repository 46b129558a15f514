//! Formats with a short fixed header and no metadata that Pillow turns the picture by: PPM, TGA, DDS, QOI, PSD.

use super::bytes::{be16, be32, le16, le32, u8_at};
use super::{Problem, Seen};

fn upright(width: u32, height: u32, rgb: bool) -> Seen {
    Seen { width, height, rgb, orientation: 1 }
}

/// Netpbm and Pillow's own variants.
pub(super) fn ppm(bytes: &[u8]) -> Result<Seen, Problem> {
    let mut rest = bytes;
    let magic = token(&mut rest)?;
    let rgb = match magic {
        b"P3" | b"P6" => true,
        b"P1" | b"P2" | b"P4" | b"P5" | b"P0CMYK" | b"Pf" | b"PyP" | b"PyRGBA" | b"PyCMYK" => false,
        _ => return Err(Problem::Invalid("magic")),
    };
    let width = number(&mut rest)?;
    Ok(upright(width, number(&mut rest)?, rgb))
}

/// Next run of bytes that are neither white space nor a comment to the end of the line.
fn token<'a>(rest: &mut &'a [u8]) -> Result<&'a [u8], Problem> {
    let white = |byte: &u8| byte.is_ascii_whitespace() || *byte == 0x0b;
    loop {
        let start = rest.iter().position(|byte| !white(byte)).ok_or(Problem::Truncated)?;
        *rest = &rest[start..];
        if rest[0] != b'#' {
            break;
        }
        let end = rest.iter().position(|byte| matches!(byte, b'\r' | b'\n')).ok_or(Problem::Truncated)?;
        *rest = &rest[end..];
    }
    let end = rest.iter().position(white).ok_or(Problem::Truncated)?;
    let (token, after) = rest.split_at(end);
    *rest = after;
    Ok(token)
}

/// A decimal number of at most 10 digits (Pillow's limit).
fn number(rest: &mut &[u8]) -> Result<u32, Problem> {
    let digits = token(rest)?;
    let valid = digits.len() <= 10 && digits.iter().all(u8::is_ascii_digit);
    let text = std::str::from_utf8(digits).ok().filter(|_| valid);
    text.and_then(|text| text.parse().ok()).ok_or(Problem::Invalid("size"))
}

/// TGA has no magic: Pillow takes any file whose fields make sense.
pub(super) fn is_tga(bytes: &[u8]) -> bool {
    matches!(bytes, [_, 0 | 1, 1 | 2 | 3 | 9 | 10 | 11, ..])
        && bytes.len() >= 18
        && matches!(bytes[16], 1 | 8 | 16 | 24 | 32)
}

pub(super) fn tga(bytes: &[u8]) -> Result<Seen, Problem> {
    let rgb = matches!(u8_at(bytes, 2)?, 2 | 10) && u8_at(bytes, 16)? == 24;
    Ok(upright(le16(bytes, 12)?.into(), le16(bytes, 14)?.into(), rgb))
}

pub(super) fn dds(bytes: &[u8]) -> Result<Seen, Problem> {
    const ALPHA: u32 = 0x1;
    const FOURCC: u32 = 0x4;
    const PALETTE: u32 = 0x20;
    const RGB: u32 = 0x40;
    const LUMINANCE: u32 = 0x2_0000;
    if le32(bytes, 4)? != 124 {
        return Err(Problem::Invalid("header length"));
    }
    let flags = le32(bytes, 80)?;
    let rgb = if flags & RGB != 0 {
        flags & ALPHA == 0
    } else if flags & (LUMINANCE | PALETTE) != 0 {
        false
    } else if flags & FOURCC != 0 {
        match &super::bytes::array::<4>(bytes, 84)? {
            b"BC5S" | b"BC5U" | b"ATI2" => true,
            b"DXT1" | b"DXT3" | b"DXT5" | b"BC4U" | b"ATI1" => false,
            // DXGI numbers: two channels (82..=84) and half floats (95, 96) give RGB.
            b"DX10" => matches!(le32(bytes, 128)?, 82..=84 | 95 | 96),
            _ => return Err(Problem::Invalid("pixel format")),
        }
    } else {
        return Err(Problem::Invalid("pixel format"));
    };
    Ok(upright(le32(bytes, 16)?, le32(bytes, 12)?, rgb))
}

pub(super) fn qoi(bytes: &[u8]) -> Result<Seen, Problem> {
    Ok(upright(be32(bytes, 4)?, be32(bytes, 8)?, u8_at(bytes, 12)? == 3))
}

pub(super) fn psd(bytes: &[u8]) -> Result<Seen, Problem> {
    // Colour mode 3 is RGB; a fourth channel is alpha.
    let (channels, mode) = (be16(bytes, 12)?, be16(bytes, 24)?);
    Ok(upright(be32(bytes, 18)?, be32(bytes, 14)?, mode == 3 && channels != 4))
}
