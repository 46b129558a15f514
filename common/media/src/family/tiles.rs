//! InternVL's choice of a grid of square tiles: the one nearest in aspect ratio (`find_closest_aspect_ratio`; vLLM 0.32
//! `calculate_internvl_targets`, transformers 5.19 `get_optimal_tiled_canvas`).

use super::ConfigError;
use super::shape::Size;

/// More tiles than any model has; bounds the work per image.
pub(super) const TILES_MAX: u32 = 1024;

/// Candidate grids, by area.
#[derive(Clone, Debug)]
pub(super) struct Tiles {
    /// 0.5 × the area of a tile, in pixels.
    half_tile: f64,
    /// Columns, rows, columns / rows.
    grids: Vec<(u32, u32, f64)>,
}

impl Tiles {
    /// Grids of `min` to `max` tiles with this side in pixels. `invalid` is the error for bounds out of range.
    pub fn new(side: u32, min: u32, max: u32, invalid: ConfigError) -> Result<Self, ConfigError> {
        if min > max || max > TILES_MAX {
            return Err(invalid);
        }
        let all = (1..=max).flat_map(|columns| (1..=max / columns).map(move |rows| (columns, rows)));
        let mut grids: Vec<_> = all.filter(|(columns, rows)| columns * rows >= min).collect();
        grids.sort_by_key(|(columns, rows)| columns * rows);
        let grids =
            grids.into_iter().map(|(columns, rows)| (columns, rows, f64::from(columns) / f64::from(rows))).collect();
        Ok(Self { half_tile: 0.5 * f64::from(side) * f64::from(side), grids })
    }

    /// Columns and rows for an image.
    pub fn pick(&self, size: Size) -> (u32, u32) {
        let (ratio, area) = (size.w() / size.h(), size.w() * size.h());
        let (mut best, mut least) = ((1, 1), f64::INFINITY);
        for &(columns, rows, candidate) in &self.grids {
            let distance = (ratio - candidate).abs();
            let larger_fits = || area > self.half_tile * f64::from(columns * rows);
            if distance < least || (distance == least && larger_fits()) {
                (best, least) = ((columns, rows), distance);
            }
        }
        best
    }

    /// Tiles for an image, with the overview that goes with more than one.
    pub fn count_with_overview(&self, size: Size) -> u64 {
        let (columns, rows) = self.pick(size);
        let tiles = u64::from(columns) * u64::from(rows);
        if tiles > 1 { tiles + 1 } else { 1 }
    }
}
