//! Config files: YAML, read and checked once, before any port is bound.
//!
//! Wraps the YAML crate whole: no type of it is public. Config types carry `#[serde(deny_unknown_fields, default)]`, so that a
//! typo is an error with its place.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

pub use bytesize::ByteSize;
use serde::de::DeserializeOwned;

/// Longest config file that is read, in bytes.
pub const FILE_BYTES_MAX: u64 = 1 << 20;

/// A config type that can tell whether its values make sense together.
pub trait Validate {
    /// # Errors
    /// The first field that cannot work, with what to write instead.
    fn validate(&self) -> Result<(), Invalid>;
}

/// A value of the right type that cannot work.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem}; {remedy}")]
pub struct Invalid {
    /// Path of the field in the file, e.g. `engine.stale_after`.
    pub field: String,
    pub problem: String,
    /// What to write instead.
    pub remedy: String,
}

impl Invalid {
    pub fn new(field: impl Into<String>, problem: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { field: field.into(), problem: problem.into(), remedy: remedy.into() }
    }

    /// The same under an outer field, for a `validate` that calls those of its parts.
    #[must_use]
    pub fn within(mut self, outer: &str) -> Self {
        self.field = format!("{outer}.{}", self.field);
        self
    }
}

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("{}: cannot read the config file", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{}: the config file is longer than {FILE_BYTES_MAX} bytes; give the path of a config file", path.display())]
    TooLong { path: PathBuf },
    /// Not YAML, an unknown or missing field, or a value of the wrong type.
    #[error("{}:{line}:{column}: {message}", path.display())]
    Parse { path: PathBuf, line: u64, column: u64, message: String },
    #[error("{}: {invalid}", path.display())]
    Invalid { path: PathBuf, invalid: Invalid },
}

/// Reads, parses and checks a config file. An empty file is an empty mapping.
///
/// # Errors
/// When the file cannot be read, is not what `T` takes, or does not pass `T::validate`.
pub fn load<T: DeserializeOwned + Validate>(path: impl AsRef<Path>) -> Result<T, ConfigError> {
    let path = path.as_ref();
    let read = |source| ConfigError::Read { path: path.to_owned(), source };
    let mut text = String::new();
    File::open(path).map_err(read)?.take(FILE_BYTES_MAX + 1).read_to_string(&mut text).map_err(read)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(ConfigError::TooLong { path: path.to_owned() });
    }
    parse(&text, path)
}

/// Parses and checks config text; `path` is for the errors only.
///
/// # Errors
/// When the text is not what `T` takes or does not pass `T::validate`.
pub fn parse<T: DeserializeOwned + Validate>(text: &str, path: impl AsRef<Path>) -> Result<T, ConfigError> {
    let path = path.as_ref();
    let says_nothing = text.lines().all(|line| matches!(line.trim_start().chars().next(), None | Some('#')));
    let value: T = serde_saphyr::from_str(if says_nothing { "{}" } else { text }).map_err(|error| {
        let (line, column) = error.location().map_or((0, 0), |place| (place.line(), place.column()));
        let text = error.without_snippet().to_string();
        let message = text.strip_suffix(&format!(" at line {line}, column {column}")).unwrap_or(&text).to_owned();
        ConfigError::Parse { path: path.to_owned(), line, column, message }
    })?;
    value.validate().map_err(|invalid| ConfigError::Invalid { path: path.to_owned(), invalid })?;
    Ok(value)
}

/// A `Duration` with its unit, for `#[serde(with = "human_duration")]`: `250ms`, `1m 30s`.
pub mod human_duration {
    use std::time::Duration;

    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    /// # Errors
    /// When the text is not a duration with a unit.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
        let text = String::deserialize(deserializer)?;
        humantime::parse_duration(&text).map_err(|error| {
            D::Error::custom(format_args!("`{text}` is not a duration such as `250ms` or `10s`: {error}"))
        })
    }

    /// # Errors
    /// Only the serializer's own.
    pub fn serialize<S: Serializer>(value: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(&humantime::format_duration(*value))
    }
}

/// A key that a config gives as text or as a file; the file wins. White space around it is cut; `None` without either.
///
/// # Errors
/// The file cannot be read, or is empty. `field` names it in the text.
pub fn read_key(field: &'static str, text: &str, file: Option<&Path>) -> Result<Option<Vec<u8>>, KeyError> {
    let Some(path) = file else {
        return Ok(Some(text.trim().as_bytes().to_vec()).filter(|key| !key.is_empty()));
    };
    let text =
        std::fs::read_to_string(path).map_err(|source| KeyError::Read { field, path: path.to_owned(), source })?;
    match text.trim() {
        "" => Err(KeyError::Empty { field, path: path.to_owned() }),
        key => Ok(Some(key.as_bytes().to_vec())),
    }
}

#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error("{field}: cannot read {}", path.display())]
    Read {
        field: &'static str,
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{field}: {} is empty: write the key into it", path.display())]
    Empty { field: &'static str, path: PathBuf },
}

#[cfg(test)]
mod tests;
