//! Image token counts by model family. All numbers come from the model's own files; class defaults of transformers 5.19
//! stand in for absent fields.

mod fields;
mod qwen2_vl;
mod qwen3_vl;
mod smart_resize;

#[cfg(test)]
mod tests;

use serde_json::Value;

use fields::Fields;
use smart_resize::SmartResize;

/// What the balancer needs of one vision model.
#[derive(Clone, Debug, PartialEq)]
pub struct VisionModel {
    image_token: u32,
    /// What a template without media parts gets in front of the text for one image (vLLM's `get_placeholder_str`).
    image_text: &'static str,
    rule: Rule,
}

/// The text of every Qwen family.
const QWEN_IMAGE_TEXT: &str = "<|vision_start|><|image_pad|><|vision_end|>";

/// How a family turns a size into a count.
#[derive(Clone, Debug, PartialEq)]
enum Rule {
    SmartResize(SmartResize),
}

/// Reads one family's rule from its files.
type Build = fn(&Fields<'_>) -> Result<VisionModel, ConfigError>;

/// Families by `model_type` of config.json.
const FAMILIES: [(&str, Build); 6] = [
    ("qwen2_vl", qwen2_vl::model),
    ("qwen2_5_vl", qwen2_vl::model),
    ("qwen3_vl", qwen3_vl::model),
    ("qwen3_vl_moe", qwen3_vl::model),
    ("qwen3_5", qwen3_vl::model_3_5),
    ("qwen3_5_moe", qwen3_vl::model_3_5),
];

/// Why a model's files give no rule.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    #[error("config.json: model_type `{model_type}` has no image rule: its images cannot be predicted")]
    UnknownModelType { model_type: String },
    #[error("{file}: {field} is missing: take the file from the model's publisher")]
    Missing { file: &'static str, field: &'static str },
    #[error("{file}: {field} must be {expected}")]
    Invalid { file: &'static str, field: &'static str, expected: &'static str },
}

/// Why an engine refuses an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("image has no pixels ({width}x{height})")]
    Empty { width: u32, height: u32 },
    #[error("image of {width}x{height} is more than {max} times as long as wide: crop or pad it")]
    AspectRatio { width: u32, height: u32, max: u32 },
    #[error("image of {width}x{height} would fill too many tokens: scale it down")]
    TooManyTokens { width: u32, height: u32 },
}

impl VisionModel {
    /// Reads the rule from `config.json` and `preprocessor_config.json` (or `processor_config.json`, whose
    /// `image_processor` then counts).
    ///
    /// # Errors
    /// When the family is unknown, or a field is of the wrong type or missing without a default.
    pub fn from_config(config: &Value, preprocessor: Option<&Value>) -> Result<Self, ConfigError> {
        let fields = Fields::new(config, preprocessor);
        let model_type = fields.model_type()?;
        let family = FAMILIES.iter().find(|(name, _)| *name == model_type);
        let (_, model) = family.ok_or_else(|| ConfigError::UnknownModelType { model_type: model_type.to_owned() })?;
        model(&fields)
    }

    /// Text that stands for one image when a template takes message content as a string.
    pub fn image_text(&self) -> &'static str {
        self.image_text
    }

    /// Id of the placeholder token that images are expanded from and to.
    pub fn image_token(&self) -> u32 {
        self.image_token
    }

    /// Tokens an image of this upright size fills.
    ///
    /// # Errors
    /// When the engine refuses such an image.
    pub fn image_tokens(&self, width: u32, height: u32) -> Result<u32, Refused> {
        if width == 0 || height == 0 {
            return Err(Refused::Empty { width, height });
        }
        match &self.rule {
            Rule::SmartResize(rule) => rule.tokens(width, height),
        }
    }
}
