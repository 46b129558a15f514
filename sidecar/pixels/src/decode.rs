//! Bytes of an image file → upright RGB pixels, as vLLM 0.32 loads them with Pillow 13.
//!
//! PNG, GIF, BMP, TIFF and WebP give Pillow's pixels to the bit (`tests/vectors/encoder/decode.json`). JPEG is decoded by other code than
//! Pillow's: a pixel may be a few steps off. CMYK is refused, because its conversion would be a guess.

use std::io::Cursor;

use fovea_media::header::{self, Format, HeaderError};
use image::metadata::Orientation;
use image::{DynamicImage, ImageDecoder, ImageFormat, ImageReader};

use crate::Rgb;

/// Bounds of one image, held before its pixels are allocated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Of the file.
    pub bytes_max: usize,
    /// Width × height.
    pub pixels_max: u64,
}

impl Default for Limits {
    /// 20 MiB and 50 million pixels: 150 MB of RGB.
    fn default() -> Self {
        Self { bytes_max: 20 << 20, pixels_max: 50_000_000 }
    }
}

/// What an engine does to a picture besides decoding it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Options {
    /// Turn and mirror by the file's orientation. vLLM does.
    pub upright: bool,
    /// Colour behind transparent pixels (`rgba_background_color` of vLLM's `media_io_kwargs`).
    pub background: [u8; 3],
}

impl Default for Options {
    fn default() -> Self {
        Self { upright: true, background: [255; 3] }
    }
}

/// Why an image gives no pixels. All are the client's to mend.
#[derive(Debug, thiserror::Error)]
pub enum DecodeError {
    #[error("image file has {bytes} bytes, more than {max}: send a smaller one")]
    TooManyBytes { bytes: usize, max: usize },
    #[error("image of {width}x{height} has more than {max} pixels: scale it down")]
    TooManyPixels { width: u32, height: u32, max: u64 },
    #[error("image header cannot be read")]
    Header(#[from] HeaderError),
    #[error("{what} images are not decoded here: send PNG, JPEG, WebP, GIF, BMP or TIFF in grey or RGB")]
    Unsupported { what: String },
    #[error("image is damaged: send it encoded anew")]
    Damaged(#[source] image::ImageError),
    #[error("image says {header} in its header and {pixels} in its pixels: send it encoded anew")]
    Contradiction { header: String, pixels: String },
}

impl DecodeError {
    /// Whether a smaller image would do: 413 rather than 400.
    pub fn too_large(&self) -> bool {
        matches!(self, Self::TooManyBytes { .. } | Self::TooManyPixels { .. })
    }
}

/// Decodes a whole file.
///
/// # Errors
/// When the file is too large, damaged, or of a kind that is not decoded here.
pub fn decode(bytes: &[u8], limits: &Limits, options: &Options) -> Result<Rgb, DecodeError> {
    if bytes.len() > limits.bytes_max {
        return Err(DecodeError::TooManyBytes { bytes: bytes.len(), max: limits.bytes_max });
    }
    let header = header::read(bytes)?;
    let (width, height) = (header.width, header.height);
    if u64::from(width) * u64::from(height) > limits.pixels_max {
        return Err(DecodeError::TooManyPixels { width, height, max: limits.pixels_max });
    }
    if header.format == Format::Jpeg && has_four_components(bytes) {
        return Err(DecodeError::Unsupported { what: "CMYK".to_owned() });
    }
    // Pillow fills the rest with a colour of the palette that the decoder does not tell.
    if header.format == Format::Gif && first_frame(bytes) != Some((width, height)) {
        return Err(DecodeError::Unsupported { what: "GIF (with a first frame smaller than its screen)".to_owned() });
    }
    let format = format_of(header.format)?;
    let mut decoder = open(bytes, format, limits)?;
    // Pillow turns a TIFF when it opens it, whatever is asked for later.
    let stored = decoder.orientation().unwrap_or(Orientation::NoTransforms);
    let turn = match header.format {
        Format::Tiff => stored,
        _ if options.upright => Orientation::from_exif(header.orientation).unwrap_or(Orientation::NoTransforms),
        _ => Orientation::NoTransforms,
    };
    let mut picture = DynamicImage::from_decoder(decoder).map_err(DecodeError::Damaged)?;
    let transparent = header.converted.then_some(options.background);
    let wide = matches!(picture, DynamicImage::ImageLuma16(_) | DynamicImage::ImageLumaA16(_));
    picture = DynamicImage::ImageRgb8(to_rgb(picture, transparent, wide));
    picture.apply_orientation(turn);
    let expected = if options.upright || header.format == Format::Tiff { header.upright() } else { (width, height) };
    let found = (picture.width(), picture.height());
    let shown = |(width, height): (u32, u32)| format!("{width}x{height}");
    let contradiction = || DecodeError::Contradiction { header: shown(expected), pixels: shown(found) };
    if found != expected {
        return Err(contradiction());
    }
    Rgb::new(found.0, found.1, picture.into_rgb8().into_raw()).ok_or_else(contradiction)
}

fn open<'a>(bytes: &'a [u8], format: ImageFormat, limits: &Limits) -> Result<impl ImageDecoder + 'a, DecodeError> {
    let mut reader = ImageReader::with_format(Cursor::new(bytes), format);
    let mut bounds = image::Limits::no_limits();
    // Sixteen bits of four channels are the widest pixel; decoders need as much again for themselves.
    bounds.max_alloc = Some(limits.pixels_max.saturating_mul(16).saturating_add(limits.bytes_max as u64));
    reader.limits(bounds);
    let decoder = reader.into_decoder().map_err(DecodeError::Damaged)?;
    let (width, height) = decoder.dimensions();
    if u64::from(width) * u64::from(height) > limits.pixels_max {
        return Err(DecodeError::TooManyPixels { width, height, max: limits.pixels_max });
    }
    Ok(decoder)
}

