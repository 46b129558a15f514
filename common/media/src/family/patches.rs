//! Sizes and patches of an image in the Qwen families, for those who make the pixels as well as count them.

use super::fields::Fields;
use super::shape::Size;
use super::smart_resize::{MERGE, SmartResize};
use super::{ConfigError, ModelFiles, Refused, qwen2_vl, qwen3_vl};

/// How a Qwen image processor resizes an image and cuts it into patches. Its token count is that of the family's
/// [`super::VisionModel`]: both ask the same rule.
#[derive(Clone, Debug, PartialEq)]
pub struct PatchRule {
    rule: SmartResize,
    patch: u32,
    merge: u32,
}

impl PatchRule {
    /// Reads the rule from a model's files.
    ///
    /// # Errors
    /// When the model is of no Qwen family, or a field is of the wrong type or missing without a default.
    pub fn from_files(files: &ModelFiles<'_>) -> Result<Self, ConfigError> {
        let fields = Fields::new(files)?;
        let patch = match fields.model_type()? {
            "qwen2_vl" | "qwen2_5_vl" => qwen2_vl::PATCH,
            "qwen3_vl" | "qwen3_vl_moe" | "qwen3_5" | "qwen3_5_moe" => qwen3_vl::PATCH,
            other => return Err(ConfigError::UnknownModelType { model_type: other.to_owned() }),
        };
        let rule = qwen2_vl::rule(&fields, patch)?;
        let patch = fields.image.size("/patch_size")?.unwrap_or(patch);
        let merge = fields.image.size("/merge_size")?.unwrap_or(MERGE);
        fields.all_options_known()?;
        Ok(Self { rule, patch, merge })
    }

    /// Side of a patch, in pixels.
    pub fn patch(&self) -> u32 {
        self.patch
    }

    /// Patches merged into one token, along each side.
    pub fn merge(&self) -> u32 {
        self.merge
    }

    /// Columns and rows of tokens of an image of this upright size.
    ///
    /// # Errors
    /// When the engine refuses such an image.
    pub fn cells(&self, width: u32, height: u32) -> Result<(u32, u32), Refused> {
        if width == 0 || height == 0 {
            return Err(Refused::Empty { width, height });
        }
        let (columns, rows) = self.rule.cells(Size { width, height })?;
        // A side of a resized image stays within u32 pixels.
        let side_max = f64::from(u32::MAX / (self.patch * self.merge).max(1));
        if columns > side_max || rows > side_max {
            return Err(Refused::TooManyTokens { width, height });
        }
        Ok((columns as u32, rows as u32))
    }
}
