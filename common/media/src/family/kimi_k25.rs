//! Kimi-K2.5: scaled down to a budget of patches, padded up to whole features (transformers 5.19 `Kimi_K25ImageProcessor`; vLLM
//! 0.32 `kimi_k25.py`, `navit_resize_image` of `kimi_k25_vision_fused.py`).

use super::fields::Fields;
use super::shape::Size;
use super::words::Words;
use super::{ConfigError, Family};

#[derive(Clone, Debug)]
struct Limits {
    /// In pixels.
    patch: f64,
    /// Patches per feature along each side.
    merge: f64,
    /// Patches per image, and along one side.
    patches: f64,
    patches_per_side: f64,
    /// Every image has so many features.
    fixed: Option<u64>,
}

pub(super) fn model(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    let limits = Limits::from_fields(fields)?;
    let id = fields.image_token()?.or(fields.config.token("/media_placeholder_token_id")?);
    // vLLM trusts the tokenizer more than the config.
    let pad = words.token_or("<|media_pad|>", id);
    let text = "<|media_begin|>image<|media_content|><|media_pad|><|media_end|>";
    Ok(Family::pads(pad, text, move |size| Ok(limits.tokens(size))))
}

impl Limits {
    /// The published files nest the numbers under other names than transformers' own class.
    fn from_fields(fields: &Fields<'_>) -> Result<Self, ConfigError> {
        let image = &fields.image;
        let nested = image.find("/media_proc_cfg").is_some();
        let read = |published, ours, default: u32| {
            let found = if nested { image.size(published)? } else { image.size(ours)?.or(Some(default)) };
            found.map(f64::from).ok_or(image.missing(published))
        };
        if !nested && image.size("/size/max_height")? != image.size("/size/max_width")? {
            return Err(image.invalid("/size/max_width", "the same as max_height"));
        }
        Ok(Self {
            patch: read("/media_proc_cfg/patch_size", "/patch_size", 14)?,
            merge: read("/media_proc_cfg/merge_kernel_size", "/merge_size", 2)?,
            patches: read("/media_proc_cfg/in_patch_limit", "/max_patches", 16_384)?,
            patches_per_side: read("/media_proc_cfg/patch_limit_on_one_side", "/size/max_height", 512)?,
            fixed: image.number("/media_proc_cfg/fixed_output_tokens")?,
        })
    }

    fn tokens(&self, size: Size) -> u64 {
        if let Some(fixed) = self.fixed {
            return fixed;
        }
        let (w, h) = (size.w(), size.h());
        let patches = (w / self.patch).floor().max(1.0) * (h / self.patch).floor().max(1.0);
        let side = self.patches_per_side * self.patch;
        let scale = (self.patches / patches).sqrt().min(side / w).min(side / h).min(1.0);
        let features = |pixels: f64| ((pixels * scale).trunc().max(1.0).min(side) / (self.merge * self.patch)).ceil();
        (features(w) * features(h)) as u64
    }
}
