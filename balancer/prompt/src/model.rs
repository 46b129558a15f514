//! One model's prompt side: template, tokenizer, special tokens.

use std::path::Path;

use serde_json::{Map, Value};

use crate::error::{EncodeError, LoadError, RenderError};
use crate::files::{Files, Source};
use crate::input::ChatInput;
use crate::messages;
use crate::template::{ContentFormat, Template, Variables};
use crate::tokenize::{self, Tokenize};

/// Choices that do not stand in the model's files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadOptions {
    /// vLLM's `--chat-template-content-format`; `None` is `auto`.
    pub content_format: Option<ContentFormat>,
    /// Memory for texts encoded before, 0 for none. Repeated turns of a chat then cost microseconds.
    pub cache_bytes: usize,
}

impl Default for LoadOptions {
    fn default() -> Self {
        Self { content_format: None, cache_bytes: 16 << 20 }
    }
}

/// Renders chats and encodes text as an engine that serves this model does. Shared between threads.
pub struct PromptModel {
    /// For requests without tools, and with.
    plain: Option<Template>,
    tools: Option<Template>,
    special_tokens: Map<String, Value>,
    tokenizer: Box<dyn Tokenize>,
}

impl PromptModel {
    /// Reads a model directory, compiles its chat template and warms the tokenizer: takes up to seconds, so call it before ready.
    pub fn load(dir: &Path) -> Result<Self, LoadError> {
        Self::load_with(dir, LoadOptions::default())
    }

    /// As [`load`](Self::load), with choices.
    pub fn load_with(dir: &Path, options: LoadOptions) -> Result<Self, LoadError> {
        let files = Files::read(dir)?;
        let compile = |source: Option<Source>| {
            let Some(Source { path, text }) = source else { return Ok(None) };
            let compiled = Template::compile(text, options.content_format);
            compiled.map(Some).map_err(|source| LoadError::Template { path, source })
        };
        let (plain, tools) = (compile(files.plain)?, compile(files.tools)?);
        let tokenizer = tokenize::load(&dir.join("tokenizer.json"), options.cache_bytes)?;
        let model = Self { plain, tools, special_tokens: files.special_tokens, tokenizer };
        model.warm();
        Ok(model)
    }

    /// The prompt text of a chat.
    pub fn render_chat(&self, input: &ChatInput<'_>) -> Result<String, RenderError> {
        if input.chat_template.is_some() {
            return Err(RenderError::ClientTemplate);
        }
        let template = if input.tools.is_some() { &self.tools } else { &self.plain };
        let template = template.as_ref().ok_or(RenderError::NoTemplate)?;
        let conversation = messages::normalise(input.messages, template.content_format(), &input.placeholders)?;
        let conversation = messages::adapt_roles(conversation, template.knows_developer());
        let tools = input.tools.map(messages::normalise_tools).transpose()?.unwrap_or_default();
        template.render(conversation, Variables { special_tokens: &self.special_tokens, tools, input })
    }

    /// Appends the ids of `text`. Special tokens in the text are parsed as such, wherever they came from, as engines do.
    pub fn encode(&self, text: &str, add_special_tokens: bool, out: &mut Vec<u32>) -> Result<(), EncodeError> {
        self.tokenizer.encode(text, add_special_tokens, out)
    }

    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.tokenizer.token_to_id(token)
    }

    /// How message content reaches the template, for requests without tools.
    pub fn content_format(&self) -> Option<ContentFormat> {
        self.plain.as_ref().map(Template::content_format)
    }

    /// Which tokenizer could load the file: `fastokens` or `tokenizers`.
    pub fn tokenizer_name(&self) -> &'static str {
        self.tokenizer.name()
    }

    /// First encodings build tables; no request should pay for that.
    fn warm(&self) {
        let text =
            "The quick brown fox, 12 345 times: naïve café, 你好世界, 👋.\n\n\tfn main() { return 0; }\r\n".repeat(8);
        for add_special_tokens in [false, true] {
            // A failure shows again, with its reason, in the request that meets it.
            let _ = self.tokenizer.encode(&text, add_special_tokens, &mut Vec::new());
        }
    }
}

#[cfg(test)]
mod tests;
