//! DeepSeek-OCR: tiles of 640 pixels with line-break features, and an overview of 1024 (vLLM 0.32 `deepseek_ocr.py`, where these
//! numbers are constants that no file changes).

use super::fields::Fields;
use super::tiles::Tiles;
use super::words::Words;
use super::{ConfigError, Family, deepseek_ocr2};

const TILE: u32 = 640;
/// Features along a side of the overview and of a tile: side / 16 / 4, rounded up.
const OVERVIEW: u64 = 16;
const PER_SIDE: u64 = 10;

pub(super) fn model(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    let tiles = Tiles::new(TILE, 2, 6, fields.config.invalid("/tiles", "2 to 6"))?;
    let image = words.own(fields.image_token()?, "<image>");
    Ok(Family::pads(image, "<image>", move |size| {
        let small = size.width <= TILE && size.height <= TILE;
        let (columns, rows) = if small { (1, 1) } else { tiles.pick(size) };
        let (columns, rows) = (u64::from(columns) * PER_SIDE, u64::from(rows) * PER_SIDE);
        let details = if columns > PER_SIDE || rows > PER_SIDE { rows * (columns + 1) } else { 0 };
        Ok(OVERVIEW * (OVERVIEW + 1) + details + 1)
    }))
}

/// Published checkpoints share a `model_type` with DeepSeek-VL2, whose rule is another.
pub(super) fn by_architecture(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    if fields.has_architecture("DeepseekOCRForCausalLM") {
        return model(fields, words);
    }
    if fields.has_architecture("DeepseekOCR2ForCausalLM") {
        return deepseek_ocr2::model(fields, words);
    }
    Err(ConfigError::UnknownModelType { model_type: "deepseek_vl_v2".to_owned() })
}
