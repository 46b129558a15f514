//! Qwen2-VL and Qwen2.5-VL: 14-pixel patches, merged 2 × 2.

use super::fields::Fields;
use super::smart_resize::SmartResize;
use super::{ConfigError, QWEN_IMAGE_TEXT, Rule, VisionModel};

const PATCH: u64 = 14;
const IMAGE_TOKEN: u32 = 151_655;

pub(super) fn model(fields: &Fields<'_>) -> Result<VisionModel, ConfigError> {
    let image_token = fields.token("/image_token_id")?.unwrap_or(IMAGE_TOKEN);
    let rule = Rule::SmartResize(SmartResize::from_fields(fields, PATCH)?);
    Ok(VisionModel { image_token, image_text: QWEN_IMAGE_TEXT, rule })
}
