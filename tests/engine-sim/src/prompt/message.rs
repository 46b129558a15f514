//! What vLLM does to chat messages before the template sees them.

use super::PromptError;
use super::media::Attachment;
use serde_json::{Map, Value, json};

/// The messages for the template; media parts are moved to `attachments` in order.
pub(super) fn normalise(
    body: &Map<String, Value>,
    keep_parts: bool,
    attachments: &mut Vec<Attachment>,
) -> Result<Value, PromptError> {
    let messages = body.get("messages").and_then(Value::as_array).filter(|list| !list.is_empty());
    let messages = messages.ok_or_else(|| PromptError::bad("messages: a list of at least one message is required"))?;
    let mut out = Vec::with_capacity(messages.len());
    for message in messages {
        let message = message.as_object().ok_or_else(|| PromptError::bad("messages: each must be an object"))?;
        out.push(normalise_one(message, keep_parts, attachments)?);
    }
    Ok(Value::Array(out))
}

fn normalise_one(
    message: &Map<String, Value>,
    keep_parts: bool,
    attachments: &mut Vec<Attachment>,
) -> Result<Value, PromptError> {
    let role = message.get("role").and_then(Value::as_str);
    let role = role.ok_or_else(|| PromptError::bad("messages: role is required"))?;
    let parts = parts(message.get("content"), attachments)?;
    let mut out = Map::new();
    out.insert("role".to_owned(), role.into());
    let texts_only = parts.iter().all(|part| part["type"] == "text");
    let content = match (keep_parts, role) {
        (true, "tool") if texts_only => flat_text(&parts).into(),
        (true, _) => Value::Array(parts),
        (false, _) => flat_text(&parts).into(),
    };
    out.insert("content".to_owned(), content);
    if let Some(name) = message.get("name").and_then(Value::as_str) {
        out.insert("name".to_owned(), name.into());
    }
    match role {
        "assistant" => {
            if let Some(calls) = message.get("tool_calls").and_then(Value::as_array).filter(|list| !list.is_empty()) {
                out.insert("tool_calls".to_owned(), calls.iter().map(tool_call).collect());
            }
            if let Some(text) = message.get("reasoning").or(message.get("reasoning_content")).filter(|t| !t.is_null()) {
                out.insert("reasoning".to_owned(), text.clone());
                out.insert("reasoning_content".to_owned(), text.clone());
            }
        }
        "tool" => {
            if let Some(id) = message.get("tool_call_id").filter(|id| !id.is_null()) {
                out.insert("tool_call_id".to_owned(), id.clone());
            }
        }
        _ => {}
    }
    Ok(Value::Object(out))
}

/// Media placeholders first, then the texts, a line each.
fn flat_text(parts: &[Value]) -> String {
    let media = parts.iter().filter(|part| part["type"] == "image").map(|_| IMAGE);
    let texts = parts.iter().filter_map(|part| part["text"].as_str());
    media.chain(texts).collect::<Vec<_>>().join("\n")
}

const IMAGE: &str = "<|vision_start|><|image_pad|><|vision_end|>";

fn parts(content: Option<&Value>, attachments: &mut Vec<Attachment>) -> Result<Vec<Value>, PromptError> {
    match content {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::String(text)) => Ok(vec![text_part(text)]),
        Some(Value::Array(list)) => list.iter().map(|part| one_part(part, attachments)).collect(),
        Some(_) => Err(PromptError::bad("messages: content must be a string or a list of parts")),
    }
}

fn text_part(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

fn one_part(part: &Value, attachments: &mut Vec<Attachment>) -> Result<Value, PromptError> {
    if let Some(text) = part.as_str() {
        return Ok(text_part(text));
    }
    match part["type"].as_str() {
        Some("text" | "input_text" | "output_text") => {
            let text = part["text"].as_str().ok_or_else(|| PromptError::bad("messages: a text part needs its text"))?;
            Ok(text_part(text))
        }
        Some("image_url" | "input_image") => {
            let image = part.get("image_url").unwrap_or(&Value::Null);
            let url = image.as_str().or_else(|| image["url"].as_str()).map(str::to_owned);
            let uuid = part["uuid"].as_str().map(str::to_owned);
            if url.is_none() && uuid.is_none() {
                let message = "1 validation error for ChatCompletionContentPartImageParam\nimage_url\n  \
                               Input should be a valid dictionary";
                return Err(PromptError::bad(message));
            }
            let text = |field: &str| image[field].as_str().map(str::to_owned);
            let (detail, content_hash) = (text("detail"), text("content_hash"));
            attachments.push(Attachment { url, uuid, detail, content_hash });
            Ok(json!({"type": "image"}))
        }
        Some("image_embeds") => Err(PromptError::Bad {
            message: "You must set `--enable-mm-embeds` to input `image_embeds` (parameter=image_embeds)".to_owned(),
            param: Some("image_embeds"),
        }),
        other => Err(PromptError::bad(format!("Unknown part type: {}", other.unwrap_or("none")))),
    }
}

/// Arguments are an object for the template; whatever is none counts as empty.
fn tool_call(call: &Value) -> Value {
    let mut call = call.clone();
    if let Some(function) = call.get_mut("function").and_then(Value::as_object_mut) {
        let arguments = match function.get("arguments") {
            Some(Value::String(text)) => serde_json::from_str(text).unwrap_or(Value::Null),
            Some(value) => value.clone(),
            None => Value::Null,
        };
        let arguments = if arguments.is_object() { arguments } else { json!({}) };
        function.insert("arguments".to_owned(), arguments);
    }
    call
}
