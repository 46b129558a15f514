//! Tokenizers behind one trait: the fast one first, the reference where the fast one cannot load a file.

mod fast;
mod reference;

use std::path::Path;

pub use fast::Fast;
pub use reference::Reference;

use crate::error::{EncodeError, LoadError};
use crate::files;

/// Text to token ids, as the engine's tokenizer gives them.
pub trait Tokenize: Send + Sync {
    /// Appends the ids of `text`; `add_special_tokens` lets the tokenizer add its own, such as a leading `<s>`.
    fn encode(&self, text: &str, add_special_tokens: bool, out: &mut Vec<u32>) -> Result<(), EncodeError>;
    fn token_to_id(&self, token: &str) -> Option<u32>;
    /// Fixed name, fit for a metric label.
    fn name(&self) -> &'static str;
}

/// Loads a `tokenizer.json`.
pub fn load(path: &Path, cache_bytes: usize) -> Result<Box<dyn Tokenize>, LoadError> {
    let missing = || LoadError::Read { path: path.to_owned(), source: std::io::ErrorKind::NotFound.into() };
    let text = files::read(path)?.ok_or_else(missing)?;
    let json = serde_json::from_str(&text).map_err(|source| LoadError::Json { path: path.to_owned(), source })?;
    let fast = match Fast::new(json, cache_bytes) {
        Ok(tokenizer) => return Ok(Box::new(tokenizer)),
        Err(error) => error,
    };
    match Reference::new(&text) {
        Ok(tokenizer) => Ok(Box::new(tokenizer)),
        Err(reference) => Err(LoadError::Tokenizer { path: path.to_owned(), fast, reference }),
    }
}
