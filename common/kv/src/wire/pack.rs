//! Msgpack for tests.

use serde_json::Value;

/// Msgpack of a JSON value; `{"bin": n}` = n bytes of 7.
pub(crate) fn pack(value: &Value) -> Vec<u8> {
    let mut out = Vec::new();
    pack_into(&mut out, value);
    out
}

fn pack_into(out: &mut Vec<u8>, value: &Value) {
    match value {
        Value::Null => rmp::encode::write_nil(out).unwrap(),
        Value::Bool(value) => rmp::encode::write_bool(out, *value).unwrap(),
        Value::Number(value) if value.is_f64() => rmp::encode::write_f64(out, value.as_f64().unwrap()).unwrap(),
        Value::Number(value) if value.is_u64() => _ = rmp::encode::write_uint(out, value.as_u64().unwrap()).unwrap(),
        Value::Number(value) => _ = rmp::encode::write_sint(out, value.as_i64().unwrap()).unwrap(),
        Value::String(value) => rmp::encode::write_str(out, value).unwrap(),
        Value::Array(items) => {
            rmp::encode::write_array_len(out, items.len() as u32).unwrap();
            items.iter().for_each(|item| pack_into(out, item));
        }
        Value::Object(map) if map.contains_key("bin") => {
            rmp::encode::write_bin(out, &vec![7; map["bin"].as_u64().unwrap() as usize]).unwrap();
        }
        Value::Object(map) => {
            rmp::encode::write_map_len(out, map.len() as u32).unwrap();
            for (key, value) in map {
                rmp::encode::write_str(out, key).unwrap();
                pack_into(out, value);
            }
        }
    }
}
