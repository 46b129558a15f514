//! LLaVA-OneVision: as LLaVA-NeXT, but a large grid is scaled down to nine tiles' worth of features (transformers 5.19
//! `LlavaOnevisionProcessor`; vLLM 0.32 `llava_onevision.py`).

use super::fields::Fields;
use super::llava::{IMAGE_TEXT, SIGLIP, Tower};
use super::pins::Pins;
use super::words::Words;
use super::{ConfigError, Family};

/// Tiles whose features are kept; vLLM knows no other number.
const TILES: f64 = 9.0;

pub(super) fn model(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    let aspect = "/vision_aspect_ratio";
    if fields.config.text(aspect)?.is_some_and(|text| text != "anyres_max_9") {
        return Err(fields.config.invalid(aspect, "anyres_max_9"));
    }
    let tower = Tower::from_fields(fields, SIGLIP, 384)?;
    let overview = tower.features(fields, "full")?;
    let side = |n: u32| 384 * n;
    let pins = Pins::from_fields(fields, || (1..=6).flat_map(|i| (1..=6).map(move |j| (side(i), side(j)))).collect())?;
    let image = words.own(fields.image_token()?, "<image>");
    Ok(Family::pads(image, IMAGE_TEXT, move |size| {
        let (rows, columns) = pins.unpadded(size, tower.side, tower.grid);
        let ratio = ((rows * columns) as f64 / (TILES * f64::from(tower.grid).powi(2))).sqrt();
        let (rows, columns) = if ratio > 1.1 {
            (floor_div(rows as f64, ratio), floor_div(columns as f64, ratio))
        } else {
            (rows, columns)
        };
        Ok((rows * columns + rows) as u64 + overview)
    }))
}

/// Python's `x // y` of floats, which is not always the floor of the quotient.
fn floor_div(x: f64, y: f64) -> i64 {
    ((x - x % y) / y).round() as i64
}
