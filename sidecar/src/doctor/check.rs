//! What one check says, and how all of them are written out.

use std::io::{self, Write};

use serde::Serialize;

/// Longest text of an engine that is repeated, in characters.
const SHOWN_MAX: usize = 200;

/// What a check came to. `ok` is `None` when it could not be told; `found` then says why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub ok: Option<bool>,
    pub found: String,
    pub remedy: Option<String>,
}

impl Verdict {
    pub fn good(found: impl Into<String>) -> Self {
        Self { ok: Some(true), found: found.into(), remedy: None }
    }

    pub fn bad(found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self { ok: Some(false), found: found.into(), remedy: Some(remedy.into()) }
    }

    pub fn unknown(found: impl Into<String>) -> Self {
        Self { ok: None, found: found.into(), remedy: None }
    }

    #[must_use]
    pub fn remedy(mut self, text: impl Into<String>) -> Self {
        self.remedy = Some(text.into());
        self
    }

    pub fn named(self, name: &'static str) -> Check {
        Check { name, ok: self.ok, found: self.found, remedy: self.remedy }
    }
}

/// A verdict under its name, as it is printed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Check {
    pub name: &'static str,
    pub ok: Option<bool>,
    pub found: String,
    pub remedy: Option<String>,
}

/// All checks, in their order.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Report {
    pub checks: Vec<Check>,
    /// No check is false.
    pub ok: bool,
    /// Somebody answered at the engine's address.
    #[serde(skip)]
    pub reached: bool,
}

impl Report {
    pub fn new(checks: Vec<Check>, reached: bool) -> Self {
        let ok = checks.iter().all(|check| check.ok != Some(false));
        Self { checks, ok, reached }
    }

    /// Exit status: 0 all is well, 1 something is wrong, 2 the engine cannot be reached.
    pub fn status(&self) -> u8 {
        match (self.reached, self.ok) {
            (false, _) => 2,
            (true, false) => 1,
            (true, true) => 0,
        }
    }

    /// A line per check, for people.
    ///
    /// # Errors
    /// As the writer.
    pub fn write(&self, mut out: impl Write) -> io::Result<()> {
        for check in &self.checks {
            let mark = match check.ok {
                Some(true) => "ok",
                Some(false) => "WRONG",
                None => "-",
            };
            write!(out, "{mark:<6}{:<21}{}", check.name, check.found)?;
            match &check.remedy {
                Some(remedy) => writeln!(out, " => {remedy}")?,
                None => writeln!(out)?,
            }
        }
        Ok(())
    }

    /// One JSON object in one line.
    ///
    /// # Errors
    /// As the writer.
    pub fn write_json(&self, mut out: impl Write) -> io::Result<()> {
        serde_json::to_writer(&mut out, self)?;
        writeln!(out)
    }
}

/// Text of an engine, fit for a line of ours: no control characters, not endless.
pub fn shown(text: &str) -> String {
    let mut out: String = text.chars().take(SHOWN_MAX).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if text.chars().nth(SHOWN_MAX).is_some() {
        out.push('…');
    }
    out
}

/// An error and its causes in one line.
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut out = error.to_string();
    for cause in std::iter::successors(error.source(), |cause| cause.source()) {
        let cause = cause.to_string();
        if !out.ends_with(&cause) {
            out.push_str(": ");
            out.push_str(&cause);
        }
    }
    shown(&out)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(oks: &[Option<bool>], reached: bool) -> Report {
        let check = |&ok: &Option<bool>| Verdict { ok, found: "f".into(), remedy: None }.named("n");
        Report::new(oks.iter().map(check).collect(), reached)
    }

    #[test]
    fn what_cannot_be_told_is_no_fault() {
        assert_eq!(report(&[Some(true), None], true).status(), 0);
        assert_eq!(report(&[Some(true), Some(false)], true).status(), 1);
        assert_eq!(report(&[Some(false), None], false).status(), 2);
    }

    #[test]
    fn a_report_is_one_line_of_json_with_null_where_nothing_is_known() {
        let checks = vec![Verdict::unknown("why").named("clock"), Verdict::bad("is", "do").named("limits")];
        let mut out = Vec::new();
        Report::new(checks, true).write_json(&mut out).unwrap();
        let expect = r#"{"checks":[{"name":"clock","ok":null,"found":"why","remedy":null},{"name":"limits","ok":false,"found":"is","remedy":"do"}],"ok":false}"#;
        assert_eq!(String::from_utf8(out).unwrap(), format!("{expect}\n"));
    }

    #[test]
    fn text_of_an_engine_cannot_break_a_line() {
        assert_eq!(shown("a\nb\x1b[31m"), "a b [31m");
        assert_eq!(shown(&"x".repeat(300)).chars().count(), SHOWN_MAX + 1);
    }
}
