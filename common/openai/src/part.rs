//! One content part of a message: text stays, media becomes a [`MediaPart`] and a small marker for the template.
//!
//! Mirrors `renderers/chat_utils/parse_chat_message_content.py` of vLLM 0.33. vLLM picks the reading by `type` when the part has no
//! `uuid`, and by the keys present when it has one; as an edit adds or removes a uuid, a part where the two differ is refused.

use std::borrow::Cow;
use std::ops::Range;

use serde_json::{Map, Value};

use crate::cut::cut_members;
use crate::error::ParseError;
use crate::json::{Cursor, Kind, Result};
use crate::top::option;

/// What a media part carries.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MediaKind {
    Image,
    Video,
    Audio,
    /// Encoder output instead of the image, video or audio itself.
    Embedding,
    /// A span of prompt embeddings: no media item to the engine, but token positions that we cannot know.
    PromptEmbedding,
}

/// One media part, in prompt order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MediaPart<'a> {
    pub kind: MediaKind,
    /// As the client wrote it; for `input_audio` the bare base64 text. `None` when null, absent, or not text (embeddings).
    pub url: Option<Cow<'a, str>>,
    /// Where the URL stands in the body, as a JSON string with its quotes.
    pub url_at: Option<Range<usize>>,
    /// Members of its media object that change what an engine makes of it: `detail` unless "auto", `max_dynamic_patch`,
    /// `min_dynamic_patch`. vLLM reads none of them.
    pub options: Map<String, Value>,
    /// The client's own identity of the item, when given and not null.
    pub uuid: Option<Cow<'a, str>>,
    /// The whole part, braces included.
    pub at: Range<usize>,
    /// Where a new member, comma included, can be inserted: just after the part's `{`.
    pub insert_at: usize,
    /// Removing these bytes removes the part's `uuid` member (null, too) and leaves valid JSON.
    pub uuid_cut: Option<Range<usize>>,
    /// Index of the message.
    pub message: usize,
}

/// Keys that carry media, what they carry, and the marker that the template sees.
const MEDIA_KEYS: [(&str, MediaKind, &str); 12] = [
    ("image_url", MediaKind::Image, "image"),
    ("image_pil", MediaKind::Image, "image"),
    ("image", MediaKind::Image, "image"),
    ("image_embeds", MediaKind::Embedding, "image"),
    ("audio_embeds", MediaKind::Embedding, "audio"),
    ("video_embeds", MediaKind::Embedding, "video"),
    ("prompt_embeds", MediaKind::PromptEmbedding, "text"),
    ("audio_url", MediaKind::Audio, "audio"),
    ("input_audio", MediaKind::Audio, "audio"),
    ("audio", MediaKind::Audio, "audio"),
    ("video_url", MediaKind::Video, "video"),
    ("video", MediaKind::Video, "video"),
];

/// Keys that vLLM knows in some kind of part; all others reach the template with the marker.
const KNOWN_KEYS: [&str; 7] = ["text", "refusal", "file", "data", "name", "thinking", "closed"];

/// What vLLM renders for a span of prompt embeddings, before it is expanded.
const PROMPT_EMBEDS_MARKER: &str = "<prompt_embeds>";

const TEXT_TYPES: [&str; 6] = ["text", "input_text", "output_text", "refusal", "thinking", "tool_reference"];

const ONE_KIND: &str = "give each part one kind of content, under the key that its `type` names";

type Source<'a> = (Cow<'a, str>, Range<usize>);

#[derive(Default)]
struct Draft<'a> {
    kind: Option<Cow<'a, str>>,
    uuid: Option<Cow<'a, str>>,
    /// Index into `MEDIA_KEYS` and the URL with its place.
    media: Option<(usize, Option<Source<'a>>)>,
    has_data: bool,
    options: Map<String, Value>,
    rest: Map<String, Value>,
}

/// Reads a part; media is added to `media`. The answer is what the template gets.
pub(crate) fn parse<'a>(cursor: &mut Cursor<'a>, message: usize, media: &mut Vec<MediaPart<'a>>) -> Result<Value> {
    match cursor.kind()? {
        Kind::String => return cursor.value(),
        Kind::Object => {}
        _ => return Err(cursor.error("not a content part", "send a string or an object with a `type`")),
    }
    let start = cursor.position();
    let mut draft = Draft::default();
    let members = cursor.object(|cursor, key| draft.member(cursor, key).map_err(|error| error.within(key)))?;
    let end = cursor.passed_to();
    let fault = |problem: String| ParseError::new(cursor.body, start, problem, ONE_KIND);
    let Some((kind, marker)) = draft.reading().map_err(fault)? else {
        return Ok(draft.into_text());
    };
    let (url, url_at) = draft.media.as_mut().and_then(|(_, source)| source.take()).unzip();
    media.push(MediaPart {
        kind,
        url,
        url_at,
        options: std::mem::take(&mut draft.options),
        uuid: draft.uuid.take(),
        at: start..end,
        insert_at: start + 1,
        uuid_cut: cut_members(&members, |key| key == "uuid").pop(),
        message,
    });
    Ok(draft.into_marker(marker))
}

