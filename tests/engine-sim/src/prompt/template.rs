//! The chat template, with what Hugging Face's environment adds to Jinja.

use super::{LoadError, PromptError, read_json};
use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, Serde};
use minijinja::{Environment, Error, ErrorKind};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter};
use serde_json::{Map, Value};
use std::io;
use std::path::Path;

/// Source of the template: its own file, else a field of the tokenizer's config.
pub(super) fn find(dir: &Path) -> Result<String, LoadError> {
    if let Ok(source) = std::fs::read_to_string(dir.join("chat_template.jinja")) {
        return Ok(source);
    }
    let file = if dir.join("chat_template.json").exists() { "chat_template.json" } else { "tokenizer_config.json" };
    let source = read_json(dir, file)?["chat_template"].as_str().map(str::to_owned);
    source.ok_or(LoadError::Field { file: "tokenizer_config.json", field: "chat_template" })
}

pub(super) struct Template {
    environment: Environment<'static>,
    wants_parts: bool,
}

const NAME: &str = "chat";

impl Template {
    pub(super) fn new(source: String) -> Result<Self, LoadError> {
        let failed = |error: Error| LoadError::Template(error.to_string());
        let mut environment = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build().map_err(failed)?;
        environment.set_syntax(syntax);
        environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        environment.add_filter("tojson", tojson);
        environment.add_function("raise_exception", |message: String| -> Result<String, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        environment.add_template_owned(NAME, source).map_err(failed)?;
        let mut template = Self { environment, wants_parts: false };
        template.wants_parts = template.loops_over_parts();
        Ok(template)
    }

    /// Whether messages keep their parts (vLLM's content format `openai`) or are flattened to text (`string`). Found by
    /// a probe, where vLLM looks at the syntax tree; the two agree on common templates.
    pub(super) fn wants_parts(&self) -> bool {
        self.wants_parts
    }

    fn loops_over_parts(&self) -> bool {
        let probe = serde_json::json!([{"role": "user", "content": [{"type": "text", "text": "probe-word"}]}]);
        let text = self.render(&Map::new(), probe).unwrap_or_default();
        text.contains("probe-word") && !text.contains("\"text\"") && !text.contains("'text'")
    }

    pub(super) fn render(&self, body: &Map<String, Value>, messages: Value) -> Result<String, PromptError> {
        let mut context = Map::new();
        if let Some(Value::Object(kwargs)) = body.get("chat_template_kwargs") {
            context.extend(kwargs.clone());
        }
        let tools = body.get("tools").filter(|tools| tools.as_array().is_some_and(|list| !list.is_empty()));
        context.insert("tools".to_owned(), tools.cloned().unwrap_or(Value::Null));
        context.insert("documents".to_owned(), body.get("documents").cloned().unwrap_or(Value::Null));
        let prompt = body.get("add_generation_prompt").and_then(Value::as_bool).unwrap_or(true);
        context.insert("add_generation_prompt".to_owned(), Value::Bool(prompt));
        context.insert("messages".to_owned(), messages);
        let template = self.environment.get_template(NAME);
        let text = template.and_then(|template| template.render(minijinja::Value::from(Serde(&context))));
        text.map_err(|error| PromptError::bad(error.to_string()))
    }
}

/// Python's `json.dumps(value, ensure_ascii=False)`.
fn tojson(value: minijinja::Value, kwargs: Kwargs) -> Result<minijinja::Value, Error> {
    let indent: Option<usize> = kwargs.get("indent")?;
    let mut out = Vec::new();
    let written = match indent {
        Some(width) => {
            let spaces = " ".repeat(width.min(16));
            let pretty = PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, pretty))
        }
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, Python)),
    };
    let failed = |error: String| Error::new(ErrorKind::BadSerialization, error);
    written.map_err(|error| failed(error.to_string()))?;
    let text = String::from_utf8(out).map_err(|error| failed(error.to_string()))?;
    Ok(minijinja::Value::from_safe_string(text))
}

/// A space after each comma and colon.
struct Python;

impl Formatter for Python {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, out: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { out.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, out: &mut W) -> io::Result<()> {
        out.write_all(b": ")
    }
}
