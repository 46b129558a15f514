//! What is wrong with a body, where, and what the client can do about it.

use std::fmt::Write as _;

/// A body that cannot be read as the request it should be: the client's fault.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {problem} (line {line}, column {column}); {remedy}")]
pub struct ParseError {
    /// Byte offset into the body.
    pub offset: usize,
    /// From 1.
    pub line: usize,
    /// In bytes, from 1.
    pub column: usize,
    /// Path of the field, such as `messages[2].content[0].uuid`; `body` for the whole.
    pub field: String,
    /// What was found.
    pub problem: String,
    /// What to send instead.
    pub remedy: &'static str,
}

impl ParseError {
    pub(crate) fn new(body: &str, offset: usize, problem: impl Into<String>, remedy: &'static str) -> Self {
        let before = &body.as_bytes()[..offset.min(body.len())];
        let line_start = before.iter().rposition(|&byte| byte == b'\n').map_or(0, |at| at + 1);
        Self {
            offset,
            line: 1 + before.iter().filter(|&&byte| byte == b'\n').count(),
            column: 1 + before.len() - line_start,
            field: "body".to_owned(),
            problem: problem.into(),
            remedy,
        }
    }

    /// Names the field the error is in; outer names are put in front.
    pub(crate) fn within(mut self, outer: &str) -> Self {
        if self.field == "body" {
            self.field.clear();
        }
        if !self.field.is_empty() && !self.field.starts_with('[') {
            self.field.insert(0, '.');
        }
        self.field.insert_str(0, outer);
        self
    }

    /// As [`within`](Self::within), for an item of an array.
    pub(crate) fn within_item(self, index: usize) -> Self {
        let mut name = String::new();
        // Writing to a String cannot fail.
        let _ = write!(name, "[{index}]");
        self.within(&name)
    }
}
