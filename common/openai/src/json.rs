//! A strict JSON cursor that knows where everything stands and copies nothing.

use std::borrow::Cow;
use std::ops::Range;

use serde_json::{Map, Value};

use crate::error::ParseError;

/// Deepest nesting read, as serde_json's own limit.
pub(crate) const DEPTH_MAX: usize = 128;

/// Most members of an object that we look into. Real requests have a few dozen.
const MEMBERS_MAX: usize = 256;

/// Most values built for the template. One takes up to 100 times the bytes it has in the body, so this bounds memory to about 50 MB.
const BUILT_MAX: usize = 1 << 18;

const SYNTAX: &str = "send valid JSON";

pub(crate) type Result<T> = std::result::Result<T, ParseError>;

/// One member of an object: its key, and the bytes from the key's quote to the end of the value.
#[derive(Debug, Clone)]
pub(crate) struct Member<'a> {
    pub key: Cow<'a, str>,
    pub span: Range<usize>,
}

/// Reads forward through one body.
#[derive(Debug, Clone)]
pub(crate) struct Cursor<'a> {
    pub body: &'a str,
    at: usize,
    depth: usize,
    /// Values stepped over so far.
    passed: usize,
    /// Values built so far.
    built: usize,
}

/// The kind of the next value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Null,
    Bool,
    Number,
    String,
    Array,
    Object,
}

impl<'a> Cursor<'a> {
    pub fn new(body: &'a str) -> Self {
        Self { body, at: 0, depth: 0, passed: 0, built: 0 }
    }

    pub fn error(&self, problem: impl Into<String>, remedy: &'static str) -> ParseError {
        ParseError::new(self.body, self.at, problem, remedy)
    }

    /// Position of the next value's first byte.
    pub fn position(&mut self) -> usize {
        self.space();
        self.at
    }

    /// Position just behind what was read last.
    pub fn passed_to(&self) -> usize {
        self.at
    }

    pub fn kind(&mut self) -> Result<Kind> {
        self.space();
        Ok(match self.byte() {
            Some(b'n') => Kind::Null,
            Some(b't' | b'f') => Kind::Bool,
            Some(b'-' | b'0'..=b'9') => Kind::Number,
            Some(b'"') => Kind::String,
            Some(b'[') => Kind::Array,
            Some(b'{') => Kind::Object,
            Some(_) => return Err(self.error("not a JSON value", SYNTAX)),
            None => return Err(self.error("ends too early", SYNTAX)),
        })
    }

    /// Nothing but white space may follow.
    pub fn end(&mut self) -> Result<()> {
        self.space();
        if self.at == self.body.len() { Ok(()) } else { Err(self.error("more after the end of the object", SYNTAX)) }
    }

