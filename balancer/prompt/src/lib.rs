//! From a chat request to the token ids that the engine will compute: message rules, chat template, tokenizer.
//!
//! Mirrors vLLM 0.32–0.33 (`renderers/hf.py`, `renderers/chat_utils`) over transformers 5.19. Where the engine would refuse or
//! where its answer cannot be known, a typed error says so and the caller routes without an exact view.
//!
//! **Invariant:** rendering is bounded in steps, depth and output; no template or request can hold a thread.
//! **Invariant:** files are read by [`PromptModel::load`] only, and the clock only by [`clock::local_now`].

pub mod clock;
mod error;
mod files;
mod input;
mod messages;
mod model;
mod shims;
mod template;
pub mod tokenize;

pub use error::{EncodeError, LoadError, RenderError};
pub use input::{ChatInput, Placeholders};
pub use jiff::civil::DateTime;
pub use model::{LoadOptions, PromptModel};
pub use template::ContentFormat;
