//! Llama 4: tiles of the best canvas, row by row, then an overview (transformers 5.19 `Llama4ImageProcessor`,
//! `Llama4Processor`; vLLM 0.32 `mllama4.py`). Scales are single precision, as in torch.

use super::fields::{Fields, agreed};
use super::shape::Size;
use super::tiles::TILES_MAX;
use super::words::Words;
use super::{ConfigError, Family, Target};

pub(super) fn model(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    fields.image.expect_flag("/resize_to_max_canvas", false)?;
    let tile = fields.image.size("/size")?.unwrap_or(336);
    let tile = agreed(("size", Some(tile)), ("vision_config.image_size", fields.vision.size("/image_size")?))?;
    let tile = tile.unwrap_or(336);
    let patch = fields.vision.size("/patch_size")?.unwrap_or(14);
    let ratio = fields.vision.ratio("/pixel_shuffle_ratio")?.unwrap_or(0.5);
    let shrink = (1.0 / (ratio * ratio)).round_ties_even();
    let per_tile = (f64::from(tile / patch).powi(2) / shrink).floor();
    let most = fields.image.size("/max_patches")?.unwrap_or(16);
    if most > TILES_MAX {
        return Err(fields.image.invalid("/max_patches", "at most 1024"));
    }
    let canvases = Canvases::new(tile, most);
    let image = words.token("<|image|>");
    let (start, end) = (words.token("<|image_start|>"), words.token("<|image_end|>"));
    let (next, line) = (words.token("<|tile_x_separator|>"), words.token("<|tile_y_separator|>"));
    let patch = words.own(fields.image_token()?, "<|patch|>");
    Ok(Family::new(Target::Word(image), "<|image|>", move |size, out| {
        let (rows, columns) = canvases.pick(size);
        out.reserve(2 * (rows * columns) as usize + 4);
        out.push(&[start]);
        for _ in 0..if rows * columns > 1 { rows } else { 0 } {
            for column in 1..=columns {
                out.features(patch, per_tile as u64);
                out.push(&[if column < columns { next } else { line }]);
            }
        }
        out.push(&[image]);
        out.features(patch, per_tile as u64);
        out.push(&[end]);
        Ok(())
    }))
}

/// (rows, columns) of tiles, in the order in which the original tries them, with their sides in pixels.
#[derive(Clone, Debug)]
struct Canvases(Vec<(u32, u32, f32, f32)>);

impl Canvases {
    fn new(tile: u32, most: u32) -> Self {
        let mut by_ratio: Vec<(f64, Vec<(u32, u32)>)> = Vec::new();
        for tiles in (1..=most).rev() {
            for rows in (1..=tiles).filter(|rows| tiles.is_multiple_of(*rows)) {
                let columns = tiles / rows;
                let ratio = f64::from(rows) / f64::from(columns);
                match by_ratio.iter_mut().find(|(known, _)| *known == ratio) {
                    Some((_, group)) => group.push((rows, columns)),
                    None => by_ratio.push((ratio, vec![(rows, columns)])),
                }
            }
        }
        let side = |n: u32| (n * tile) as f32;
        let all = by_ratio.into_iter().flat_map(|(_, group)| group);
        Self(all.map(|(rows, columns)| (rows, columns, side(rows), side(columns))).collect())
    }

    /// The canvas that enlarges least, else the one that shrinks least; of those with the same scale the smallest.
    fn pick(&self, size: Size) -> (u32, u32) {
        let (w, h) = (size.width as f32, size.height as f32);
        let (mut best, mut chosen) = ((1, 1), f32::NAN);
        for &(rows, columns, height, width) in &self.0 {
            let (across, down) = (width / w, height / h);
            let scale = if down > across { across } else { down };
            let better = match (scale >= 1.0, chosen >= 1.0) {
                _ if chosen.is_nan() => true,
                (true, false) => true,
                (false, true) => false,
                (true, true) => scale < chosen,
                (false, false) => scale > chosen,
            };
            if better || (scale == chosen && rows * columns < best.0 * best.1) {
                (best, chosen) = ((rows, columns), scale);
            }
        }
        best
    }
}