impl<'a> Draft<'a> {
    fn member(&mut self, cursor: &mut Cursor<'a>, key: &str) -> Result<()> {
        if let Some(index) = MEDIA_KEYS.iter().position(|(name, ..)| *name == key) {
            if self.media.is_some() {
                return Err(cursor.error("a second media item in one part", ONE_KIND));
            }
            self.media = Some((index, source(cursor, &mut self.options)?));
            return Ok(());
        }
        match key {
            "type" => self.kind = cursor.text_or_null()?,
            "uuid" => self.uuid = cursor.text_or_null()?,
            // Base64 of a prompt embedding: not to be copied.
            "data" => self.has_data = cursor.skip().map(|()| true)?,
            _ => drop(self.rest.insert(key.to_owned(), cursor.value()?)),
        }
        Ok(())
    }

    /// Media kind and marker, or `None` for a part without media.
    fn reading(&self) -> std::result::Result<Option<(MediaKind, &'static str)>, String> {
        let carried = self.media.as_ref().map(|(index, _)| MEDIA_KEYS[*index]);
        let kind = self.kind.as_deref();
        let named = match kind {
            None if carried.is_none() => return Err("part without a `type`".to_owned()),
            None => return Ok(carried.map(|(_, kind, marker)| (kind, marker))),
            Some("prompt_embeds") if carried.is_none() && self.has_data => {
                return Ok(Some((MediaKind::PromptEmbedding, "text")));
            }
            Some("input_image") => Some("image_url"),
            Some(kind) => MEDIA_KEYS.iter().map(|(key, ..)| *key).find(|key| *key == kind),
        };
        match (named, carried) {
            (Some(named), Some((key, kind, marker))) if named == key => Ok(Some((kind, marker))),
            (Some(named), None) => Err(format!("part without its `{named}`")),
            (Some(_), Some((key, ..))) => Err(format!("part of another `type` than its `{key}`")),
            (None, Some((key, ..))) if kind.is_some_and(|kind| TEXT_TYPES.contains(&kind)) => {
                Err(format!("text part with an `{key}`"))
            }
            (None, Some((_, kind, marker))) => Ok(Some((kind, marker))),
            (None, None) => Ok(None),
        }
    }

    /// The part without media, `type` first.
    fn into_text(self) -> Value {
        let mut part = Map::with_capacity(self.rest.len() + 1);
        part.insert("type".to_owned(), self.kind.map_or(Value::Null, |kind| Value::String(kind.into_owned())));
        part.extend(self.rest);
        Value::Object(part)
    }

    fn into_marker(self, marker: &str) -> Value {
        let mut part = Map::with_capacity(2);
        part.insert("type".to_owned(), Value::String(marker.to_owned()));
        if marker == "text" {
            part.insert("text".to_owned(), Value::String(PROMPT_EMBEDS_MARKER.to_owned()));
            return Value::Object(part);
        }
        part.extend(self.rest.into_iter().filter(|(key, _)| !KNOWN_KEYS.contains(&key.as_str())));
        Value::Object(part)
    }
}

/// The text inside a media member: itself a string, or an object with `url` or, for `input_audio`, `data`.
fn source<'a>(cursor: &mut Cursor<'a>, options: &mut Map<String, Value>) -> Result<Option<Source<'a>>> {
    let mut found = None;
    match cursor.kind()? {
        Kind::String => return placed(cursor).map(Some),
        Kind::Object => {
            cursor.object(|cursor, key| {
                match key {
                    "url" | "data" if cursor.kind()? == Kind::Null => cursor.skip()?,
                    "url" | "data" => found = Some(placed(cursor).map_err(|error| error.within(key))?),
                    "detail" | "max_dynamic_patch" | "min_dynamic_patch" => {
                        option(cursor, key, options).map_err(|error| error.within(key))?;
                    }
                    _ => cursor.skip()?,
                }
                Ok(())
            })?;
        }
        _ => cursor.skip()?,
    }
    options.retain(|key, value| key != "detail" || value != "auto");
    Ok(found)
}

fn placed<'a>(cursor: &mut Cursor<'a>) -> Result<Source<'a>> {
    let start = cursor.position();
    let text = cursor.text()?;
    Ok((text, start..cursor.passed_to()))
}

#[cfg(test)]
mod tests;
