//! What can go wrong while loading a model directory, rendering, or encoding.

use std::path::PathBuf;

/// A model directory that cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    #[error("cannot read {path}; give the directory of a model with its tokenizer files")]
    Read {
        path: PathBuf,
        #[source]
        source: std::io::Error,
    },
    #[error("{path} is not the JSON expected there; copy it again from the model's repository")]
    Json {
        path: PathBuf,
        #[source]
        source: serde_json::Error,
    },
    #[error("{path} is larger than {limit_bytes} bytes; give a model directory")]
    TooLarge { path: PathBuf, limit_bytes: u64 },
    #[error("{path} cannot be used as a tokenizer: fastokens says `{fast}`, tokenizers says `{reference}`")]
    Tokenizer { path: PathBuf, fast: String, reference: String },
    #[error("the chat template in {path} does not compile; use a template that Jinja2 accepts")]
    Template {
        path: PathBuf,
        #[source]
        source: minijinja::Error,
    },
}

/// A request whose prompt cannot be told.
#[derive(Debug, thiserror::Error)]
pub enum RenderError {
    #[error("the model has no chat template; put chat_template.jinja into its directory")]
    NoTemplate,
    #[error("the request brings its own chat_template, which engines refuse unless told to trust requests")]
    ClientTemplate,
    #[error("{field}: {problem}; the engine refuses this too")]
    Refused { field: &'static str, problem: &'static str },
    #[error("chat_template_kwargs.{key} is not a template variable; the engine refuses it too")]
    Kwarg { key: String },
    #[error("message content of type `{kind}` has no known rendering")]
    UnknownPart { kind: String },
    #[error("the template stopped at a limit of steps, depth or output")]
    Limit,
    #[error("the template refuses the conversation: {message}")]
    Template { message: String },
}

impl RenderError {
    /// Splits what minijinja reports: our limits, or the template's own refusal.
    pub(crate) fn from_template(error: &minijinja::Error) -> Self {
        match error.kind() {
            minijinja::ErrorKind::OutOfFuel | minijinja::ErrorKind::WriteFailure => Self::Limit,
            _ => Self::Template { message: error.detail().map_or_else(|| error.to_string(), str::to_owned) },
        }
    }
}

/// Text that the tokenizer cannot encode.
#[derive(Debug, thiserror::Error)]
#[error("the {tokenizer} tokenizer cannot encode the text: {message}")]
pub struct EncodeError {
    pub tokenizer: &'static str,
    pub message: String,
}
