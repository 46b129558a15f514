//! Qwen2-VL and Qwen2.5-VL: 14-pixel patches, merged 2 × 2 (transformers 5.19 `Qwen2VLImageProcessor`; vLLM 0.32 `qwen2_vl.py`).

use super::fields::Fields;
use super::smart_resize::{Defaults, SmartResize};
use super::words::Words;
use super::{ConfigError, Family};

pub(super) const PATCH: u32 = 14;

pub(super) fn model(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    with_patch(fields, words, PATCH)
}

/// Every Qwen family; `patch` in pixels, for a file that sets none.
pub(super) fn with_patch(fields: &Fields<'_>, words: &mut Words, patch: u32) -> Result<Family, ConfigError> {
    let rule = rule(fields, patch)?;
    let pad = words.own(fields.image_token()?, "<|image_pad|>");
    Ok(Family::pads(pad, "<|vision_start|><|image_pad|><|vision_end|>", move |size| rule.tokens(size)))
}

/// How their image processor sizes an image; `patch` as above.
pub(super) fn rule(fields: &Fields<'_>, patch: u32) -> Result<SmartResize, ConfigError> {
    let defaults = Defaults { patch, pixels_min: 56 * 56, pixels_max: 28 * 28 * 1280, ignore_size: false };
    SmartResize::from_fields(fields, defaults)
}
