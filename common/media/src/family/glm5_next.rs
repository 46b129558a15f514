//! GLM-5.3: a budget of tokens instead of pixels, and no limit to the ratio of the sides (transformers 5.19
//! `Glm5NextImageProcessor`).

use super::fields::Fields;
use super::shape::Size;
use super::words::Words;
use super::{ConfigError, Family, glm4v, smart_resize};

#[derive(Clone, Debug)]
struct Budget {
    /// Patch size × merge size, in pixels.
    factor: u64,
    frames: u64,
    /// In pixels of the whole volume.
    min: u64,
    max: u64,
}

pub(super) fn model(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    let image = &fields.image;
    if image.size("/patch_expand_factor")?.is_some_and(|factor| factor != 1) {
        return Err(image.invalid("/patch_expand_factor", "1 or absent"));
    }
    let factor = smart_resize::patches(fields, 14)? as u64;
    let frames = u64::from(image.size("/temporal_patch_size")?.unwrap_or(2));
    let pixels = |tokens: u32| u64::from(tokens) * frames * factor * factor;
    let min = pixels(image.size("/min_image_tokens")?.unwrap_or(16));
    let max = pixels(image.size("/max_image_tokens")?.unwrap_or(8000));
    let budget = Budget { factor, frames, min, max };
    let pad = words.own(fields.image_token()?, "<|image|>");
    Ok(Family::pads(pad, glm4v::IMAGE_TEXT, move |size| Ok(budget.tokens(size))))
}

impl Budget {
    fn tokens(&self, size: Size) -> u64 {
        let (width, height) = (u64::from(size.width), u64::from(size.height));
        let volume = |(rows, columns): (u64, u64)| {
            u128::from(self.frames * self.factor * self.factor) * u128::from(rows) * u128::from(columns)
        };
        // Sides in units of `factor`.
        let mut grid = (height.div_ceil(self.factor), width.div_ceil(self.factor));
        if volume(grid) < u128::from(self.min) {
            let grow = (self.min as f64 / (self.frames as f64 * size.h() * size.w())).sqrt();
            let side = |pixels: f64| ((pixels * grow).ceil() as u64).div_ceil(self.factor);
            grid = (side(size.h()), side(size.w()));
        }
        if volume(grid) > u128::from(self.max) {
            grid = (1, 1);
            // The greatest content height whose canvas fits.
            let (mut low, mut high) = (1, height);
            while low <= high {
                let content = u64::midpoint(low, high);
                let across = (width * content / height).max(1);
                let canvas = (content.div_ceil(self.factor), across.div_ceil(self.factor));
                if volume(canvas) <= u128::from(self.max) {
                    (grid, low) = (canvas, content + 1);
                } else {
                    high = content - 1;
                }
            }
        }
        grid.0 * grid.1
    }
}
