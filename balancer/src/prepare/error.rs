//! Why a request cannot be prepared (always the client's fault; anything else ends the view instead), and why a model cannot be loaded.

use std::path::{Path, PathBuf};

/// A body that no engine would take.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    #[error("body is not valid UTF-8 at byte {offset}: send JSON encoded as UTF-8")]
    NotUtf8 { offset: usize },
    #[error(transparent)]
    BadRequest(#[from] fovea_openai::ParseError),
}

impl PrepareError {
    /// HTTP status of the answer.
    pub fn status(&self) -> u16 {
        400
    }
}

/// A model directory that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("cannot read {}: give the folder of the model's own files", path.display())]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{} is not JSON", path.display())]
    Json {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("cannot load the model's tokenizer or template")]
    Prompt(#[from] fovea_prompt::LoadError),
}

pub(super) fn read_json(path: &Path) -> Result<serde_json::Value, LoadError> {
    let text = std::fs::read(path).map_err(|source| LoadError::Read { path: path.to_owned(), source })?;
    serde_json::from_slice(&text).map_err(|source| LoadError::Json { path: path.to_owned(), source })
}