fn format_of(format: Format) -> Result<ImageFormat, DecodeError> {
    Ok(match format {
        Format::Bmp => ImageFormat::Bmp,
        Format::Gif => ImageFormat::Gif,
        Format::Jpeg => ImageFormat::Jpeg,
        Format::Png => ImageFormat::Png,
        Format::Tiff => ImageFormat::Tiff,
        Format::WebP => ImageFormat::WebP,
        other => return Err(DecodeError::Unsupported { what: format!("{other:?}") }),
    })
}

/// RGB as Pillow and vLLM make it: of 16 bits the upper 8, grey of 16 bits cut off at 255, transparent pixels over `background`.
/// `None` drops alpha: Pillow opens such a file in mode RGB, and vLLM leaves it so.
fn to_rgb(picture: DynamicImage, background: Option<[u8; 3]>, grey16: bool) -> image::RgbImage {
    if grey16 {
        let grey = picture.into_luma16();
        let (width, height) = grey.dimensions();
        let data = grey.into_raw().into_iter().flat_map(|value| [value.min(255) as u8; 3]).collect();
        return image::RgbImage::from_raw(width, height, data).unwrap_or_default();
    }
    let high = |value: u16| (value >> 8) as u8;
    let (width, height) = (picture.width(), picture.height());
    let rgba: Vec<u8> = match picture {
        DynamicImage::ImageRgb16(wide) => {
            let data = wide.into_raw().into_iter().map(high).collect();
            return image::RgbImage::from_raw(width, height, data).unwrap_or_default();
        }
        DynamicImage::ImageRgba16(wide) => wide.into_raw().into_iter().map(high).collect(),
        other if other.color().has_alpha() => other.into_rgba8().into_raw(),
        other => return other.into_rgb8(),
    };
    let pixels = rgba.as_chunks::<4>().0.iter();
    let data: Vec<u8> = match background {
        None => pixels.flat_map(|&[r, g, b, _]| [r, g, b]).collect(),
        Some(behind) => pixels
            .flat_map(|&[r, g, b, a]| {
                let over = |front: u8, behind: u8| blend(front, behind, a);
                [over(r, behind[0]), over(g, behind[1]), over(b, behind[2])]
            })
            .collect(),
    };
    image::RgbImage::from_raw(width, height, data).unwrap_or_default()
}

/// Weighted mean of two values, rounded as Pillow's paste does.
fn blend(front: u8, behind: u8, alpha: u8) -> u8 {
    let alpha = u32::from(alpha);
    let sum = u32::from(front) * alpha + u32::from(behind) * (255 - alpha) + 128;
    (((sum >> 8) + sum) >> 8) as u8
}

/// Whether the first frame header of a JPEG names four components.
fn has_four_components(bytes: &[u8]) -> bool {
    let mut at = 2;
    while let Some(&[0xff, code, high, low]) = bytes.get(at..at + 4) {
        match code {
            0xff => at += 1,
            // Start of frame, but for tables (c4), an extension (c8) and arithmetic conditioning (cc).
            0xc0..=0xcf if !matches!(code, 0xc4 | 0xc8 | 0xcc) => return bytes.get(at + 9) == Some(&4),
            _ => at += 2 + usize::from(u16::from_be_bytes([high, low])),
        }
    }
    false
}

/// Width and height of the first frame of a GIF, when it starts in the upper left corner.
fn first_frame(bytes: &[u8]) -> Option<(u32, u32)> {
    let table_bytes = |flags: u8| if flags & 0x80 == 0 { 0 } else { 3 << ((flags & 7) + 1) };
    let mut at = 13 + table_bytes(*bytes.get(10)?);
    loop {
        match *bytes.get(at)? {
            b',' => {
                let &[x, x_high, y, y_high, w, w_high, h, h_high] = bytes.get(at + 1..)?.first_chunk::<8>()?;
                let side = |low, high| u32::from(u16::from_le_bytes([low, high]));
                return (side(x, x_high) == 0 && side(y, y_high) == 0).then(|| (side(w, w_high), side(h, h_high)));
            }
            // An extension: a label and sub-blocks up to an empty one.
            b'!' => {
                at += 2;
                while *bytes.get(at)? != 0 {
                    at += 1 + usize::from(bytes[at]);
                }
                at += 1;
            }
            b';' => return None,
            _ => at += 1,
        }
    }
}
