//! `smart_resize` of the Qwen image processors (transformers 5.19, `Qwen2VLImageProcessor`).

use super::fields::{Fields, PREPROCESSOR};
use super::{ConfigError, Refused};

/// Greatest ratio of the sides; exactly this passes.
const ASPECT_MAX: u32 = 200;

/// Sides become multiples of `factor`, the area is moved between two bounds; a token covers `factor`² pixels.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct SmartResize {
    /// Patch size × merge size, in pixels.
    factor: f64,
    pixels_min: f64,
    pixels_max: f64,
}

/// Bounds of the processor class, for a file that sets none.
const PIXELS_MIN: u64 = 56 * 56;
const PIXELS_MAX: u64 = 28 * 28 * 1280;
/// Patches merged into one token, along each side.
const MERGE: u64 = 2;

/// Largest patch × merge taken from a file, in pixels.
const FACTOR_MAX: u64 = 1 << 16;

fn invalid(field: &'static str, expected: &'static str) -> ConfigError {
    ConfigError::Invalid { file: PREPROCESSOR, field, expected }
}

impl SmartResize {
    /// Reads the fields of the preprocessor file. `min_pixels` and `max_pixels` override `size`.
    /// `patch` = the family's patch size in pixels, for a file that sets none.
    pub(super) fn from_fields(fields: &Fields<'_>, patch: u64) -> Result<Self, ConfigError> {
        if fields.is_off("/do_resize") {
            return Err(invalid("/do_resize", "true or absent"));
        }
        let patch = fields.preprocessor("/patch_size")?.unwrap_or(patch);
        let merge = fields.preprocessor("/merge_size")?.unwrap_or(MERGE);
        // A `size` of the file replaces the default as a whole.
        let bound = |over, field, default| match (fields.preprocessor(over)?, fields.preprocessor(field)?) {
            (Some(pixels), _) | (None, Some(pixels)) => Ok(pixels),
            (None, None) if fields.has("/size") => Err(ConfigError::Missing { file: PREPROCESSOR, field }),
            (None, None) => Ok(default),
        };
        let factor = patch.checked_mul(merge).filter(|&factor| factor <= FACTOR_MAX);
        let factor = factor.ok_or(invalid("/patch_size", "a size in pixels"))?;
        Ok(Self {
            factor: factor as f64,
            pixels_min: bound("/min_pixels", "/size/shortest_edge", PIXELS_MIN)? as f64,
            pixels_max: bound("/max_pixels", "/size/longest_edge", PIXELS_MAX)? as f64,
        })
    }

    /// The order of multiplications and divisions is that of the original: it decides ties.
    pub(super) fn tokens(&self, width: u32, height: u32) -> Result<u32, Refused> {
        if u64::from(width.max(height)) > u64::from(width.min(height)) * u64::from(ASPECT_MAX) {
            return Err(Refused::AspectRatio { width, height, max: ASPECT_MAX });
        }
        let factor = self.factor;
        let (w, h) = (f64::from(width), f64::from(height));
        // Sides in units of `factor`.
        let (mut columns, mut rows) = ((w / factor).round_ties_even(), (h / factor).round_ties_even());
        let area = columns * factor * (rows * factor);
        if area > self.pixels_max {
            let shrink = (h * w / self.pixels_max).sqrt();
            let side = |pixels: f64| (pixels / shrink / factor).floor().max(1.0);
            (columns, rows) = (side(w), side(h));
        } else if area < self.pixels_min {
            let grow = (self.pixels_min / (h * w)).sqrt();
            let side = |pixels: f64| (pixels * grow / factor).ceil();
            (columns, rows) = (side(w), side(h));
        }
        let tokens = columns * rows;
        if tokens > f64::from(u32::MAX) {
            return Err(Refused::TooManyTokens { width, height });
        }
        Ok(tokens as u32)
    }
}
