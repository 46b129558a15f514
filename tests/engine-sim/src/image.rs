//! An image as vLLM keys and counts it: default identity, upright size, placeholder tokens.
//!
//! Mirrors `vllm/multimodal/hasher.py` (0.32) and Qwen's `smart_resize`. Sizes come from `imagesize`; the pixel mode and
//! the orientation are read here. Good enough for the formats of our vectors, not for hostile files.

/// What the engine needs to know of a picture.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Picture {
    /// After EXIF rotation.
    pub width: u32,
    /// After EXIF rotation.
    pub height: u32,
    /// The pixels are not RGB as stored, so vLLM converts them and says so in the identity.
    pub converted: bool,
}

/// Reads a picture from the file's bytes; `None` when it is none that we know.
pub fn read(bytes: &[u8]) -> Option<Picture> {
    let size = imagesize::blob_size(bytes).ok()?;
    let (width, height) = (u32::try_from(size.width).ok()?, u32::try_from(size.height).ok()?);
    let turned = orientation(bytes).is_some_and(|value| (5..=8).contains(&value));
    let (width, height) = if turned { (height, width) } else { (width, height) };
    (width > 0 && height > 0).then_some(Picture { width, height, converted: is_converted(bytes) })
}

/// vLLM's default identity of an image: framed blake3 over the file as received and the model string.
pub fn default_id(bytes: &[u8], converted: bool, model: &str) -> String {
    let mut hasher = blake3::Hasher::new();
    frame(&mut hasher, b"image");
    hasher.update(&[3]); // leaf
    frame(&mut hasher, b"image");
    if converted {
        hasher.update(&[2]); // mapping of two entries, in this order
        hasher.update(&2u64.to_le_bytes());
        frame(&mut hasher, b"io_config");
        hasher.update(&[2]);
        hasher.update(&2u64.to_le_bytes());
        frame(&mut hasher, b"image_mode");
        hasher.update(&[3]);
        frame(&mut hasher, b"RGB");
        frame(&mut hasher, b"rgba_background_color");
        hasher.update(&[1]); // tuple of three
        hasher.update(&3u64.to_le_bytes());
        for _ in 0..3 {
            hasher.update(&[3]);
            frame(&mut hasher, &255i64.to_le_bytes());
        }
        frame(&mut hasher, b"data");
    }
    hasher.update(&[3]);
    frame(&mut hasher, bytes);
    frame(&mut hasher, b"model_id");
    hasher.update(&[3]);
    frame(&mut hasher, model.as_bytes());
    hasher.finalize().to_hex().to_string()
}

fn frame(hasher: &mut blake3::Hasher, bytes: &[u8]) {
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    hasher.update(bytes);
}

/// Qwen2-VL's and Qwen3-VL's resize rule.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Resize {
    /// Patch size × merge size, in pixels.
    pub factor: u32,
    /// Least area in pixels.
    pub area_min: u64,
    /// Greatest area in pixels.
    pub area_max: u64,
}

impl Resize {
    /// Placeholder tokens of a picture; `None` when a side is more than 200 times the other.
    pub fn tokens(&self, width: u32, height: u32) -> Option<usize> {
        let (w, h, f) = (f64::from(width), f64::from(height), f64::from(self.factor));
        if w.max(h) / w.min(h) > 200.0 {
            return None;
        }
        #[expect(clippy::cast_precision_loss, reason = "areas are far below 2^53")]
        let (low, high) = (self.area_min as f64, self.area_max as f64);
        let (mut cols, mut rows) = ((w / f).round_ties_even(), (h / f).round_ties_even());
        let area = cols * rows * f * f;
        if area > high {
            let shrink = (w * h / high).sqrt();
            (cols, rows) = ((w / shrink / f).floor().max(1.0), (h / shrink / f).floor().max(1.0));
        } else if area < low {
            let grow = (low / (w * h)).sqrt();
            (cols, rows) = ((w * grow / f).ceil(), (h * grow / f).ceil());
        }
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "whole and at most area_max / f²")]
        Some((cols * rows) as usize)
    }
}

/// Whether Pillow's mode of the file is other than RGB.
fn is_converted(bytes: &[u8]) -> bool {
    if bytes.starts_with(b"\x89PNG\r\n\x1a\n") {
        return bytes.get(25).is_some_and(|colour| *colour != 2);
    }
    if bytes.starts_with(b"GIF8") {
        return true;
    }
    if bytes.starts_with(b"RIFF") && bytes.get(8..12) == Some(b"WEBP") {
        return match bytes.get(12..16) {
            Some(b"VP8X") => bytes.get(20).is_some_and(|flags| flags & 0x10 != 0),
            Some(b"VP8L") => bytes.get(24).is_some_and(|bits| bits & 0x10 != 0),
            _ => false,
        };
    }
    jpeg_segments(bytes)
        .find(|(marker, _)| is_frame_header(*marker))
        .is_some_and(|(_, body)| body.get(5).is_some_and(|components| *components != 3))
}

fn is_frame_header(marker: u8) -> bool {
    (0xc0..=0xcf).contains(&marker) && !matches!(marker, 0xc4 | 0xc8 | 0xcc)
}

/// `(marker, body)` of the segments before the scan; nothing for other files.
fn jpeg_segments(bytes: &[u8]) -> impl Iterator<Item = (u8, &[u8])> {
    let mut at = if bytes.starts_with(&[0xff, 0xd8]) { 2 } else { bytes.len() };
    std::iter::from_fn(move || {
        while bytes.get(at) == Some(&0xff) && bytes.get(at + 1) == Some(&0xff) {
            at += 1;
        }
        let (marker, length) = match bytes.get(at..at + 4)? {
            [0xff, marker, high, low] => (*marker, usize::from(u16::from_be_bytes([*high, *low]))),
            _ => return None,
        };
        let body = bytes.get(at + 4..at + 2 + length)?;
        at += 2 + length;
        (marker != 0xda).then_some((marker, body))
    })
}

/// EXIF orientation of a JPEG (first EXIF segment, IFD0).
fn orientation(bytes: &[u8]) -> Option<u32> {
    let exif = jpeg_segments(bytes).find_map(|(marker, body)| match marker {
        0xe1 => body.strip_prefix(b"Exif\0\0"),
        _ => None,
    })?;
    let big = match exif.get(..2)? {
        b"MM" => true,
        b"II" => false,
        _ => return None,
    };
    let number = |at: usize, size: usize| -> Option<u32> {
        let field = exif.get(at..at.checked_add(size)?)?;
        let fold = |sum: u32, byte: &u8| sum << 8 | u32::from(*byte);
        Some(if big { field.iter().fold(0, fold) } else { field.iter().rev().fold(0, fold) })
    };
    let start = usize::try_from(number(4, 4)?).ok()?;
    let entries = usize::try_from(number(start, 2)?).ok()?;
    let entry = (0..entries).map(|i| start + 2 + 12 * i).find(|at| number(*at, 2) == Some(0x112))?;
    match number(entry + 2, 2)? {
        3 => number(entry + 8, 2),
        4 => number(entry + 8, 4),
        _ => None,
    }
}
