//! What vLLM does to messages before the template sees them (`parse_chat_message*.py`, `hf.py` of 0.33).
//!
//! The server's `--interleave-mm-strings` is not mirrored: without it, placeholders of text content stand in front.

mod content;
mod roles;
mod tools;

use serde_json::{Map, Value};

use crate::error::RenderError;
use crate::input::Placeholders;
use crate::template::ContentFormat;

pub(crate) use roles::adapt_roles;
pub(crate) use tools::normalise_tools;

type Message = Map<String, Value>;

/// Messages as the template gets them: known fields only, content in one form, tool calls with parsed arguments.
pub(crate) fn normalise(
    messages: &Value,
    format: ContentFormat,
    placeholders: &Placeholders<'_>,
) -> Result<Vec<Message>, RenderError> {
    let refused = RenderError::Refused { field: "messages", problem: "not an array of objects" };
    let Some(messages) = messages.as_array() else { return Err(refused) };
    let mut conversation = Vec::with_capacity(messages.len());
    for message in messages {
        let Some(message) = message.as_object() else { return Err(refused) };
        conversation.push(one(message, format, placeholders)?);
    }
    Ok(conversation)
}

fn one(message: &Message, format: ContentFormat, placeholders: &Placeholders<'_>) -> Result<Message, RenderError> {
    let refused = RenderError::Refused { field: "messages.role", problem: "not a string" };
    let role = message.get("role").and_then(Value::as_str).ok_or(refused)?;
    let mut out = Message::new();
    out.insert("role".to_owned(), role.into());
    out.insert("content".to_owned(), content::normalise(role, message.get("content"), format, placeholders)?);
    let given = |key: &str| message.get(key).filter(|value| !value.is_null());
    match role {
        "assistant" => {
            if let Some(calls) = given("tool_calls").map(tools::normalise_calls).transpose()?.flatten() {
                out.insert("tool_calls".to_owned(), calls);
            }
            // The deprecated name counts where the new one is missing.
            if let Some(reasoning) = given("reasoning").or_else(|| given("reasoning_content")) {
                out.insert("reasoning".to_owned(), reasoning.clone());
                out.insert("reasoning_content".to_owned(), reasoning.clone());
            }
        }
        "tool" => {
            if let Some(id) = given("tool_call_id") {
                out.insert("tool_call_id".to_owned(), id.clone());
            }
        }
        "developer" => {
            if let Some(tools) = given("tools") {
                out.insert("tools".to_owned(), tools.clone());
            }
        }
        _ => {}
    }
    for key in ["name", "task"] {
        if let Some(value) = given(key).filter(|value| value.is_string()) {
            out.insert(key.to_owned(), value.clone());
        }
    }
    Ok(out)
}

#[cfg(test)]
mod tests;
