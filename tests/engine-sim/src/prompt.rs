//! From a request to the prompt tokens that the engine computes.
//!
//! Mirrors vLLM 0.32: message normalisation (`renderers/chat_utils`), chat template, tokenizer, placeholder expansion.

mod media;
mod message;
mod template;

use crate::blocks::MediaSpan;
use crate::image::Resize;
pub use media::{Attachment, MediaCache, Resolved, decode_data_url};
use serde_json::{Map, Value};
use std::path::Path;
use template::Template;
use tokenizers::Tokenizer;

/// A model directory, loaded.
pub struct Model {
    /// `model_type` of config.json.
    pub model_type: String,
    /// `architectures` of config.json.
    pub architectures: Vec<String>,
    template: Template,
    tokenizer: Tokenizer,
    image_pad: u32,
    resize: Resize,
    /// Tokens used for made-up text, with their text: plain ASCII words, so that any run of them is valid UTF-8.
    words: Vec<(u32, String)>,
}

/// Why a model directory cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// A file is missing or unreadable.
    #[error("{file}: cannot read")]
    Read { file: String, source: std::io::Error },
    /// A file is not JSON.
    #[error("{file}: not JSON")]
    Json { file: String, source: serde_json::Error },
    /// A file lacks a field.
    #[error("{file}: field {field} is missing")]
    Field { file: &'static str, field: &'static str },
    /// The tokenizer is refused.
    #[error("tokenizer.json: {0}")]
    Tokenizer(String),
    /// The template is refused.
    #[error("chat template: {0}")]
    Template(String),
}

/// Why a request gets no prompt. Text as vLLM words it, where known.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum PromptError {
    /// The client's fault; answered with 400.
    #[error("{message}")]
    Bad { message: String, param: Option<&'static str> },
    /// A picture cannot be fetched; answered with 422.
    #[error("{message}")]
    Unprocessable { message: String, param: Option<&'static str> },
}

impl PromptError {
    pub(crate) fn bad(message: impl Into<String>) -> Self {
        Self::Bad { message: message.into(), param: None }
    }
}

/// A prompt, placeholders expanded.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prompt {
    /// Token ids.
    pub tokens: Vec<u32>,
    /// Where each image's tokens lie, in order.
    pub media: Vec<MediaSpan>,
}

fn read_json(dir: &Path, file: &str) -> Result<Value, LoadError> {
    let text = std::fs::read(dir.join(file)).map_err(|source| LoadError::Read { file: file.to_owned(), source })?;
    serde_json::from_slice(&text).map_err(|source| LoadError::Json { file: file.to_owned(), source })
}

impl Model {
    /// Loads a model directory.
    ///
    /// # Errors
    /// Names the file at fault.
    pub fn load(dir: &Path) -> Result<Self, LoadError> {
        let config = read_json(dir, "config.json")?;
        let image_pad = config["image_token_id"].as_u64().and_then(|id| u32::try_from(id).ok());
        let image_pad = image_pad.ok_or(LoadError::Field { file: "config.json", field: "image_token_id" })?;
        let tokenizer = Tokenizer::from_file(dir.join("tokenizer.json"))
            .map_err(|error| LoadError::Tokenizer(error.to_string()))?;
        let words = words(&tokenizer);
        if words.is_empty() {
            return Err(LoadError::Tokenizer("no token is a plain word".to_owned()));
        }
        let template = template::find(dir)?;
        let resize = resize(&read_json(dir, "preprocessor_config.json")?)?;
        let model_type = config["model_type"].as_str().unwrap_or_default().to_owned();
        let architectures = config["architectures"].as_array().into_iter().flatten();
        let architectures = architectures.filter_map(|name| name.as_str().map(str::to_owned)).collect();
        let template = Template::new(template)?;
        Ok(Self { model_type, architectures, template, tokenizer, image_pad, resize, words })
    }

    /// Placeholder tokens of a picture of this size.
    pub fn image_tokens(&self, width: u32, height: u32) -> Option<usize> {
        self.resize.tokens(width, height)
    }

