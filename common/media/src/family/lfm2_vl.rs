//! LFM2-VL: small images are scaled, larger ones cut into square tiles, each marked with its row and column, with an overview behind
//! them (transformers 5.19 `Lfm2VlImageProcessor`, `Lfm2VlProcessor`; vLLM 0.33 `lfm2_vl.py`).

use super::fields::Fields;
use super::shape::Size;
use super::tiles::Tiles;
use super::words::Words;
use super::{ConfigError, Family, Target};

/// More tiles than any model has; each pair of row and column has a text of its own.
const TILES_MAX: u32 = 64;

#[derive(Clone, Debug)]
struct Resize {
    /// Sides of a patch of the tower and of a token, in pixels.
    patch: f64,
    factor: f64,
    /// In pixels.
    least: f64,
    most: f64,
    /// Above this an image is cut into tiles.
    large: f64,
}

pub(super) fn model(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    let image = &fields.image;
    image.expect_flag("/do_resize", true)?;
    // Without it, vLLM takes the last tile for the overview.
    image.expect_flag("/use_thumbnail", true)?;
    let size = |field, default| Ok(image.size(field)?.unwrap_or(default));
    let (patch, downsample) = (size("/encoder_patch_size", 16)?, size("/downsample_factor", 2)?);
    let (min, max) = (size("/min_tiles", 2)?, size("/max_tiles", 10)?);
    let (least, most) = (size("/min_image_tokens", 64)?, size("/max_image_tokens", 256)?);
    let side = size("/tile_size", 512)?;
    let tolerance = image.ratio("/max_pixels_tolerance")?.unwrap_or(2.0);
    let factor = f64::from(patch) * f64::from(downsample);
    let area = factor * factor;
    let most = f64::from(most) * area;
    let resize = Resize { patch: patch.into(), factor, least: f64::from(least) * area, most, large: most * tolerance };
    let splits = max > 1;
    let invalid = image.invalid("/max_tiles", "1, or 2 to 64 and at least min_tiles, which is then at least 2");
    if max > TILES_MAX || (splits && min < 2) {
        return Err(invalid);
    }
    let tiles = Tiles::new(side, min, max, invalid)?;
    let per_tile = u64::from((side / patch).div_ceil(downsample)).pow(2);

    let feature = words.own(fields.image_token()?, "<image>");
    let (start, end) = (words.token("<|image_start|>"), words.token("<|image_end|>"));
    let overview = words.token("<|img_thumbnail|>");
    let most_columns = if splits { max } else { 0 };
    let row = |row: u32| {
        let text = |column| format!("<|img_row_{row}_col_{column}|>");
        (1..=max / row).map(|column| words.token(&text(column))).collect::<Vec<_>>()
    };
    let places: Vec<Vec<_>> = (1..=most_columns).map(row).collect();
    Ok(Family::new(Target::Word(feature), "<image>", move |size, out| {
        out.push(&[start]);
        if splits && resize.is_large(size) {
            let (columns, rows) = tiles.pick(size);
            for row in places.iter().take(rows as usize) {
                for &place in row.iter().take(columns as usize) {
                    out.push(&[place]);
                    out.features(feature, per_tile);
                }
            }
            out.push(&[overview]);
        }
        out.features(feature, resize.tokens(size));
        out.push(&[end]);
        Ok(())
    }))
}

impl Resize {
    fn units(&self, pixels: f64) -> f64 {
        (pixels / self.factor).round_ties_even()
    }

    fn is_large(&self, size: Size) -> bool {
        let side = |pixels: f64| (self.units(pixels) * self.factor).max(self.patch);
        side(size.h()) * side(size.w()) > self.large
    }

    /// Tokens of the image as a whole. The order of multiplications and divisions is that of the original.
    fn tokens(&self, size: Size) -> u64 {
        let (w, h, factor) = (size.w(), size.h(), self.factor);
        let (mut columns, mut rows) = (self.units(w).max(1.0), self.units(h).max(1.0));
        let area = rows * factor * (columns * factor);
        if area > self.most {
            let shrink = (h * w / self.most).sqrt();
            let side = |pixels: f64| (pixels / shrink / factor).floor().max(1.0);
            (columns, rows) = (side(w), side(h));
        } else if area < self.least {
            let grow = (self.least / (h * w)).sqrt();
            let side = |pixels: f64| (pixels * grow / factor).ceil();
            (columns, rows) = (side(w), side(h));
        }
        (columns * rows) as u64
    }
}

#[cfg(test)]
mod tests;
