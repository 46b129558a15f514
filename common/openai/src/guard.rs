//! What a client must not send to an engine, whatever the rest of its request says.
//!
//! One request with embeddings of wrong sides ends the whole process of vLLM 0.32 (measured: `image_embeds` narrower than the model's, rows that
//! are not those of their grid, `prompt_embeds` beside an image). An honest user of embeddings is let in by config.

use crate::part::{MediaKind, MediaPart};
use crate::top::Common;
use crate::{ChatRequest, CompletionRequest};

/// Longest cache salt, in bytes.
const SALT_MAX: usize = 128;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Hazard {
    #[error(
        "{field}: embeddings are not taken from clients, since a wrong one ends the engine; send text or the media itself"
    )]
    Embeddings { field: &'static str },
    #[error(
        "cache_salt: longer than {SALT_MAX} bytes, or with characters outside A-Z a-z 0-9 _ . : -; send a shorter, plain one"
    )]
    CacheSalt,
}

impl Hazard {
    /// The field to name in an error answer.
    pub fn field(self) -> &'static str {
        match self {
            Self::Embeddings { field } => field,
            Self::CacheSalt => "cache_salt",
        }
    }
}

impl ChatRequest<'_> {
    /// The first thing in the request that an engine must not see.
    pub fn hazard(&self, embeddings_allowed: bool) -> Option<Hazard> {
        of(&self.common, &self.media, false, embeddings_allowed)
    }
}

impl CompletionRequest<'_> {
    /// The first thing in the request that an engine must not see.
    pub fn hazard(&self, embeddings_allowed: bool) -> Option<Hazard> {
        of(&self.common, &[], self.prompt_embeds, embeddings_allowed)
    }
}

pub(crate) fn of(
    common: &Common<'_>,
    media: &[MediaPart<'_>],
    prompt_embeds: bool,
    embeddings_allowed: bool,
) -> Option<Hazard> {
    let embedded = |part: &MediaPart<'_>| matches!(part.kind, MediaKind::Embedding | MediaKind::PromptEmbedding);
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'.' | b':' | b'-');
    if !embeddings_allowed && prompt_embeds {
        return Some(Hazard::Embeddings { field: "prompt_embeds" });
    }
    if !embeddings_allowed && media.iter().any(embedded) {
        return Some(Hazard::Embeddings { field: "messages" });
    }
    let salt = common.cache_salt.as_deref().unwrap_or_default();
    (salt.len() > SALT_MAX || !salt.bytes().all(plain)).then_some(Hazard::CacheSalt)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(rest: &str, expect: Option<&str>) {
        let part = r#"{"role":"user","content":[{"type":"text","text":"t"}]}"#;
        let body = format!(r#"{{"messages":[{part}{rest}}}"#);
        let found = ChatRequest::parse(&body).unwrap().hazard(false).map(Hazard::field);
        assert_eq!(found, expect, "{body}");
    }

    #[test]
    fn embeddings_in_a_chat_are_a_hazard() {
        for part in [
            r#"{"type":"image_embeds","image_embeds":{"image_embeds":"AA"}}"#,
            r#"{"type":"image_embeds","image_embeds":null,"uuid":"u"}"#,
            r#"{"type":"prompt_embeds","data":"AA"}"#,
        ] {
            check(&format!(r#",{{"role":"user","content":[{part}]}}]"#), Some("messages"));
        }
        check("]", None);
    }

    #[test]
    fn embeddings_in_a_completion_are_a_hazard_unless_allowed() {
        let request = CompletionRequest::parse(r#"{"prompt_embeds":"AA"}"#).unwrap();
        assert_eq!(request.hazard(false), Some(Hazard::Embeddings { field: "prompt_embeds" }));
        assert_eq!(request.hazard(true), None);
        assert_eq!(CompletionRequest::parse(r#"{"prompt":"a","prompt_embeds":null}"#).unwrap().hazard(false), None);
    }

    #[test]
    fn a_salt_is_short_and_plain() {
        check(r#"],"cache_salt":"tenant-1:a.b_C""#, None);
        check(&format!(r#"],"cache_salt":"{}""#, "a".repeat(128)), None);
        check(&format!(r#"],"cache_salt":"{}""#, "a".repeat(129)), Some("cache_salt"));
        check(r#"],"cache_salt":"a b""#, Some("cache_salt"));
        check(r#"],"cache_salt":"é""#, Some("cache_salt"));
    }
}
