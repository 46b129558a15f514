//! Typed look-up in a model's JSON files, by JSON pointer. JSON null counts as absent, as in Python.

use std::ops::RangeInclusive;

use serde_json::Value;

use super::ConfigError;

/// The two files of one model.
pub(super) struct Fields<'a> {
    config: &'a Value,
    preprocessor: Option<&'a Value>,
}

impl<'a> Fields<'a> {
    pub(super) fn new(config: &'a Value, preprocessor: Option<&'a Value>) -> Self {
        let preprocessor = preprocessor.map(|value| value.get("image_processor").unwrap_or(value));
        Self { config, preprocessor }
    }

    pub(super) fn model_type(&self) -> Result<&'a str, ConfigError> {
        match self.config.get("model_type") {
            Some(Value::String(name)) => Ok(name),
            Some(_) => Err(ConfigError::Invalid { file: CONFIG, field: "model_type", expected: "a string" }),
            None => Err(ConfigError::Missing { file: CONFIG, field: "model_type" }),
        }
    }

    /// Token id at `field` of config.json.
    pub(super) fn token(&self, field: &'static str) -> Result<Option<u32>, ConfigError> {
        let id = number(self.config.pointer(field), CONFIG, field, 0..=u32::MAX.into())?;
        Ok(id.and_then(|id| u32::try_from(id).ok()))
    }

    /// Positive number at `field` of the preprocessor file.
    pub(super) fn preprocessor(&self, field: &'static str) -> Result<Option<u64>, ConfigError> {
        number(self.preprocessor.and_then(|value| value.pointer(field)), PREPROCESSOR, field, 1..=NUMBER_MAX)
    }

    /// Whether the preprocessor file has a value at `pointer`.
    pub(super) fn has(&self, pointer: &str) -> bool {
        self.preprocessor.and_then(|value| value.pointer(pointer)).is_some_and(|value| !value.is_null())
    }

    /// Whether the preprocessor file switches something off.
    pub(super) fn is_off(&self, pointer: &str) -> bool {
        self.preprocessor.and_then(|value| value.pointer(pointer)) == Some(&Value::Bool(false))
    }
}

const CONFIG: &str = "config.json";
pub(super) const PREPROCESSOR: &str = "preprocessor_config.json";

/// Largest number taken from a file: pixel counts stay exact in `f64` and far from overflow.
const NUMBER_MAX: u64 = 1 << 40;

fn number(
    value: Option<&Value>,
    file: &'static str,
    field: &'static str,
    range: RangeInclusive<u64>,
) -> Result<Option<u64>, ConfigError> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(value) => match value.as_u64() {
            Some(number) if range.contains(&number) => Ok(Some(number)),
            _ => Err(ConfigError::Invalid { file, field, expected: "a whole number in range" }),
        },
    }
}
