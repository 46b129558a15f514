//! fastokens: the ids of `tokenizers` for a hundredth of the time.
//!
//! Long texts are split over a thread pool that it keeps for the process, as wide as the machine; the environment variable
//! `FASTOKENS_BPE_THREADS=1` turns that off.

use std::panic::{AssertUnwindSafe, catch_unwind};

use serde_json::Value;

use super::Tokenize;
use crate::error::EncodeError;

/// Tokenizer of the crate `fastokens`.
pub struct Fast(fastokens::Tokenizer);

impl Fast {
    /// From a `tokenizer.json`; the error says what it cannot do. Truncation and padding of the file do not count:
    /// engines set both by the request.
    pub fn new(json: Value, cache_bytes: usize) -> Result<Self, String> {
        let mut tokenizer = fastokens::Tokenizer::from_json(json).map_err(|error| error.to_string())?;
        tokenizer.set_truncation(None);
        tokenizer.set_padding(None);
        tokenizer.enable_segment_cache(cache_bytes);
        Ok(Self(tokenizer))
    }
}

impl Tokenize for Fast {
    fn encode(&self, text: &str, add_special_tokens: bool, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        let fault = |message: String| EncodeError { tokenizer: self.name(), message };
        // A fault in there, met by a client's text, must cost that request and not the caller's thread.
        let ids = catch_unwind(AssertUnwindSafe(|| self.0.encode_with_special_tokens(text, add_special_tokens)));
        let ids = ids.map_err(|_| fault("it panicked".to_owned()))?;
        out.extend(ids.map_err(|error| fault(error.to_string()))?);
        Ok(())
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        self.0.token_to_id(token)
    }

    fn name(&self) -> &'static str {
        "fastokens"
    }
}
