//! `continue_final_message`: the prompt ends inside the last message, whatever the template writes after it.
//!
//! As transformers does: a marker goes behind the last message's text, and the rendered text is cut there. The marker ends in a
//! space, so that a template that trims the text gives itself away.

use serde_json::{Map, Value};

use crate::error::RenderError;

const MARKER: &str = "FOVEA_CONTINUES_HERE ";

/// The last message's own text, before the marker went in.
pub(super) struct Continuation(String);

impl Continuation {
    /// Puts the marker behind the last text of the last message.
    pub fn mark(conversation: &mut [Map<String, Value>]) -> Result<Self, RenderError> {
        let text = conversation.last_mut().and_then(|message| match message.get_mut("content")? {
            Value::String(text) => Some(text),
            Value::Array(parts) => parts.iter_mut().rev().find_map(|part| match part.get_mut("text")? {
                Value::String(text) => Some(text),
                _ => None,
            }),
            _ => None,
        });
        let problem = "set, but the last message has no text";
        let text = text.ok_or(RenderError::Refused { field: "continue_final_message", problem })?;
        let own = text.clone();
        text.push_str(MARKER);
        Ok(Self(own))
    }

    /// Cuts the rendered text at the marker.
    pub fn cut(self, rendered: &str) -> Result<String, RenderError> {
        let problem = "set, but the template changes the last message's text";
        let refused = RenderError::Refused { field: "continue_final_message", problem };
        let Some(at) = rendered.rfind(MARKER.trim_end()) else { return Err(refused) };
        if !rendered.contains(self.0.trim()) {
            return Err(refused);
        }
        let kept = &rendered[..at];
        Ok(if rendered[at..].starts_with(MARKER) { kept.to_owned() } else { kept.trim_end().to_owned() })
    }
}
