//! Message content in the form that the template takes: a list of parts, or one text with placeholders in front.

use serde_json::{Map, Value};

use crate::error::RenderError;
use crate::input::Placeholders;
use crate::template::ContentFormat;

/// Text of this beginning changes with every request of one client, and vLLM takes the line out of system messages.
const BILLING_HEADER: &str = "x-anthropic-billing-header";

/// Keys that vLLM knows in some kind of part; all others reach the template with the part.
const KNOWN_KEYS: [&str; 18] = [
    "type",
    "text",
    "image_url",
    "input_audio",
    "file",
    "refusal",
    "audio_url",
    "video_url",
    "image_pil",
    "uuid",
    "image_embeds",
    "audio_embeds",
    "video_embeds",
    "data",
    "name",
    "thinking",
    "closed",
    "prompt_embeds",
];

enum Part<'a> {
    Text { text: &'a str, part: Option<&'a Map<String, Value>> },
    ToolReference(&'a str),
    Media { marker: &'a Value, placeholder: &'a str },
}

pub(super) fn normalise(
    role: &str,
    content: Option<&Value>,
    format: ContentFormat,
    placeholders: &Placeholders<'_>,
) -> Result<Value, RenderError> {
    let whole;
    let items = match content {
        None | Some(Value::Null) => &[][..],
        Some(Value::Array(items)) => items,
        Some(text @ Value::String(_)) => {
            whole = [text.clone()];
            &whole
        }
        Some(_) => return Err(RenderError::Refused { field: "messages.content", problem: "neither text nor parts" }),
    };
    let mut parts = Vec::with_capacity(items.len());
    for item in items {
        let Some(mut part) = read(item, placeholders)? else { continue };
        if role == "system" && !strip_billing_header(&mut part) {
            continue;
        }
        parts.push(part);
    }
    match format {
        ContentFormat::String => joined(&parts).map(Value::String),
        ContentFormat::OpenAi if role == "tool" && parts.iter().all(|part| matches!(part, Part::Text { .. })) => {
            let texts: Vec<&str> = parts.iter().map(Part::text).collect();
            Ok(Value::String(texts.join("\n")))
        }
        ContentFormat::OpenAi => Ok(Value::Array(parts.iter().map(Part::to_value).collect())),
    }
}

/// One item of a content list; `None` for a text part without text.
fn read<'a>(item: &'a Value, placeholders: &Placeholders<'a>) -> Result<Option<Part<'a>>, RenderError> {
    let part = match item {
        Value::String(text) => return Ok(Some(Part::Text { text, part: None })),
        Value::Object(part) => part,
        _ => return Err(RenderError::Refused { field: "messages.content", problem: "a part is not an object" }),
    };
    let kind = part.get("type").and_then(Value::as_str).unwrap_or_default();
    let text_key = match kind {
        "text" | "input_text" | "output_text" => "text",
        "refusal" => "refusal",
        "thinking" => "thinking",
        "tool_reference" => "name",
        "image" => return Ok(Some(Part::Media { marker: item, placeholder: placeholders.image })),
        "video" => return Ok(Some(Part::Media { marker: item, placeholder: placeholders.video })),
        "audio" => return Ok(Some(Part::Media { marker: item, placeholder: placeholders.audio })),
        _ => return Err(RenderError::UnknownPart { kind: kind.to_owned() }),
    };
    match part.get(text_key) {
        Some(Value::String(text)) if kind == "tool_reference" => Ok(Some(Part::ToolReference(text))),
        Some(Value::String(text)) => Ok(Some(Part::Text { text, part: Some(part) })),
        None | Some(Value::Null) if matches!(kind, "text" | "refusal") => Ok(None),
        _ => Err(RenderError::Refused { field: "messages.content", problem: "a part's text is not a string" }),
    }
}

/// Takes the header line off a text; false when nothing is left.
fn strip_billing_header(part: &mut Part<'_>) -> bool {
    let Part::Text { text, part } = part else { return true };
    let plain = part.is_none_or(|part| part.get("type").and_then(Value::as_str) == Some("text"));
    if !plain || !text.starts_with(BILLING_HEADER) {
        return true;
    }
    *text = text.split_once('\n').map_or("", |(_, rest)| rest);
    !text.is_empty()
}

/// One text: placeholders that the client did not write itself in front, everything joined by line breaks.
fn joined(parts: &[Part<'_>]) -> Result<String, RenderError> {
    let texts: Vec<&str> = parts.iter().map(Part::text).filter(|text| !text.is_empty()).collect();
    let text = texts.join("\n");
    let mut wanted: Vec<(&str, usize)> = Vec::new();
    for part in parts {
        let Part::Media { placeholder, .. } = part else { continue };
        match wanted.iter_mut().find(|(known, _)| known == placeholder) {
            _ if placeholder.is_empty() => {}
            Some((_, count)) => *count += 1,
            None => wanted.push((placeholder, 1)),
        }
    }
    let mut lines = Vec::new();
    for (placeholder, count) in wanted {
        let problem = "more placeholders in the text than media";
        let missing = count.checked_sub(text.matches(placeholder).count());
        let missing = missing.ok_or(RenderError::Refused { field: "messages.content", problem })?;
        lines.extend(std::iter::repeat_n(placeholder, missing));
    }
    if !text.is_empty() {
        lines.push(&text);
    }
    Ok(lines.join("\n"))
}

impl Part<'_> {
    fn text(&self) -> &str {
        match self {
            Self::Text { text, .. } | Self::ToolReference(text) => text,
            Self::Media { .. } => "",
        }
    }

    fn to_value(&self) -> Value {
        let (kind, key, text, part) = match self {
            Self::Media { marker, .. } => return (*marker).clone(),
            Self::ToolReference(name) => ("tool_reference", "name", name, &None),
            Self::Text { text, part } => ("text", "text", text, part),
        };
        let mut out = Map::new();
        out.insert("type".to_owned(), kind.into());
        out.insert(key.to_owned(), (*text).into());
        let extra = part.iter().flat_map(|part| part.iter()).filter(|(key, _)| !KNOWN_KEYS.contains(&key.as_str()));
        out.extend(extra.map(|(key, value)| (key.clone(), value.clone())));
        Value::Object(out)
    }
}