    /// Renders a chat request to text and lists its media parts in order.
    ///
    /// # Errors
    /// The request is not one that vLLM accepts.
    pub fn render(&self, body: &Map<String, Value>) -> Result<(String, Vec<Attachment>), PromptError> {
        let mut attachments = Vec::new();
        let messages = message::normalise(body, self.template.wants_parts(), &mut attachments)?;
        let text = self.template.render(body, messages)?;
        Ok((text, attachments))
    }

    /// Token ids of a text, special tokens in it parsed.
    ///
    /// # Errors
    /// The tokenizer fails.
    pub fn encode(&self, text: &str, add_special_tokens: bool) -> Result<Vec<u32>, PromptError> {
        let encoding = self.tokenizer.encode_fast(text, add_special_tokens);
        Ok(encoding.map_err(|error| PromptError::bad(error.to_string()))?.get_ids().to_vec())
    }

    /// Puts each image's tokens in place of the first placeholders, in order: also of placeholders that the client
    /// wrote, as vLLM does.
    ///
    /// # Errors
    /// There are fewer placeholders than images.
    pub fn expand(&self, tokens: &[u32], images: &[Resolved]) -> Result<Prompt, PromptError> {
        let mut prompt = Prompt::default();
        let mut images = images.iter();
        for token in tokens {
            match images.as_slice().first().filter(|_| *token == self.image_pad) {
                Some(image) => {
                    let (id, start) = (image.id.clone(), prompt.tokens.len());
                    prompt.media.push(MediaSpan { id, start, tokens: image.tokens });
                    prompt.tokens.extend(std::iter::repeat_n(self.image_pad, image.tokens));
                    images.next();
                }
                None => prompt.tokens.push(*token),
            }
        }
        match images.len() {
            0 => Ok(prompt),
            left => Err(PromptError::bad(format!("Failed to apply prompt replacement for {left} image(s)"))),
        }
    }

    /// The made-up token at a place of the answer: fixed by `seed` and `index`.
    pub fn made_up(&self, seed: u64, index: usize) -> u32 {
        let mixed = blake3::hash(&[seed.to_le_bytes(), (index as u64).to_le_bytes()].concat());
        let [a, b, c, d, ..] = *mixed.as_bytes();
        let pick = usize::try_from(u32::from_le_bytes([a, b, c, d])).unwrap_or(0) % self.words.len();
        self.words[pick].0
    }

    /// Text of a made-up token; empty for others.
    pub fn text_of(&self, token: u32) -> &str {
        self.words.binary_search_by_key(&token, |(id, _)| *id).map_or("", |at| &self.words[at].1)
    }
}

fn words(tokenizer: &Tokenizer) -> Vec<(u32, String)> {
    let special = tokenizer.get_added_tokens_decoder();
    let ids = 0..u32::try_from(tokenizer.get_vocab_size(true)).unwrap_or(u32::MAX);
    let words = ids.filter(|id| !special.contains_key(id)).filter_map(|id| {
        let text = tokenizer.decode(&[id], false).ok()?;
        let plain = text.len() > 1 && text.chars().all(|c| c == ' ' || c.is_ascii_lowercase());
        plain.then_some((id, text))
    });
    words.take(WORDS_MAX).collect()
}

/// Enough for variety, little to keep.
const WORDS_MAX: usize = 4096;

fn resize(config: &Value) -> Result<Resize, LoadError> {
    let file = "preprocessor_config.json";
    let number = |field: &'static str, value: &Value| value.as_u64().ok_or(LoadError::Field { file, field });
    let patch = number("patch_size", &config["patch_size"])?;
    let merge = number("merge_size", &config["merge_size"])?;
    let size = &config["size"];
    let low = number("size.shortest_edge", size.get("shortest_edge").unwrap_or(&config["min_pixels"]))?;
    let high = number("size.longest_edge", size.get("longest_edge").unwrap_or(&config["max_pixels"]))?;
    let factor = u32::try_from(patch * merge).ok().filter(|factor| *factor > 0);
    let factor = factor.ok_or(LoadError::Field { file, field: "patch_size" })?;
    Ok(Resize { factor, area_min: low, area_max: high })
}
