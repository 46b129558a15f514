//! DeepSeek-OCR-2: tiles of 768 pixels and an overview, no line-break features (transformers 5.19 `DeepseekOcr2ImageProcessor`;
//! vLLM 0.32 `deepseek_ocr2.py`).

use super::fields::Fields;
use super::tiles::Tiles;
use super::words::Words;
use super::{ConfigError, Family};

pub(super) fn model(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    let image = &fields.image;
    let (side, tile) = (image.size("/size")?.unwrap_or(1024), image.size("/tile_size")?.unwrap_or(768));
    let (min, max) = (image.size("/min_patches")?.unwrap_or(2), image.size("/max_patches")?.unwrap_or(6));
    let tiles = Tiles::new(tile, min, max, image.invalid("/max_patches", "1 to 1024 and at least min_patches"))?;
    let patch = fields.processor.size("/patch_size")?.unwrap_or(16);
    let shrink = fields.processor.size("/downsample_ratio")?.unwrap_or(4);
    let square = |pixels: u32| u64::from((pixels / patch).div_ceil(shrink)).pow(2);
    let (overview, per_tile) = (square(side), square(tile));
    let pad = words.own(fields.image_token()?, "<image>");
    Ok(Family::pads(pad, "<image>", move |size| {
        if size.width.max(size.height) <= tile {
            return Ok(overview + 1);
        }
        let (columns, rows) = tiles.pick(size);
        Ok(overview + u64::from(columns * rows) * per_tile + 1)
    }))
}
