//! Idefics3 and SmolVLM: the image is scaled to a fixed long side, even if small, and cut into tiles, each marked with its row and
//! column; an overview ends it (transformers 5.19 `Idefics3ImageProcessor`, `Idefics3Processor`; vLLM 0.32 `idefics3.py`).

use super::fields::Fields;
use super::shape::Size;
use super::words::Words;
use super::{ConfigError, Family, Target};

/// Tiles along a side, at most; every pair of row and column has a text of its own.
const SIDE_MAX: u32 = 32;

/// In pixels; the processor scales a longer side down once more.
const LONGEST_MAX: u32 = 4096;

#[derive(Clone, Debug)]
struct Grid {
    /// In pixels.
    longest: f64,
    tile: f64,
    splits: bool,
}

pub(super) fn model(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    let image = &fields.image;
    image.expect_flag("/do_resize", true)?;
    let longest = image.size("/size/longest_edge")?.unwrap_or(4 * 364);
    let tile = image.size("/max_image_size/longest_edge")?.unwrap_or(364);
    let side = longest.div_ceil(tile);
    if side > SIDE_MAX || longest > LONGEST_MAX {
        return Err(image.invalid("/size/longest_edge", "at most 4096 pixels and 32 tiles"));
    }
    let splits = image.flag("/do_image_splitting")?.unwrap_or(true);
    let grid = Grid { longest: longest.into(), tile: tile.into(), splits };
    let per_tile = u64::from(fields.processor.size("/image_seq_len")?.unwrap_or(169));
    let feature = words.own(fields.image_token()?, "<image>");
    let (around, overview) = (words.token("<fake_token_around_image>"), words.text("<global-img>"));
    let (line, last_line) = (words.text("\n"), words.text("\n\n"));
    let places = (1..=side).map(|row| {
        let text = |column| format!("<row_{row}_col_{column}>");
        (1..=side).map(|column| words.text(text(column))).collect()
    });
    let places: Vec<Vec<_>> = places.collect();
    Ok(Family::new(Target::Word(feature), "<image>", move |size, out| {
        let (rows, columns) = grid.pick(size);
        out.reserve(rows * (3 * columns + 1) + 4);
        for (row, places) in (1..=rows).zip(&places) {
            for &place in &places[..columns] {
                out.push(&[around, place]);
                out.features(feature, per_tile);
            }
            out.push(&[if row < rows { line } else { last_line }]);
        }
        out.push(&[around, overview]);
        out.features(feature, per_tile);
        out.push(&[around]);
        Ok(())
    }))
}

impl Grid {
    /// Rows and columns of tiles; none when the overview is all.
    fn pick(&self, size: Size) -> (usize, usize) {
        if !self.splits {
            return (0, 0);
        }
        let ratio = size.w() / size.h();
        let even = |side: f64| if side % 2.0 == 0.0 { side.max(1.0) } else { side + 1.0 };
        let (width, height) = if size.width >= size.height {
            (self.longest, even((self.longest / ratio).trunc()))
        } else {
            (even((self.longest * ratio).trunc()), self.longest)
        };
        match ((height / self.tile).ceil() as usize, (width / self.tile).ceil() as usize) {
            (1, 1) => (0, 0),
            tiles => tiles,
        }
    }
}
