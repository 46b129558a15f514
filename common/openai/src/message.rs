//! The messages of a chat request.

use serde_json::{Map, Value};

use crate::json::{Cursor, Kind, Result};
use crate::part::{self, MediaPart};

/// Reads the array of messages: values for the template, media apart.
pub(crate) fn parse_all<'a>(cursor: &mut Cursor<'a>, media: &mut Vec<MediaPart<'a>>) -> Result<Value> {
    if cursor.kind()? != Kind::Array {
        return Err(cursor.error("not an array", "send an array of messages"));
    }
    let mut messages = Vec::new();
    cursor.array(|cursor, index| {
        messages.push(parse(cursor, index, media).map_err(|error| error.within_item(index))?);
        Ok(())
    })?;
    Ok(Value::Array(messages))
}

fn parse<'a>(cursor: &mut Cursor<'a>, index: usize, media: &mut Vec<MediaPart<'a>>) -> Result<Value> {
    cursor.charge(1)?;
    if cursor.kind()? != Kind::Object {
        return Err(cursor.error("not an object", "send messages as objects with `role` and `content`"));
    }
    let start = cursor.clone();
    let mut message = Map::new();
    cursor.object(|cursor, key| {
        let value = match key {
            "content" => content(cursor, index, media),
            "role" => cursor.text().map(|role| Value::String(role.into_owned())),
            _ => cursor.value(),
        };
        message.insert(key.to_owned(), value.map_err(|error| error.within(key))?);
        Ok(())
    })?;
    if !message.contains_key("role") {
        return Err(start.error("message without a `role`", "give each message a role, such as `user`"));
    }
    Ok(Value::Object(message))
}

fn content<'a>(cursor: &mut Cursor<'a>, message: usize, media: &mut Vec<MediaPart<'a>>) -> Result<Value> {
    match cursor.kind()? {
        Kind::Null | Kind::String => cursor.value(),
        Kind::Array => {
            let mut parts = Vec::new();
            cursor.array(|cursor, index| {
                cursor.charge(1)?;
                parts.push(part::parse(cursor, message, media).map_err(|error| error.within_item(index))?);
                Ok(())
            })?;
            Ok(Value::Array(parts))
        }
        _ => Err(cursor.error("neither text nor parts", "send a string, an array of content parts, or null")),
    }
}
