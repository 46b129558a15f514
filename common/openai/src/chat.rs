//! A chat completion body.

use std::borrow::Cow;

use serde_json::{Map, Value};

use crate::cut::CutPolicy;
use crate::error::ParseError;
use crate::json::{Cursor, Kind, Result};
use crate::message;
use crate::part::MediaPart;
use crate::top::Common;

/// A chat completion request, borrowed from its body.
#[derive(Debug, Clone, PartialEq)]
pub struct ChatRequest<'a> {
    pub common: Common<'a>,
    /// Array of messages as sent, except that each media part is a small marker such as `{"type":"image"}` plus the fields
    /// that engines do not know, and text parts begin with their `type`.
    pub messages: Value,
    /// In prompt order.
    pub media: Vec<MediaPart<'a>>,
    pub tools: Option<Vec<Value>>,
    pub documents: Option<Vec<Value>>,
    /// A template sent by the client: engines refuse it unless told to trust requests.
    pub chat_template: Option<Cow<'a, str>>,
    pub chat_template_kwargs: Map<String, Value>,
    /// Engines pass it on to the template.
    pub reasoning_effort: Option<Value>,
    /// True when absent.
    pub add_generation_prompt: bool,
    /// False when absent.
    pub continue_final_message: bool,
}

impl<'a> ChatRequest<'a> {
    /// Reads a body. Unknown fields are checked for syntax and skipped.
    pub fn parse(body: &'a str) -> std::result::Result<Self, ParseError> {
        let mut cursor = Cursor::new(body);
        let policy = CutPolicy::default();
        let mut request = Self::empty();
        let members = cursor.object(|cursor, key| {
            let read = request.member(cursor, key, policy);
            read.map_err(|error| error.within(key))
        })?;
        cursor.end()?;
        if !members.iter().any(|member| member.key == "messages") {
            return Err(Cursor::new(body).error("no `messages`", "send an array of messages").within("messages"));
        }
        request.common.cut_top(&members, policy);
        Ok(request)
    }

    fn empty() -> Self {
        Self {
            common: Common::default(),
            messages: Value::Null,
            media: Vec::new(),
            tools: None,
            documents: None,
            chat_template: None,
            chat_template_kwargs: Map::new(),
            reasoning_effort: None,
            add_generation_prompt: true,
            continue_final_message: false,
        }
    }

    fn member(&mut self, cursor: &mut Cursor<'a>, key: &str, policy: CutPolicy) -> Result<()> {
        match key {
            "messages" => self.messages = message::parse_all(cursor, &mut self.media)?,
            "tools" => self.tools = list(cursor)?,
            "documents" => self.documents = list(cursor)?,
            "chat_template" => self.chat_template = cursor.text_or_null()?,
            "chat_template_kwargs" => self.chat_template_kwargs = cursor.map()?,
            "reasoning_effort" => self.reasoning_effort = Some(cursor.value()?).filter(|value| !value.is_null()),
            "add_generation_prompt" => self.add_generation_prompt = cursor.flag()?.unwrap_or(true),
            "continue_final_message" => self.continue_final_message = cursor.flag()?.unwrap_or(false),
            _ if self.common.member(cursor, key, policy)? => {}
            _ => cursor.skip()?,
        }
        Ok(())
    }
}

fn list(cursor: &mut Cursor<'_>) -> Result<Option<Vec<Value>>> {
    match cursor.kind()? {
        Kind::Null | Kind::Array => match cursor.value()? {
            Value::Array(items) => Ok(Some(items)),
            _ => Ok(None),
        },
        _ => Err(cursor.error("not an array", "send an array, or leave the field out")),
    }
}

#[cfg(test)]
mod tests;
