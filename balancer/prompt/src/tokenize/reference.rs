//! The tokenizer that engines use by default: slower, and the measure of the fast one.

use super::Tokenize;
use crate::error::EncodeError;

/// Tokenizer of the crate `tokenizers`.
pub struct Reference(tokenizers::Tokenizer);

impl Reference {
    /// From the text of a `tokenizer.json`; the error says what it cannot do.
    pub fn new(json: &str) -> Result<Self, String> {
        let mut tokenizer: tokenizers::Tokenizer =
            json.parse().map_err(|error: tokenizers::Error| error.to_string())?;
        // As for the fast one: engines set both by the request.
        tokenizer.with_padding(None).with_truncation(None).map_err(|error| error.to_string())?;
        Ok(Self(tokenizer))
    }
}

impl Tokenize for Reference {
    fn encode(&self, text: &str, add_special_tokens: bool, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        let encoding = self.0.encode_fast(text, add_special_tokens);
        let encoding = encoding.map_err(|error| EncodeError { tokenizer: self.name(), message: error.to_string() })?;
        out.extend_from_slice(encoding.get_ids());
        Ok(())
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.0.token_to_id(token)
    }

    fn name(&self) -> &'static str {
        "tokenizers"
    }
}
