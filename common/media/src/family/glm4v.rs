//! GLM-4.1V, 4.5V and 4.6V: an image counts as a volume of two frames (transformers 5.19 `Glm4vImageProcessor`; vLLM 0.32
//! `glm4_1v.py`).

use super::fields::Fields;
use super::smart_resize::{Defaults, SmartResize};
use super::words::Words;
use super::{ConfigError, Family};

pub(super) const IMAGE_TEXT: &str = "<|begin_of_image|><|image|><|end_of_image|>";

pub(super) fn model(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    let defaults = Defaults { patch: 14, pixels_min: 112 * 112, pixels_max: 28 * 28 * 2 * 6144, ignore_size: false };
    let frames = f64::from(fields.image.size("/temporal_patch_size")?.unwrap_or(2));
    let rule = SmartResize::from_fields(fields, defaults)?.of_volume(frames, frames);
    let image = words.own(fields.image_token()?, "<|image|>");
    Ok(Family::pads(image, IMAGE_TEXT, move |size| rule.tokens(size)))
}
