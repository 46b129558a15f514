//! Msgpack of a JSON value, every number and length in its widest form.

use serde_json::Value;

pub(super) fn pack(value: &Value) -> Vec<u8> {
    let mut out = Vec::new();
    put(&mut out, value);
    out
}

fn put(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::Null => out.push(0xc0),
        Value::Bool(value) => out.push(0xc2 + u8::from(*value)),
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(number), _) => fixed(out, 0xcf, number.to_be_bytes()),
            (None, Some(number)) => fixed(out, 0xd3, number.to_be_bytes()),
            (None, None) => fixed(out, 0xcb, number.as_f64().unwrap_or(0.0).to_be_bytes()),
        },
        Value::String(text) => string(out, text),
        Value::Array(items) => {
            sized(out, 0xdd, items.len());
            items.iter().for_each(|item| put(out, item));
        }
        Value::Object(map) => {
            sized(out, 0xdf, map.len());
            for (key, value) in map {
                string(out, key);
                put(out, value);
            }
        }
    }
}

fn fixed(out: &mut Vec<u8>, marker: u8, bytes: [u8; 8]) {
    out.push(marker);
    out.extend(bytes);
}

fn sized(out: &mut Vec<u8>, marker: u8, len: usize) {
    out.push(marker);
    out.extend(u32::try_from(len).unwrap_or(u32::MAX).to_be_bytes());
}

fn string(out: &mut Vec<u8>, text: &str) {
    sized(out, 0xdb, text.len());
    out.extend(text.as_bytes());
}
