//! A (text) completion body.

use std::borrow::Cow;

use crate::cut::CutPolicy;
use crate::error::ParseError;
use crate::json::{Cursor, Kind, Result};
use crate::top::Common;

/// What is to be completed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Prompt<'a> {
    Text(Cow<'a, str>),
    Texts(Vec<Cow<'a, str>>),
    Tokens(Vec<u32>),
    TokenLists(Vec<Vec<u32>>),
}

impl Prompt<'_> {
    /// Prompts in the request.
    pub fn count(&self) -> usize {
        match self {
            Self::Text(_) | Self::Tokens(_) => 1,
            Self::Texts(texts) => texts.len(),
            Self::TokenLists(lists) => lists.len(),
        }
    }
}

/// A completion request, borrowed from its body.
#[derive(Debug, Clone, PartialEq)]
pub struct CompletionRequest<'a> {
    pub common: Common<'a>,
    /// `None` when only embeddings were sent.
    pub prompt: Option<Prompt<'a>>,
    /// Given and not null: token positions that we cannot know.
    pub prompt_embeds: bool,
}

impl<'a> CompletionRequest<'a> {
    /// Reads a body. Unknown fields are checked for syntax and skipped.
    pub fn parse(body: &'a str) -> std::result::Result<Self, ParseError> {
        let mut cursor = Cursor::new(body);
        let policy = CutPolicy::default();
        let mut request = Self { common: Common::default(), prompt: None, prompt_embeds: false };
        let members = cursor.object(|cursor, key| {
            let read = request.member(cursor, key, policy);
            read.map_err(|error| error.within(key))
        })?;
        cursor.end()?;
        if request.prompt.is_none() && !request.prompt_embeds {
            return Err(Cursor::new(body).error("no `prompt`", "send text or token ids").within("prompt"));
        }
        request.common.cut_top(&members, policy);
        Ok(request)
    }

    fn member(&mut self, cursor: &mut Cursor<'a>, key: &str, policy: CutPolicy) -> Result<()> {
        match key {
            "prompt" => self.prompt = prompt(cursor)?,
            "prompt_embeds" => self.prompt_embeds = cursor.present()?,
            _ if self.common.member(cursor, key, policy)? => {}
            _ => cursor.skip()?,
        }
        Ok(())
    }
}

const PROMPT_FORMS: &str = "send a string, a list of strings, a list of token ids, or a list of such lists";

pub(crate) fn prompt<'a>(cursor: &mut Cursor<'a>) -> Result<Option<Prompt<'a>>> {
    match cursor.kind()? {
        Kind::Null => cursor.skip().map(|()| None),
        Kind::String => cursor.text().map(|text| Some(Prompt::Text(text))),
        Kind::Array => list(cursor).map(Some),
        _ => Err(cursor.error("not a prompt", PROMPT_FORMS)),
    }
}

fn list<'a>(cursor: &mut Cursor<'a>) -> Result<Prompt<'a>> {
    let (mut texts, mut tokens, mut lists) = (Vec::new(), Vec::new(), Vec::new());
    let mut first = None;
    let start = cursor.clone();
    cursor.array(|cursor, index| {
        let kind = cursor.kind()?;
        if *first.get_or_insert(kind) != kind {
            return Err(cursor.error("items of different kinds", PROMPT_FORMS));
        }
        match kind {
            Kind::String => texts.push(cursor.text()?),
            Kind::Number => tokens.push(token(cursor)?),
            Kind::Array => lists.push(token_list(cursor).map_err(|error| error.within_item(index))?),
            _ => return Err(cursor.error("not a prompt", PROMPT_FORMS)),
        }
        Ok(())
    })?;
    match first {
        Some(Kind::String) => Ok(Prompt::Texts(texts)),
        Some(Kind::Number) => Ok(Prompt::Tokens(tokens)),
        Some(_) => Ok(Prompt::TokenLists(lists)),
        None => Err(start.error("an empty list", PROMPT_FORMS)),
    }
}

fn token_list(cursor: &mut Cursor<'_>) -> Result<Vec<u32>> {
    let mut tokens = Vec::new();
    cursor.array(|cursor, _| {
        tokens.push(token(cursor)?);
        Ok(())
    })?;
    Ok(tokens)
}

fn token(cursor: &mut Cursor<'_>) -> Result<u32> {
    let start = cursor.clone();
    let span = cursor.span()?;
    let not_an_id = |_| start.error("not a token id", "send whole numbers from 0 to 4294967295");
    cursor.body[span].parse().map_err(not_an_id)
}

#[cfg(test)]
mod tests;
