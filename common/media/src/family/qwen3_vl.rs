//! Qwen3-VL, dense and mixture of experts, and Qwen3.5: 16-pixel patches, merged 2 × 2.

use super::fields::Fields;
use super::smart_resize::SmartResize;
use super::{ConfigError, QWEN_IMAGE_TEXT, Rule, VisionModel};

/// Of the vision tower; the processor class itself, shared with Qwen2-VL, says 14, with which no engine would start.
const PATCH: u64 = 16;
const IMAGE_TOKEN: u32 = 151_655;
const IMAGE_TOKEN_3_5: u32 = 248_056;

pub(super) fn model(fields: &Fields<'_>) -> Result<VisionModel, ConfigError> {
    with_token(fields, IMAGE_TOKEN)
}

pub(super) fn model_3_5(fields: &Fields<'_>) -> Result<VisionModel, ConfigError> {
    with_token(fields, IMAGE_TOKEN_3_5)
}

fn with_token(fields: &Fields<'_>, default: u32) -> Result<VisionModel, ConfigError> {
    let image_token = fields.token("/image_token_id")?.unwrap_or(default);
    let rule = Rule::SmartResize(SmartResize::from_fields(fields, PATCH)?);
    Ok(VisionModel { image_token, image_text: QWEN_IMAGE_TEXT, rule })
}
