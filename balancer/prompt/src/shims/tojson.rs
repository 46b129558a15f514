//! `tojson` as Python's `json.dumps` writes: keys in order, ", " and ": ", no HTML escapes.

use minijinja::value::{Kwargs, Rest, Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::float;

/// Deepest nesting written, as deep as a request can be read.
const DEPTH_MAX: usize = 128;

struct Style {
    item_separator: String,
    key_separator: String,
    indent: Option<String>,
    ensure_ascii: bool,
    sort_keys: bool,
}

/// `tojson(ensure_ascii=false, indent=none, separators=none, sort_keys=false)`.
pub(super) fn filter(value: &Value, positional: Rest<Value>, kwargs: Kwargs) -> Result<String, Error> {
    let argument = |index: usize, name: &str| -> Result<Option<Value>, Error> {
        let named: Option<Value> = kwargs.get(name)?;
        Ok(named.or_else(|| positional.get(index).cloned()).filter(|value| !value.is_none() && !value.is_undefined()))
    };
    let flag = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let ensure_ascii = flag(argument(0, "ensure_ascii")?);
    let indent = argument(1, "indent")?.map(|indent| match indent.as_str() {
        Some(text) => text.to_owned(),
        // As wide as anybody indents; the value is the request's or the template's.
        None => " ".repeat(indent.as_usize().unwrap_or(0).min(64)),
    });
    let (item_separator, key_separator) = match argument(2, "separators")? {
        Some(pair) => (text_at(&pair, 0)?, text_at(&pair, 1)?),
        None => ((if indent.is_some() { "," } else { ", " }).to_owned(), ": ".to_owned()),
    };
    let sort_keys = flag(argument(3, "sort_keys")?);
    kwargs.assert_all_used()?;
    let mut out = String::new();
    Style { item_separator, key_separator, indent, ensure_ascii, sort_keys }.write(&mut out, value, 0)?;
    Ok(out)
}

fn text_at(pair: &Value, index: usize) -> Result<String, Error> {
    let item = pair.get_item_by_index(index)?;
    let text = item.as_str().map(str::to_owned);
    text.ok_or_else(|| Error::new(ErrorKind::InvalidOperation, "tojson: separators must be two texts"))
}

impl Style {
    fn write(&self, out: &mut String, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > DEPTH_MAX {
            return Err(Error::new(ErrorKind::InvalidOperation, "tojson: nested too deep"));
        }
        match value.kind() {
            ValueKind::None => out.push_str("null"),
            ValueKind::Bool => out.push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => match float::of(value).map(float::repr).as_deref() {
                Some("inf") => out.push_str("Infinity"),
                Some("-inf") => out.push_str("-Infinity"),
                Some("nan") => out.push_str("NaN"),
                Some(text) => out.push_str(text),
                None => out.push_str(&value.to_string()),
            },
            ValueKind::String => self.text(out, value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.group(out, ('[', ']'), &items, depth, |style, out, item| style.write(out, item, depth + 1))?;
            }
            ValueKind::Map => {
                let mut keys: Vec<Value> = value.try_iter()?.collect();
                if self.sort_keys {
                    keys.sort();
                }
                self.group(out, ('{', '}'), &keys, depth, |style, out, key| {
                    style.key(out, key);
                    out.push_str(&style.key_separator);
                    style.write(out, &value.get_item(key)?, depth + 1)
                })?;
            }
            _ => {
                let message = format!("tojson: a value of kind {} has no JSON form", value.kind());
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
        Ok(())
    }

    fn group(
        &self,
        out: &mut String,
        (open, close): (char, char),
        items: &[Value],
        depth: usize,
        write: impl Fn(&Self, &mut String, &Value) -> Result<(), Error>,
    ) -> Result<(), Error> {
        out.push(open);
        for (index, item) in items.iter().enumerate() {
            if index > 0 {
                out.push_str(&self.item_separator);
            }
            self.line(out, depth + 1);
            write(self, out, item)?;
        }
        if !items.is_empty() {
            self.line(out, depth);
        }
        out.push(close);
        Ok(())
    }

    fn line(&self, out: &mut String, depth: usize) {
        if let Some(indent) = &self.indent {
            out.push('\n');
            (0..depth).for_each(|_| out.push_str(indent));
        }
    }

    /// Keys are texts in JSON; other scalars are written as their JSON form in quotes.
    fn key(&self, out: &mut String, key: &Value) {
        match key.kind() {
            ValueKind::String => self.text(out, key.as_str().unwrap_or_default()),
            ValueKind::None => out.push_str("\"null\""),
            ValueKind::Bool => out.push_str(if key.is_true() { "\"true\"" } else { "\"false\"" }),
            _ => self.text(out, &float::of(key).map_or_else(|| key.to_string(), float::repr)),
        }
    }

    fn text(&self, out: &mut String, text: &str) {
        out.push('"');
        for character in text.chars() {
            match character {
                '"' => out.push_str("\\\""),
                '\\' => out.push_str("\\\\"),
                '\n' => out.push_str("\\n"),
                '\r' => out.push_str("\\r"),
                '\t' => out.push_str("\\t"),
                '\u{8}' => out.push_str("\\b"),
                '\u{c}' => out.push_str("\\f"),
                control if control < ' ' => unicode_escape(out, control),
                other if self.ensure_ascii && !(' '..='~').contains(&other) => unicode_escape(out, other),
                other => out.push(other),
            }
        }
        out.push('"');
    }
}

/// `\uXXXX`, as a surrogate pair beyond the basic plane.
fn unicode_escape(out: &mut String, character: char) {
    for unit in character.encode_utf16(&mut [0; 2]) {
        out.push_str(&format!("\\u{unit:04x}"));
    }
}
