//! Captures of a real vLLM, read for tests.
use engine_sim::hash::{Digest, ExtraKey};
use serde_json::Value;
use std::path::PathBuf;

pub const MODEL_STRING: &str = "./tiny-qwen3-vl";

pub fn vectors() -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../vectors/vllm"))
}

/// Records of all files that belong to `run`, in order of event sequence; those without frames stay with their file.
pub fn records(run: &str) -> Vec<Value> {
    let mut files: Vec<_> = std::fs::read_dir(vectors()).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|kind| kind == "jsonl"));
    let skipped = ["replay.jsonl", "legacy_encodings.jsonl"];
    files.retain(|path| !skipped.iter().any(|name| path.ends_with(name)));
    let mut groups: Vec<(u64, Vec<Value>)> = Vec::new();
    for path in files {
        let text = std::fs::read_to_string(path).unwrap();
        let group = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        let group: Vec<Value> = group.filter(|record| record["run"] == run).collect();
        let first = group.iter().find_map(|record| record["decoded"][0]["seq"].as_u64()).unwrap_or(u64::MAX);
        groups.push((first, group));
    }
    groups.sort_by_key(|(first, _)| *first);
    groups.into_iter().flat_map(|(_, group)| group).collect()
}

/// An event's hash: an integer, or `{"bytes": hex}`.
pub fn is_published(digest: &Digest, published: &Value) -> bool {
    match published.as_u64() {
        Some(low) => digest.low64() == low,
        None => published["bytes"] == digest.hex(),
    }
}

/// Tags published extra keys of one block.
pub fn tag(keys: &Value, lora_name: Option<&str>) -> Vec<ExtraKey> {
    let keys = keys.as_array().map(Vec::as_slice).unwrap_or_default();
    let tagged = keys.iter().enumerate().map(|(i, key)| match (key, lora_name) {
        (Value::Array(pair), _) => {
            ExtraKey::Media { id: pair[0].as_str().unwrap().to_owned(), offset: pair[1].as_i64().unwrap() }
        }
        (Value::Object(bytes), _) => ExtraKey::Embeds(from_hex(bytes["bytes"].as_str().unwrap())),
        (Value::String(name), Some(_)) if i == 0 => {
            ExtraKey::Lora { name: name.clone(), path: format!("{MODEL_STRING}-lora") }
        }
        (key, _) => ExtraKey::Salt(key.as_str().unwrap().to_owned()),
    });
    tagged.collect()
}

fn from_hex(text: &str) -> Vec<u8> {
    (0..text.len() / 2).map(|i| u8::from_str_radix(&text[2 * i..2 * i + 2], 16).unwrap()).collect()
}

pub fn tokens(list: &Value) -> Vec<u32> {
    list.as_array().unwrap().iter().map(|token| u32::try_from(token.as_u64().unwrap()).unwrap()).collect()
}
