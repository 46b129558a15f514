//! Developer messages for templates that do not know the role.

use serde_json::Value;

use super::Message;

/// Turns developer messages into system messages when the template does not know the role, and then merges all system
/// messages into one at the front, as some templates accept them only there.
pub(crate) fn adapt_roles(mut conversation: Vec<Message>, knows_developer: bool) -> Vec<Message> {
    let is = |message: &Message, role: &str| message.get("role").is_some_and(|value| value == role);
    if knows_developer || !conversation.iter().any(|message| is(message, "developer")) {
        return conversation;
    }
    for message in conversation.iter_mut().filter(|message| is(message, "developer")) {
        message.insert("role".to_owned(), "system".into());
        message.shift_remove("tools");
    }
    if !conversation.iter().skip(1).any(|message| is(message, "system")) {
        return conversation;
    }
    let (system, rest): (Vec<_>, Vec<_>) = conversation.into_iter().partition(|message| is(message, "system"));
    let texts: Vec<String> = system.iter().map(text).filter(|text| !text.is_empty()).collect();
    let merged = [("role".to_owned(), "system".into()), ("content".to_owned(), texts.join("\n\n").into())];
    std::iter::once(merged.into_iter().collect()).chain(rest).collect()
}

fn text(message: &Message) -> String {
    match message.get("content") {
        Some(Value::String(text)) => text.clone(),
        Some(Value::Array(parts)) => {
            let texts: Vec<&str> = parts.iter().filter_map(|part| part.get("text")?.as_str()).collect();
            texts.join("\n")
        }
        _ => String::new(),
    }
}