    /// Walks an object. `member` must consume exactly the value; the object's members are returned in order.
    pub fn object(&mut self, mut member: impl FnMut(&mut Self, &str) -> Result<()>) -> Result<Vec<Member<'a>>> {
        let mut members = Vec::new();
        self.enter(b'{')?;
        if !self.leave_if(b'}') {
            loop {
                let start = self.position();
                let key = self.text()?;
                if members.iter().any(|member: &Member<'_>| member.key == key) {
                    let problem = "given twice in one object";
                    return Err(ParseError::new(self.body, start, problem, "send each key once").within(&key));
                }
                if members.len() == MEMBERS_MAX {
                    return Err(self.error("more than 256 members", "send fewer members in one object"));
                }
                self.space();
                self.expect(b':')?;
                member(self, &key)?;
                members.push(Member { key, span: start..self.at });
                if self.next_or_close(b'}')? {
                    break;
                }
            }
        }
        Ok(members)
    }

    /// Walks an array. `item` must consume exactly the value.
    pub fn array(&mut self, mut item: impl FnMut(&mut Self, usize) -> Result<()>) -> Result<()> {
        self.enter(b'[')?;
        if !self.leave_if(b']') {
            for index in 0.. {
                item(self, index)?;
                if self.next_or_close(b']')? {
                    break;
                }
            }
        }
        Ok(())
    }

    /// Checks the next value and steps over it.
    pub fn skip(&mut self) -> Result<()> {
        self.span().map(|_| ())
    }

    /// Checks the next value and steps over it; where it stands.
    pub fn span(&mut self) -> Result<Range<usize>> {
        let kind = self.kind()?;
        let start = self.at;
        self.passed += 1;
        match kind {
            Kind::Null => self.word("null")?,
            Kind::Bool => self.word(if self.byte() == Some(b't') { "true" } else { "false" })?,
            Kind::Number => self.number()?,
            Kind::String => self.string().map(drop)?,
            Kind::Array => self.array(|cursor, _| cursor.skip())?,
            Kind::Object => self.skip_object()?,
        }
        Ok(start..self.at)
    }

    /// Steps over the next value; false for null.
    pub fn present(&mut self) -> Result<bool> {
        let kind = self.kind()?;
        self.skip()?;
        Ok(kind != Kind::Null)
    }

    /// The next value as a DOM; for small things only.
    pub fn value(&mut self) -> Result<Value> {
        let before = self.passed;
        let span = self.span()?;
        self.charge(self.passed - before)?;
        serde_json::from_str(&self.body[span.clone()]).map_err(|error| {
            ParseError::new(
                self.body,
                span.start,
                format!("unreadable value: {error}"),
                "send values that JSON readers agree on",
            )
        })
    }

    /// The next value as a small object; empty for null.
    pub fn map(&mut self) -> Result<Map<String, Value>> {
        match self.kind()? {
            Kind::Null | Kind::Object => match self.value()? {
                Value::Object(map) => Ok(map),
                _ => Ok(Map::new()),
            },
            _ => Err(self.error("not an object", "send an object, or leave the field out")),
        }
    }

    /// The next value as a flag, as vLLM's validation reads one; `None` for null.
    pub fn flag(&mut self) -> Result<Option<bool>> {
        let start = self.clone();
        Ok(match self.value()? {
            Value::Null => None,
            Value::Bool(flag) => Some(flag),
            Value::Number(number) if matches!(number.as_f64(), Some(0.0 | 1.0)) => Some(number.as_f64() == Some(1.0)),
            Value::String(text) => match text.to_ascii_lowercase().as_str() {
                "true" | "t" | "yes" | "y" | "on" | "1" => Some(true),
                "false" | "f" | "no" | "n" | "off" | "0" => Some(false),
                _ => return Err(start.error("not a boolean", "send true or false")),
            },
            _ => return Err(start.error("not a boolean", "send true or false")),
        })
    }

    /// Counts values that are built.
    pub fn charge(&mut self, values: usize) -> Result<()> {
        self.built += values;
        if self.built > BUILT_MAX {
            return Err(self.error("more than 262144 values in messages, tools and the like", "send fewer values"));
        }
        Ok(())
    }

    /// The next value, which must be a string: borrowed, unless it has escapes.
    pub fn text(&mut self) -> Result<Cow<'a, str>> {
        self.space();
        if self.byte() != Some(b'"') {
            return Err(self.error("not a string", "send a string"));
        }
        let start = self.at;
        let escaped = self.string()?;
        if !escaped {
            return Ok(Cow::Borrowed(&self.body[start + 1..self.at - 1]));
        }
        match serde_json::from_str(&self.body[start..self.at]) {
            Ok(text) => Ok(Cow::Owned(text)),
            Err(error) => Err(ParseError::new(self.body, start, format!("unreadable string: {error}"), SYNTAX)),
        }
    }

    /// The next value as text, `None` for null.
    pub fn text_or_null(&mut self) -> Result<Option<Cow<'a, str>>> {
        if self.kind()? == Kind::Null {
            return self.skip().map(|()| None);
        }
        self.text().map(Some)
    }

    fn skip_object(&mut self) -> Result<()> {
        self.enter(b'{')?;
        if self.leave_if(b'}') {
            return Ok(());
        }
        loop {
            self.space();
            if self.byte() != Some(b'"') {
                return Err(self.error("a key must be a string", SYNTAX));
            }
            self.string()?;
            self.space();
            self.expect(b':')?;
            self.skip()?;
            if self.next_or_close(b'}')? {
                return Ok(());
            }
        }
    }

    fn byte(&self) -> Option<u8> {
        self.body.as_bytes().get(self.at).copied()
    }

    fn space(&mut self) {
        while let Some(b' ' | b'\t' | b'\n' | b'\r') = self.byte() {
            self.at += 1;
        }
    }

    fn expect(&mut self, byte: u8) -> Result<()> {
        if self.byte() == Some(byte) {
            self.at += 1;
            return Ok(());
        }
        let found = self.body[self.at..]
            .chars()
            .next()
            .map_or("the end".to_owned(), |found| format!("`{}`", found.escape_debug()));
        Err(self.error(format!("expected `{}`, found {found}", char::from(byte)), SYNTAX))
    }

    fn enter(&mut self, open: u8) -> Result<()> {
        self.space();
        self.expect(open)?;
        self.depth += 1;
        if self.depth > DEPTH_MAX {
            return Err(self.error("nested deeper than 128 levels", "send a flatter value"));
        }
        Ok(())
    }

    fn leave_if(&mut self, close: u8) -> bool {
        self.space();
        let empty = self.byte() == Some(close);
        if empty {
            self.at += 1;
            self.depth -= 1;
        }
        empty
    }

    /// After a member or item: steps over a comma (false) or the end (true).
    fn next_or_close(&mut self, close: u8) -> Result<bool> {
        self.space();
        if self.byte() == Some(b',') {
            self.at += 1;
            return Ok(false);
        }
        self.expect(close)?;
        self.depth -= 1;
        Ok(true)
    }

    fn word(&mut self, word: &str) -> Result<()> {
        if !self.body[self.at..].starts_with(word) {
            return Err(self.error(format!("expected `{word}`"), SYNTAX));
        }
        self.at += word.len();
        Ok(())
    }

    fn digits(&mut self) -> Result<()> {
        let start = self.at;
        while let Some(b'0'..=b'9') = self.byte() {
            self.at += 1;
        }
        if self.at == start { Err(self.error("expected a digit", SYNTAX)) } else { Ok(()) }
    }

    fn number(&mut self) -> Result<()> {
        if self.byte() == Some(b'-') {
            self.at += 1;
        }
        if self.byte() == Some(b'0') {
            self.at += 1;
        } else {
            self.digits()?;
        }
        if self.byte() == Some(b'.') {
            self.at += 1;
            self.digits()?;
        }
        if let Some(b'e' | b'E') = self.byte() {
            self.at += 1;
            if let Some(b'+' | b'-') = self.byte() {
                self.at += 1;
            }
            self.digits()?;
        }
        Ok(())
    }

    /// Steps over a string, checking it; says whether it has escapes.
    fn string(&mut self) -> Result<bool> {
        let bytes = self.body.as_bytes();
        let mut escaped = false;
        self.at += 1;
        loop {
            self.at += plain_len(&bytes[self.at..]);
            match self.byte() {
                Some(b'"') => {
                    self.at += 1;
                    return Ok(escaped);
                }
                Some(b'\\') => {
                    escaped = true;
                    self.escape()?;
                }
                Some(_) => return Err(self.error("control character in a string", "escape it as \\uXXXX")),
                None => return Err(self.error("string without an end", SYNTAX)),
            }
        }
    }

    fn escape(&mut self) -> Result<()> {
        let rest = &self.body.as_bytes()[self.at + 1..];
        let len = match rest.first() {
            Some(b'"' | b'\\' | b'/' | b'b' | b'f' | b'n' | b'r' | b't') => 2,
            Some(b'u') if rest.len() >= 5 && rest[1..5].iter().all(u8::is_ascii_hexdigit) => 6,
            _ => return Err(self.error("unknown escape in a string", SYNTAX)),
        };
        self.at += len;
        Ok(())
    }
}

/// Bytes before the next quote, backslash or control character. Works on blocks without branches inside, so that the
/// compiler can use vector instructions: base64 of megabytes passes here.
fn plain_len(bytes: &[u8]) -> usize {
    let special = |byte: u8| (byte == b'"') | (byte == b'\\') | (byte < 0x20);
    let (blocks, _) = bytes.as_chunks::<64>();
    let plain =
        blocks.iter().take_while(|block| !block.iter().fold(false, |any, &byte| any | special(byte))).count() * 64;
    plain + bytes[plain..].iter().take_while(|&&byte| !special(byte)).count()
}

#[cfg(test)]
mod tests;
