//! LLaVA-NeXT (1.6): an overview plus the image on the best of a few canvases, a line-break feature after each row
//! (transformers 5.19 `LlavaNextProcessor`; vLLM 0.32 `llava_next.py`).

use super::fields::Fields;
use super::llava::{CLIP, IMAGE_TEXT, Tower};
use super::pins::Pins;
use super::words::Words;
use super::{ConfigError, Family};

pub(super) fn model(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    let tower = Tower::from_fields(fields, CLIP, 336)?;
    let overview = tower.features(fields, "default")?;
    let pins = Pins::from_fields(fields, || vec![(336, 672), (672, 336), (672, 672), (1008, 336), (336, 1008)])?;
    let image = words.own(fields.image_token()?, "<image>");
    Ok(Family::pads(image, IMAGE_TEXT, move |size| {
        let (rows, columns) = pins.unpadded(size, tower.side, tower.grid);
        Ok((rows * columns + rows) as u64 + overview)
    }))
}
