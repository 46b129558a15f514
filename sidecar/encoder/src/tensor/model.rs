//! What an engine's model takes for an image, from its config.json.

use serde_json::Value;

use super::{DType, Expect};

/// Largest hidden size, level count or merge size taken from a file.
const NUMBER_MAX: u64 = 1 << 20;

/// Families with patch grids (transformers 5.19), and their deepstack levels when config.json names none: the class default of
/// Qwen3-VL's vision tower taps three blocks.
const GRID_FAMILIES: &[(&str, u32)] =
    &[("qwen2_vl", 0), ("qwen2_5_vl", 0), ("qwen3_vl", 3), ("qwen3_vl_moe", 3), ("qwen3_5", 0), ("qwen3_5_moe", 0)];

/// Shape of the embeddings that one model takes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineTensor {
    /// `model_type` of config.json.
    pub model_type: String,
    /// Width of the text model.
    pub hidden: u32,
    /// Deepstack levels behind the main columns.
    pub levels: u32,
    /// Patches merged into one row, along each side; `None` for families without a grid.
    pub merge: Option<u32>,
    /// The model has a vision tower of its own, so that its engine takes image parts.
    pub vision: bool,
    /// Type of the model's weights, when config.json names it.
    pub dtype: Option<DType>,
}

/// Why config.json does not tell the shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ModelConfigError {
    #[error("config.json is no JSON object: take the file from the model's publisher")]
    NoObject,
    #[error("config.json: {field} is missing: take the file from the model's publisher")]
    Missing { field: &'static str },
    #[error("config.json: {field} must be {expected}")]
    Invalid { field: &'static str, expected: &'static str },
    #[error("config.json: {field} is {found} but {other} is {wanted}: the vision tower does not fit the text model")]
    Conflict { field: &'static str, found: u32, other: &'static str, wanted: u32 },
}

impl EngineTensor {
    /// Reads the text of a config.json.
    ///
    /// # Errors
    /// When the hidden size is missing or a field has a wrong type.
    pub fn from_config(text: &str) -> Result<Self, ModelConfigError> {
        let config: Value = serde_json::from_str(text).map_err(|_| ModelConfigError::NoObject)?;
        if !config.is_object() {
            return Err(ModelConfigError::NoObject);
        }
        let model_type = config.get("model_type").and_then(Value::as_str).unwrap_or_default().to_owned();
        let family = GRID_FAMILIES.iter().find(|(name, _)| *name == model_type);
        let hidden = number(&config, "/text_config/hidden_size")?;
        let hidden = hidden.map_or_else(|| number(&config, "/hidden_size"), |found| Ok(Some(found)))?;
        let hidden = hidden.ok_or(ModelConfigError::Missing { field: "/text_config/hidden_size" })?;
        let vision = config.get("vision_config").is_some_and(Value::is_object);
        let levels = match config.pointer("/vision_config/deepstack_visual_indexes") {
            None | Some(Value::Null) => family.map_or(0, |&(_, levels)| levels),
            Some(Value::Array(blocks)) if blocks.len() <= 64 => blocks.len() as u32,
            Some(_) => {
                let field = "/vision_config/deepstack_visual_indexes";
                return Err(ModelConfigError::Invalid { field, expected: "a list of at most 64 block numbers" });
            }
        };
        if let Some(found) = number(&config, OUT_HIDDEN)?.filter(|&found| family.is_some() && found != hidden) {
            let other = "/text_config/hidden_size";
            return Err(ModelConfigError::Conflict { field: OUT_HIDDEN, found, other, wanted: hidden });
        }
        let merge = number(&config, "/vision_config/spatial_merge_size")?;
        let merge = family.map(|_| merge.unwrap_or(2));
        Ok(Self { model_type, hidden, levels, merge, vision, dtype: dtype(&config) })
    }

    /// Columns of an image's embedding: `[main | level 0 | level 1 | …]`.
    pub fn width(&self) -> u32 {
        self.hidden.saturating_mul(1 + self.levels)
    }

    /// What an image's embedding must be; `rows` = tokens that the balancer counted.
    pub fn expect(&self, rows: Option<u32>) -> Expect {
        Expect { width: self.width(), rows, merge: self.merge, dtype: None }
    }
}

const OUT_HIDDEN: &str = "/vision_config/out_hidden_size";

fn number(config: &Value, field: &'static str) -> Result<Option<u32>, ModelConfigError> {
    match config.pointer(field) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_u64() {
            Some(found) if (1..=NUMBER_MAX).contains(&found) => Ok(Some(found as u32)),
            _ => Err(ModelConfigError::Invalid { field, expected: "a whole number from 1 to 1048576" }),
        },
    }
}

fn dtype(config: &Value) -> Option<DType> {
    let places = ["/dtype", "/torch_dtype", "/text_config/dtype", "/text_config/torch_dtype"];
    places.iter().find_map(|place| config.pointer(place)?.as_str()).and_then(DType::from_name)
}
