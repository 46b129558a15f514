//! The resize of the engines' processors: `interpolate(u8, bicubic, antialias=True)` of torch.
//!
//! 8 bits in, 8 bits between the passes, 8 bits out, the horizontal pass first, weights in fixed point; both passes clamp. Two calls of
//! `fast_image_resize`, one per axis, give its bytes; one call would go vertical first, and floats would not clamp between.

use fast_image_resize::images::{Image, ImageRef};
use fast_image_resize::{FilterType, PixelType, ResizeAlg, ResizeOptions, Resizer};

use crate::Rgb;

#[derive(Debug, thiserror::Error)]
#[error("cannot resize an image to {width}x{height}")]
pub struct ResizeError {
    width: u32,
    height: u32,
}

/// Resizes to `width` × `height`. An axis whose size stays is left alone, as torch does.
///
/// # Errors
/// When a side is 0.
pub fn resize(from: &Rgb, width: u32, height: u32) -> Result<Rgb, ResizeError> {
    let failed = || ResizeError { width, height };
    if width == 0 || height == 0 {
        return Err(failed());
    }
    let mut resizer = Resizer::new();
    let mut pass = |from: &Rgb, width, height| -> Option<Rgb> {
        let source = ImageRef::new(from.width, from.height, &from.data, PixelType::U8x3).ok()?;
        let mut target = Image::new(width, height, PixelType::U8x3);
        let options = ResizeOptions::new().resize_alg(ResizeAlg::Convolution(FilterType::CatmullRom)).use_alpha(false);
        resizer.resize(&source, &mut target, &options).ok()?;
        Rgb::new(width, height, target.into_vec())
    };
    let across = if from.width == width { from.clone() } else { pass(from, width, from.height).ok_or_else(failed)? };
    if across.height == height { Ok(across) } else { pass(&across, width, height).ok_or_else(failed) }
}
