//! What a chat request brings to the template.

use jiff::civil::DateTime;
use serde_json::{Map, Value};

/// A chat request as the renderer needs it. Messages carry media as markers: `{"type":"image"}`, `video`, `audio`.
#[derive(Debug, Clone, Copy)]
pub struct ChatInput<'a> {
    pub messages: &'a Value,
    pub tools: Option<&'a [Value]>,
    pub documents: Option<&'a [Value]>,
    /// The request's own template; always an error, as it cannot be predicted whether the engine takes it.
    pub chat_template: Option<&'a str>,
    pub chat_template_kwargs: &'a Map<String, Value>,
    pub reasoning_effort: Option<&'a Value>,
    pub add_generation_prompt: bool,
    pub continue_final_message: bool,
    /// Texts that stand for media when the template takes string content.
    pub placeholders: Placeholders<'a>,
    /// The engine's wall-clock time, for `strftime_now`; see [`crate::clock::local_now`].
    pub now: DateTime,
}

/// What the model puts into the text for one item, such as `<|vision_start|><|image_pad|><|vision_end|>`; empty when it has none.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Placeholders<'a> {
    pub image: &'a str,
    pub video: &'a str,
    pub audio: &'a str,
}
