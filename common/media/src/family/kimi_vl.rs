//! Kimi-VL: scaled down to a budget of patches, padded up to whole features (vLLM 0.32 `kimi_vl.py`).

use super::fields::Fields;
use super::words::Words;
use super::{ConfigError, Family};

pub(super) fn model(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    let image = &fields.image;
    let patch = f64::from(image.size("/patch_size")?.unwrap_or(14));
    let feature = patch * f64::from(image.size("/merge_kernel_size")?.unwrap_or(2));
    let limit = f64::from(image.size("/in_token_limit")?.unwrap_or(4096));
    let id = fields.config.token("/media_placeholder_token_id")?.or(fields.image_token()?);
    let pad = words.own(id, "<|media_pad|>");
    let text = "<|media_start|>image<|media_content|><|media_pad|><|media_end|>";
    Ok(Family::pads(pad, text, move |size| {
        let (mut w, mut h) = (size.w(), size.h());
        let patches = (w / patch).floor() * (h / patch).floor();
        if patches > limit {
            let scale = (limit / patches).sqrt();
            (w, h) = ((w * scale).trunc(), (h * scale).trunc());
        }
        Ok(((w / feature).ceil() * (h / feature).ceil()) as u64)
    }))
}
