//! Size, orientation and pixel mode of an image from its header bytes, as vLLM sees them.
//!
//! vLLM opens files with Pillow, transposes them by EXIF or XMP orientation and converts what is not RGB. These readers
//! mirror Pillow 13.0.0 where it differs from the format's specification. A file that an engine would refuse only after
//! a full decode may get a header here; a file that we cannot be sure of is an error, so that it stays unpredicted.

mod avif;
mod bmp;
mod bytes;
mod gif;
mod ico;
mod ifd;
mod jp2;
mod jpeg;
mod orientation;
mod plain;
mod png;
mod tiff;
mod webp;

pub(crate) use png::crc32;

#[cfg(test)]
mod tests;

/// Most pixels vLLM accepts (`VLLM_MAX_IMAGE_PIXELS`).
pub(crate) const PIXELS_MAX: u64 = 178_956_970;

/// What the header says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImageHeader {
    pub format: Format,
    /// As stored, before any transposition, in pixels. TIFF: already upright, because Pillow transposes it on open.
    pub width: u32,
    pub height: u32,
    /// EXIF orientation, 1..=8; 1 = as stored, 5..=8 swap the sides.
    pub orientation: u8,
    /// The pixels are not plain RGB, so vLLM converts them and hashes a conversion record with the bytes.
    pub converted: bool,
}

impl ImageHeader {
    /// (width, height) after transposition by the orientation: the size that counts in vLLM.
    pub fn upright(&self) -> (u32, u32) {
        if self.orientation >= 5 { (self.height, self.width) } else { (self.width, self.height) }
    }
}

/// Formats with a reader here.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Format {
    Avif,
    Bmp,
    Dds,
    Gif,
    Ico,
    Jpeg,
    Jpeg2000,
    Png,
    Ppm,
    Psd,
    Qoi,
    Tga,
    Tiff,
    WebP,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum HeaderError {
    #[error("image format not recognised: send JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF")]
    Unknown,
    /// Known to be refused by vLLM 0.32 and by plain Pillow 13, so by SGLang too.
    #[error("bytes are no image that an engine reads ({problem}): send JPEG, PNG or WebP, encoded anew")]
    NoImage { problem: &'static str },
    #[error("{format:?} image ends inside its header: send the whole file")]
    Truncated { format: Format },
    #[error("{format:?} image has a wrong or unsupported {field}: encode it again")]
    Invalid { format: Format, field: &'static str },
    #[error("image of {width}x{height} pixels has more than {PIXELS_MAX}: scale it down")]
    TooManyPixels { width: u32, height: u32 },
}

impl HeaderError {
    /// Whether vLLM is known to answer 400 to a whole file of these bytes. False: it may well read what is not read here.
    pub fn engine_refuses(&self) -> bool {
        match self {
            Self::NoImage { .. } | Self::TooManyPixels { .. } => true,
            // Of other formats Pillow may need less than is read here.
            Self::Truncated { format } => matches!(format, Format::Jpeg | Format::Png),
            Self::Unknown | Self::Invalid { .. } => false,
        }
    }
}

/// Reads the header of a whole image file. O(bytes); no pixel is decoded.
///
/// # Errors
/// When the format is unknown, or the header is damaged or of a kind whose size or pixel mode cannot be told.
pub fn read(bytes: &[u8]) -> Result<ImageHeader, HeaderError> {
    let format = format(bytes).ok_or_else(|| no_image(bytes).unwrap_or(HeaderError::Unknown))?;
    let seen = match format {
        Format::Avif => avif::read(bytes),
        Format::Bmp => bmp::read(bytes),
        Format::Dds => plain::dds(bytes),
        Format::Gif => gif::read(bytes),
        Format::Ico => ico::read(bytes),
        Format::Jpeg => jpeg::read(bytes),
        Format::Jpeg2000 => jp2::read(bytes),
        Format::Png => png::read(bytes),
        Format::Ppm => plain::ppm(bytes),
        Format::Psd => plain::psd(bytes),
        Format::Qoi => plain::qoi(bytes),
        Format::Tga => plain::tga(bytes),
        Format::Tiff => tiff::read(bytes),
        Format::WebP => webp::read(bytes),
    }
    .map_err(|problem| match problem {
        Problem::Truncated => HeaderError::Truncated { format },
        Problem::NoImage(problem) => HeaderError::NoImage { problem },
        Problem::Invalid(field) => HeaderError::Invalid { format, field },
    })?;
    let Seen { width, height, rgb, orientation } = seen;
    if width == 0 || height == 0 {
        return Err(HeaderError::Invalid { format, field: "size" });
    }
    if u64::from(width) * u64::from(height) > PIXELS_MAX {
        return Err(HeaderError::TooManyPixels { width, height });
    }
    Ok(ImageHeader { format, width, height, orientation, converted: !rgb })
}

/// What one reader found; `rgb` = Pillow opens it in mode RGB.
#[derive(Clone, Copy, Debug)]
struct Seen {
    width: u32,
    height: u32,
    rgb: bool,
    orientation: u8,
}

/// Why one reader gave up. `None` of the byte helpers is always [`Problem::Truncated`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Problem {
    Truncated,
    Invalid(&'static str),
    /// Pillow is known to refuse it.
    NoImage(&'static str),
}

/// Bytes of no format that Pillow opens without a plugin, as far as that is certain.
fn no_image(bytes: &[u8]) -> Option<HeaderError> {
    let text = bytes.strip_prefix(b"\xef\xbb\xbf").unwrap_or(bytes).trim_ascii_start();
    let problem = match bytes {
        [] => "no bytes",
        [_, _, _, _, b'f', b't', b'y', b'p', b'h', b'e', b'i' | b'v', ..] => "HEIC",
        // Among them SVG, and the page of a server that has no such image.
        _ if text.starts_with(b"<") => "markup",
        _ => return None,
    };
    Some(HeaderError::NoImage { problem })
}

/// Format by magic bytes. TGA has none: it is what is left when its fields make sense.
pub(crate) fn format(bytes: &[u8]) -> Option<Format> {
    let starts = |magic: &[u8]| bytes.starts_with(magic);
    Some(match bytes {
        _ if starts(b"\xff\xd8\xff") => Format::Jpeg,
        _ if starts(png::MAGIC) => Format::Png,
        [b'R', b'I', b'F', b'F', _, _, _, _, b'W', b'E', b'B', b'P', ..] => Format::WebP,
        _ if starts(b"GIF87a") || starts(b"GIF89a") => Format::Gif,
        _ if starts(b"BM") || bmp::is_bare(bytes) => Format::Bmp,
        _ if ifd::HEADS.iter().any(|head| starts(head)) => Format::Tiff,
        [_, _, _, _, b'f', b't', b'y', b'p', brand @ ..]
            if avif::BRANDS.iter().any(|known| brand.starts_with(known)) =>
        {
            Format::Avif
        }
        _ if starts(jp2::BOX_MAGIC) || starts(jp2::STREAM_MAGIC) => Format::Jpeg2000,
        [b'P', b'0'..=b'6' | b'f' | b'y', ..] => Format::Ppm,
        _ if starts(b"DDS ") => Format::Dds,
        _ if starts(b"qoif") => Format::Qoi,
        _ if starts(b"8BPS") => Format::Psd,
        _ if starts(ico::MAGIC) => Format::Ico,
        _ if plain::is_tga(bytes) => Format::Tga,
        _ => return None,
    })
}
