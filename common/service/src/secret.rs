//! Texts that are never shown, and where keys come from.

use std::fmt;
use std::ops::Deref;
use std::path::Path;

use serde::Deserialize;

use crate::config::{KeyError, read_key};

/// Environment variable with the shared key, where the config names neither key nor file.
pub const SHARED_KEY_ENV: &str = "FOVEA_SHARED_KEY";

/// A text whose `Debug` tells only whether there is one.
#[derive(Clone, Default, PartialEq, Eq, Deserialize)]
#[serde(transparent)]
pub struct Secret(String);

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "none" } else { "(secret)" })
    }
}

impl Deref for Secret {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl From<&str> for Secret {
    fn from(text: &str) -> Self {
        Self(text.to_owned())
    }
}

/// The shared key: of the file, else of the config's text, else of the environment.
///
/// # Errors
/// As [`read_key`].
pub fn shared_key(text: &Secret, file: Option<&Path>) -> Result<Option<Vec<u8>>, KeyError> {
    shared_key_or(text, file, std::env::var(SHARED_KEY_ENV).ok())
}

fn shared_key_or(text: &Secret, file: Option<&Path>, env: Option<String>) -> Result<Option<Vec<u8>>, KeyError> {
    let key = read_key("trust.shared_key_file", text, file)?;
    let of_env = env.map(|key| key.trim().as_bytes().to_vec()).filter(|key| !key.is_empty());
    Ok(key.or(of_env))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_not_shown() {
        assert_eq!(format!("{:?} {:?}", Secret::from("hunter2"), Secret::default()), "(secret) none");
    }

    #[test]
    fn the_file_wins_over_the_text_and_that_over_the_environment() {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(&file, " of file\n").unwrap();
        let env = || Some("of env\n".to_owned());
        let key = |text: &str, file, env| {
            shared_key_or(&Secret::from(text), file, env).unwrap().map(|key| String::from_utf8(key).unwrap())
        };
        assert_eq!(key("of text", Some(file.path()), env()).as_deref(), Some("of file"));
        assert_eq!(key("of text", None, env()).as_deref(), Some("of text"));
        assert_eq!(key("", None, env()).as_deref(), Some("of env"));
        assert_eq!(key("", None, Some(" ".to_owned())), None);
    }
}
