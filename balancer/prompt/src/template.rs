//! A model's chat template: compiled once, rendered in bounded time.

mod bounded;
mod continuation;
mod format;
mod kwargs;

use std::collections::HashSet;

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Serde, Value};
use minijinja::{AutoEscape, Environment};
use serde_json::Map;

pub use format::ContentFormat;

use crate::error::RenderError;
use crate::input::ChatInput;
use crate::shims;
use continuation::Continuation;

/// Steps of one render, each worth up to 64 bytes of values: 256 MB at the worst. A conversation of four megabytes fits.
const FUEL: u64 = 4_000_000;

/// Largest prompt text: more than the longest context of any published model.
const OUTPUT_MAX: usize = 32 << 20;

const NAME: &str = "chat_template";

/// A compiled chat template.
pub(crate) struct Template {
    environment: Environment<'static>,
    content_format: ContentFormat,
    knows_developer: bool,
    /// Variables that the template reads and does not set.
    variables: HashSet<String>,
}

/// What a template sees besides the messages.
pub(crate) struct Variables<'a> {
    pub special_tokens: &'a Map<String, serde_json::Value>,
    /// Normalised; null without tools.
    pub tools: serde_json::Value,
    pub input: &'a ChatInput<'a>,
}

impl Template {
    /// Compiles; `format` overrides what the template's own structure says.
    pub fn compile(source: String, format: Option<ContentFormat>) -> Result<Self, minijinja::Error> {
        let knows_developer = source.contains("\"developer\"") || source.contains("'developer'");
        let source = shims::generation::rewrite(&source);
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build()?;
        let content_format = format.unwrap_or_else(|| ContentFormat::detect(&source, &syntax));
        let mut environment = Environment::new();
        environment.set_syntax(syntax);
        environment.set_auto_escape_callback(|_| AutoEscape::None);
        environment.set_debug(false);
        environment.set_fuel(Some(FUEL));
        shims::install(&mut environment);
        environment.add_template_owned(NAME, source)?;
        let variables = environment.get_template(NAME)?.undeclared_variables(false);
        Ok(Self { environment, content_format, knows_developer, variables })
    }

    pub fn content_format(&self) -> ContentFormat {
        self.content_format
    }

    pub fn knows_developer(&self) -> bool {
        self.knows_developer
    }

    /// The prompt text of a conversation.
    pub fn render(
        &self,
        mut conversation: Vec<Map<String, serde_json::Value>>,
        variables: Variables<'_>,
    ) -> Result<String, RenderError> {
        let input = variables.input;
        if input.continue_final_message && input.add_generation_prompt {
            let problem = "set together with add_generation_prompt";
            return Err(RenderError::Refused { field: "continue_final_message", problem });
        }
        let continuation = input.continue_final_message.then(|| Continuation::mark(&mut conversation)).transpose()?;
        let mut context = variables.special_tokens.clone();
        context.extend(kwargs::select(input, &self.variables)?);
        context.insert("messages".to_owned(), conversation.into_iter().map(serde_json::Value::Object).collect());
        context.insert("tools".to_owned(), variables.tools);
        context.entry("documents").or_insert(serde_json::Value::Null);
        context.insert("add_generation_prompt".to_owned(), input.add_generation_prompt.into());
        let now = ("strftime_now".to_owned(), shims::strftime::function(input.now));
        let context = context.into_iter().map(|(key, value)| (key, Value::from(Serde(value)))).chain([now]);
        let text = self.evaluate(Value::from_pairs(context))?;
        match continuation {
            Some(continuation) => continuation.cut(&text),
            None => Ok(text),
        }
    }

    fn evaluate(&self, context: Value) -> Result<String, RenderError> {
        let template = self.environment.get_template(NAME).map_err(|error| RenderError::from_template(&error))?;
        let mut out = bounded::Writer::new(OUTPUT_MAX);
        template.render_captured_to(context, &mut out).map_err(|error| RenderError::from_template(&error))?;
        out.into_text()
    }
}

#[cfg(test)]
mod tests;
