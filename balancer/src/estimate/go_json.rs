//! JSON as Go's `encoding/json` writes a decoded value again: sorted keys, no white space.

use serde_json::Value;

/// Whole numbers up to here are the same in every reader.
const WHOLE_MAX: u64 = 1 << 53;

/// `None` where a number has a fraction, an exponent or more digits than a float holds: how llm-d keeps these is not known.
pub fn text(value: &Value) -> Option<String> {
    let mut out = String::new();
    write(value, &mut out)?;
    Some(out)
}

fn write(value: &Value, out: &mut String) -> Option<()> {
    match value {
        Value::Null | Value::Bool(_) => out.push_str(&value.to_string()),
        Value::Number(number) => {
            number.as_i64().filter(|number| number.unsigned_abs() <= WHOLE_MAX)?;
            out.push_str(&number.to_string());
        }
        Value::String(text) => string(text, out),
        Value::Array(items) => {
            out.push('[');
            for (at, item) in items.iter().enumerate() {
                out.push_str(if at > 0 { "," } else { "" });
                write(item, out)?;
            }
            out.push(']');
        }
        Value::Object(members) => {
            let mut members: Vec<_> = members.iter().collect();
            members.sort_unstable_by_key(|(key, _)| *key);
            out.push('{');
            for (at, (key, item)) in members.into_iter().enumerate() {
                out.push_str(if at > 0 { "," } else { "" });
                string(key, out);
                out.push(':');
                write(item, out)?;
            }
            out.push('}');
        }
    }
    Some(())
}

/// As any JSON string, and safe inside HTML and JavaScript.
fn string(text: &str, out: &mut String) {
    for c in Value::from(text).to_string().chars() {
        match c {
            '<' | '>' | '&' | '\u{2028}' | '\u{2029}' => out.push_str(&format!("\\u{:04x}", u32::from(c))),
            _ => out.push(c),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn keys_are_sorted_and_angle_brackets_escaped() {
        let value = json!({"z": [1, -2, null, true], "a": {"<b>": "x & \"y\"\n\u{2028}é"}});
        let expect = "{\"a\":{\"\\u003cb\\u003e\":\"x \\u0026 \\\"y\\\"\\n\\u2028é\"},\"z\":[1,-2,null,true]}";
        assert_eq!(text(&value).unwrap(), expect);
    }

    #[test]
    fn numbers_that_readers_differ_on_are_not_written() {
        assert_eq!(text(&json!(1_u64 << 53)).unwrap(), "9007199254740992");
        for number in [json!(1.5), json!(1.0), json!((1_u64 << 53) + 1), json!(u64::MAX), json!([{"a": -0.0}])] {
            assert_eq!(text(&number), None, "{number}");
        }
    }
}
