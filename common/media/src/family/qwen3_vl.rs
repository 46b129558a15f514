//! Qwen3-VL, dense and mixture of experts, and Qwen3.5: 16-pixel patches, merged 2 × 2 (transformers 5.19 and vLLM 0.32: as
//! Qwen2-VL).

use super::fields::Fields;
use super::words::Words;
use super::{ConfigError, Family, qwen2_vl};

/// Of the vision tower; the processor class itself, shared with Qwen2-VL, says 14, with which no engine would start.
pub(super) const PATCH: u32 = 16;

pub(super) fn model(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    qwen2_vl::with_patch(fields, words, PATCH)
}
