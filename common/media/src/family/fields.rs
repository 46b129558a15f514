//! Typed look-up in a model's JSON files, by JSON pointer. JSON null counts as absent, as in Python.

use std::cell::RefCell;
use std::ops::RangeInclusive;

use serde_json::Value;

use super::{ConfigError, ModelFiles};

/// The files of one model.
pub(super) struct Fields<'a> {
    pub config: Section<'a>,
    /// `vision_config` of config.json.
    pub vision: Section<'a>,
    /// The image processor's fields, options on top.
    pub image: Section<'a>,
    /// The image processor's fields in the files alone.
    pub file: Section<'a>,
    /// `mm_processor_kwargs`.
    pub options: Section<'a>,
    /// The processor's own fields, beside the image processor's.
    pub processor: Section<'a>,
}

/// One JSON object, or several of which the first that has a field gives it.
pub(super) struct Section<'a> {
    file: &'static str,
    layers: Vec<&'a Value>,
    /// Fields asked for.
    read: RefCell<Vec<&'static str>>,
}

const CONFIG: &str = "config.json";
const PREPROCESSOR: &str = "preprocessor_config.json";
const OPTIONS: &str = "mm_processor_kwargs";

/// Options whose effect on counts is known, where the family reads them.
const KNOWN_OPTIONS: &[&str] = &[
    "min_pixels",
    "max_pixels",
    "size",
    "max_soft_tokens",
    "do_pan_and_scan",
    "pan_and_scan_min_crop_size",
    "pan_and_scan_max_num_crops",
    "pan_and_scan_min_ratio_to_activate",
    "max_slice_nums",
];

/// Largest number taken from a file: pixel counts stay exact in `f64` and far from overflow.
const NUMBER_MAX: u64 = 1 << 40;
/// Largest side, tile or count taken from a file.
const SIZE_MAX: u64 = 1 << 16;

impl<'a> Fields<'a> {
    pub fn new(files: &ModelFiles<'a>) -> Result<Self, ConfigError> {
        let section = |file, layers: Vec<&'a Value>| Section { file, layers, read: RefCell::new(Vec::new()) };
        let nested = |value: Option<&'a Value>| value.and_then(|value| value.get("image_processor"));
        let file = nested(files.processor).or_else(|| nested(files.preprocessor)).or(files.preprocessor);
        let processor = files.processor.or(files.preprocessor.filter(|value| value.get("image_processor").is_some()));
        if files.kwargs.is_some_and(|options| !options.is_object() && !options.is_null()) {
            return Err(ConfigError::Invalid { file: OPTIONS, field: "/", expected: "an object" });
        }
        Ok(Self {
            config: section(CONFIG, vec![files.config]),
            vision: section(CONFIG, files.config.get("vision_config").into_iter().collect()),
            image: section(PREPROCESSOR, files.kwargs.into_iter().chain(file).collect()),
            file: section(PREPROCESSOR, file.into_iter().collect()),
            options: section(OPTIONS, files.kwargs.into_iter().collect()),
            processor: section("processor_config.json", processor.into_iter().collect()),
        })
    }

    pub fn model_type(&self) -> Result<&'a str, ConfigError> {
        self.config.text("/model_type")?.ok_or(self.config.missing("/model_type"))
    }

    pub fn has_architecture(&self, name: &str) -> bool {
        let list = self.config.find("/architectures").and_then(Value::as_array);
        list.is_some_and(|list| list.iter().any(|value| value == name))
    }

    /// Id of the image token, under the names that configs use.
    pub fn image_token(&self) -> Result<Option<u32>, ConfigError> {
        Ok(self.config.token("/image_token_id")?.or(self.config.token("/image_token_index")?))
    }

    /// An error when an option was given that the family did not ask for.
    pub fn all_options_known(&self) -> Result<(), ConfigError> {
        let read = [self.image.read.borrow(), self.options.read.borrow()];
        let known = |key: &str| {
            let asked = |pointer: &&'static str| pointer[1..].split('/').next() == Some(key);
            KNOWN_OPTIONS.contains(&key) && read.iter().any(|list| list.iter().any(&asked))
        };
        let options = self.options.layers.iter().filter_map(|value| value.as_object());
        let unknown = options.flat_map(|options| options.keys()).find(|key| !known(key));
        unknown.map_or(Ok(()), |key| Err(ConfigError::UnknownOption { key: key.clone() }))
    }
}

