//! What we call a media item before it is known how an engine keys it. Equal in every balancer.

use fovea_kv::MediaKey;
use serde_json::{Map, Value};

/// Who names the item to the engine: an engine may key equal bytes otherwise by who does.
#[derive(Clone, Copy, Debug)]
pub(super) enum Naming<'a> {
    /// Nobody: the engine's own default.
    Engine,
    /// We, by the content's identity.
    Ours,
    /// The client, by a uuid that is kept.
    Client(&'a str),
}

/// Options of a request by where they stand, such as `("mm_processor_kwargs", …)`.
pub(super) type NamedOptions<'a> = (&'static str, &'a Map<String, Value>);

/// The key of an item with these `content` bytes' hash, under options that may change what the engine makes of it. Options without
/// members do not enter, and their order in the request does not count. `lora` = adapter by which the engine may key it apart, "" = none.
pub(super) fn content_key(
    content: &[u8; 32],
    naming: Naming<'_>,
    lora: &str,
    options: &[NamedOptions<'_>],
) -> MediaKey {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"fovea-media").update(content);
    match naming {
        Naming::Engine => sized(&mut hasher, 0, b""),
        Naming::Ours => sized(&mut hasher, 1, b""),
        Naming::Client(uuid) => sized(&mut hasher, 2, uuid.as_bytes()),
    }
    if !lora.is_empty() {
        sized(&mut hasher, 8, lora.as_bytes());
    }
    for (name, map) in options.iter().filter(|(_, map)| !map.is_empty()) {
        sized(&mut hasher, 3, name.as_bytes());
        object(&mut hasher, map);
    }
    MediaKey(*hasher.finalize().as_bytes())
}

/// The key of an item that a URL policy names, under options as in [`content_key`].
pub(super) fn url_key(named: MediaKey, lora: &str, options: &[NamedOptions<'_>]) -> MediaKey {
    match lora.is_empty() && options.iter().all(|(_, map)| map.is_empty()) {
        true => named,
        false => content_key(&named.0, Naming::Engine, lora, options),
    }
}

/// A tag, a length, the bytes: no two lists of these are the same bytes.
fn sized(hasher: &mut blake3::Hasher, tag: u8, bytes: &[u8]) {
    hasher.update(&[tag]).update(&(bytes.len() as u64).to_le_bytes()).update(bytes);
}

fn object(hasher: &mut blake3::Hasher, map: &Map<String, Value>) {
    let mut members: Vec<_> = map.iter().collect();
    members.sort_by_key(|(name, _)| *name);
    sized(hasher, 4, &(members.len() as u64).to_le_bytes());
    for (name, member) in members {
        sized(hasher, 5, name.as_bytes());
        value(hasher, member);
    }
}

/// The depth is that of the parsed request, which is bounded.
fn value(hasher: &mut blake3::Hasher, value_: &Value) {
    match value_ {
        Value::Object(map) => object(hasher, map),
        Value::Array(items) => {
            sized(hasher, 6, &(items.len() as u64).to_le_bytes());
            items.iter().for_each(|item| value(hasher, item));
        }
        plain => sized(hasher, 7, plain.to_string().as_bytes()),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn key(options: &Value) -> MediaKey {
        content_key(&[1; 32], Naming::Engine, "", &[("o", options.as_object().unwrap())])
    }

    #[test]
    fn the_order_of_options_does_not_count_and_their_values_do() {
        assert_eq!(key(&json!({"a": 1, "b": {"c": [1], "d": 2}})), key(&json!({"b": {"d": 2, "c": [1]}, "a": 1})));
        let all =
            [json!({}), json!({"a": 1}), json!({"a": "1"}), json!({"a": [1]}), json!({"a": null}), json!({"b": 1})];
        let keys: std::collections::HashSet<_> = all.iter().map(key).collect();
        assert_eq!(keys.len(), all.len());
    }

    #[test]
    fn who_names_an_item_counts() {
        let key = |naming| content_key(&[1; 32], naming, "", &[]);
        assert_ne!(key(Naming::Engine), key(Naming::Ours));
        assert_ne!(key(Naming::Client("a")), key(Naming::Client("b")));
    }

    #[test]
    fn a_url_without_options_is_its_own_key() {
        let (named, some) = (MediaKey([2; 32]), json!({"a": 1}));
        assert_eq!(url_key(named, "", &[("o", &Map::new())]), named);
        assert_ne!(url_key(named, "a", &[]), named);
        assert_ne!(url_key(named, "", &[("o", some.as_object().unwrap())]), named);
    }
}
