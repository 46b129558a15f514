//! `smart_resize` of the Qwen image processors and those that follow them (transformers 5.19: `Qwen2VLImageProcessor`,
//! `Glm4vImageProcessor`, `MiniMaxM3VLImageProcessor`).

use super::fields::Fields;
use super::shape::Size;
use super::{ConfigError, Refused};

/// Greatest ratio of the sides; exactly this passes.
const ASPECT_MAX: u32 = 200;

/// Sides become multiples of `factor`, the volume is moved between two bounds; a token covers `factor`² pixels.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct SmartResize {
    /// Patch size × merge size, in pixels.
    factor: f64,
    pixels_min: f64,
    pixels_max: f64,
    /// Frames of the volume that the bounds are for, and the same in whole temporal patches.
    frames: f64,
    rounded: f64,
    /// Frames with a side below `factor` are enlarged first.
    lift: bool,
}

/// What stands in for absent fields.
#[derive(Clone, Copy)]
pub(super) struct Defaults {
    /// In pixels.
    pub patch: u32,
    pub pixels_min: u64,
    pub pixels_max: u64,
    /// `size` of the file is not to be used.
    pub ignore_size: bool,
}

/// Patches merged into one token, along each side.
pub(super) const MERGE: u32 = 2;

/// Patch × merge in pixels, and frames of a temporal patch.
pub(super) fn patches(fields: &Fields<'_>, patch: u32) -> Result<f64, ConfigError> {
    fields.image.expect_flag("/do_resize", true)?;
    let patch = fields.image.size("/patch_size")?.unwrap_or(patch);
    let merge = fields.image.size("/merge_size")?.unwrap_or(MERGE);
    let factor = u64::from(patch) * u64::from(merge);
    let bounded = u32::try_from(factor).ok().filter(|&factor| factor <= 1 << 16);
    bounded.map(f64::from).ok_or(fields.image.invalid("/patch_size", "a size in pixels"))
}

impl SmartResize {
    /// Reads the fields. `min_pixels` and `max_pixels` override `size`; an option overrides both.
    pub fn from_fields(fields: &Fields<'_>, defaults: Defaults) -> Result<Self, ConfigError> {
        let file_size = fields.file.find("/size").is_some() && !defaults.ignore_size;
        // A `size` of the file replaces the default as a whole.
        let bound = |over, field, default| {
            let option = fields.options.number(over)?.or(fields.options.number(field)?);
            let file = match fields.file.number(over)? {
                None if file_size => fields.file.number(field)?,
                own => own,
            };
            match option.or(file) {
                Some(pixels) => Ok(pixels),
                None if file_size => Err(fields.file.missing(field)),
                None => Ok(default),
            }
        };
        Ok(Self {
            factor: patches(fields, defaults.patch)?,
            pixels_min: bound("/min_pixels", "/size/shortest_edge", defaults.pixels_min)? as f64,
            pixels_max: bound("/max_pixels", "/size/longest_edge", defaults.pixels_max)? as f64,
            frames: 1.0,
            rounded: 1.0,
            lift: false,
        })
    }

    /// The same bounds for a volume of `frames`, `rounded` to whole temporal patches; small frames are enlarged first.
    pub fn of_volume(&self, frames: f64, rounded: f64) -> Self {
        Self { frames, rounded, lift: true, ..*self }
    }

    /// Features of an image, or of one temporal patch of a video.
    pub fn tokens(&self, size: Size) -> Result<u64, Refused> {
        self.cells(size).map(|(columns, rows)| (columns * rows) as u64)
    }

    /// Columns and rows of features: the sides after resizing, in units of the factor.
    ///
    /// The order of multiplications and divisions is that of the original: it decides ties.
    pub fn cells(&self, size: Size) -> Result<(f64, f64), Refused> {
        let factor = self.factor;
        let (mut w, mut h) = (size.w(), size.h());
        if self.lift && (w < factor || h < factor) {
            let grow = (factor / h).max(factor / w);
            (w, h) = ((w * grow).trunc(), (h * grow).trunc());
        }
        if w.max(h) / w.min(h) > f64::from(ASPECT_MAX) {
            return Err(Refused::AspectRatio { width: size.width, height: size.height, max: ASPECT_MAX });
        }
        // Sides in units of `factor`.
        let (mut columns, mut rows) = ((w / factor).round_ties_even(), (h / factor).round_ties_even());
        let volume = self.rounded * (columns * factor * (rows * factor));
        if volume > self.pixels_max {
            let shrink = (self.frames * h * w / self.pixels_max).sqrt();
            let side = |pixels: f64| (pixels / shrink / factor).floor().max(1.0);
            (columns, rows) = (side(w), side(h));
        } else if volume < self.pixels_min {
            let grow = (self.pixels_min / (self.frames * h * w)).sqrt();
            let side = |pixels: f64| (pixels * grow / factor).ceil();
            (columns, rows) = (side(w), side(h));
        }
        Ok((columns, rows))
    }
}