impl<'a> Section<'a> {
    pub fn find(&self, pointer: &'static str) -> Option<&'a Value> {
        self.read.borrow_mut().push(pointer);
        self.layers.iter().filter_map(|value| value.pointer(pointer)).find(|value| !value.is_null())
    }

    pub fn missing(&self, field: &'static str) -> ConfigError {
        ConfigError::Missing { file: self.file, field }
    }

    pub fn invalid(&self, field: &'static str, expected: &'static str) -> ConfigError {
        ConfigError::Invalid { file: self.file, field, expected }
    }

    fn whole(&self, field: &'static str, range: RangeInclusive<u64>) -> Result<Option<u64>, ConfigError> {
        match self.find(field) {
            None => Ok(None),
            Some(value) => match value.as_u64() {
                Some(number) if range.contains(&number) => Ok(Some(number)),
                _ => Err(self.invalid(field, "a whole number in range")),
            },
        }
    }

    pub fn token(&self, field: &'static str) -> Result<Option<u32>, ConfigError> {
        let id = self.whole(field, 0..=u32::MAX.into())?;
        Ok(id.and_then(|id| u32::try_from(id).ok()))
    }

    /// A number of pixels or patches.
    pub fn number(&self, field: &'static str) -> Result<Option<u64>, ConfigError> {
        self.whole(field, 1..=NUMBER_MAX)
    }

    /// A side, tile or count; also in the forms `[n, n]` and `{"height": n, "width": n}`.
    pub fn size(&self, field: &'static str) -> Result<Option<u32>, ConfigError> {
        let Some(value) = self.find(field) else { return Ok(None) };
        let pair = match value {
            Value::Array(list) if list.len() == 2 => (&list[0], &list[1]),
            Value::Object(map) => match (map.get("height"), map.get("width")) {
                (Some(height), Some(width)) => (height, width),
                _ => return Err(self.invalid(field, "a whole number in range")),
            },
            single => (single, single),
        };
        match (pair.0.as_u64(), pair.1.as_u64()) {
            (Some(a), Some(b)) if a == b && (1..=SIZE_MAX).contains(&a) => Ok(Some(a as u32)),
            (Some(a), Some(b)) if a != b => Err(self.invalid(field, "the same both ways")),
            _ => Err(self.invalid(field, "a whole number in range")),
        }
    }

    pub fn ratio(&self, field: &'static str) -> Result<Option<f64>, ConfigError> {
        match self.find(field).map(Value::as_f64) {
            None => Ok(None),
            Some(Some(ratio)) if ratio > 0.0 && ratio < SIZE_MAX as f64 => Ok(Some(ratio)),
            Some(_) => Err(self.invalid(field, "a positive number")),
        }
    }

    pub fn flag(&self, field: &'static str) -> Result<Option<bool>, ConfigError> {
        match self.find(field) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(*flag)),
            Some(_) => Err(self.invalid(field, "true or false")),
        }
    }

    /// Fails unless the field is `wanted` or absent: rules for anything else are not known.
    pub fn expect_flag(&self, field: &'static str, wanted: bool) -> Result<(), ConfigError> {
        if self.flag(field)?.is_none_or(|flag| flag == wanted) {
            return Ok(());
        }
        Err(self.invalid(field, if wanted { "true or absent" } else { "false or absent" }))
    }

    pub fn text(&self, field: &'static str) -> Result<Option<&'a str>, ConfigError> {
        match self.find(field) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(_) => Err(self.invalid(field, "a string")),
        }
    }
}

/// The number that two places give; they must not differ.
pub(super) fn agreed<T: PartialEq>(
    (field, a): (&'static str, Option<T>),
    (other, b): (&'static str, Option<T>),
) -> Result<Option<T>, ConfigError> {
    match (a, b) {
        (Some(a), Some(b)) if a != b => Err(ConfigError::Conflict { field, other }),
        (a, b) => Ok(a.or(b)),
    }
}
