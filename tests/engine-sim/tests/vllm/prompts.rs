//! Prompt tokens, image identities and places, held to vLLM's own renderer.

use crate::support::{MODEL_STRING, records, tokens, vectors};
use engine_sim::image;
use engine_sim::prompt::{MediaCache, Model, decode_data_url};
use serde_json::{Value, json};

/// Renders a request as the engine would and compares; false when it is of a kind that is left out.
fn check(model: &Model, record: &Value, cache: &mut MediaCache) -> bool {
    let body = record["request"].as_object().unwrap();
    let kwargs = body.contains_key("mm_processor_kwargs") || body.contains_key("media_io_kwargs");
    if record["render"].is_null() || kwargs || record["path"] != "/v1/chat/completions" {
        return false;
    }
    let Ok((text, parts)) = model.render(body) else { return false };
    let mut images = Vec::new();
    for (index, part) in parts.iter().enumerate() {
        if part.url.as_deref().is_some_and(|url| !url.starts_with("data:")) {
            return false;
        }
        let bytes = part.url.as_deref().map(|url| decode_data_url(url).unwrap());
        let image = model.resolve(index, part.uuid.as_deref(), bytes.as_deref(), MODEL_STRING, cache);
        images.push(image.unwrap());
    }
    let prompt = model.expand(&model.encode(&text, false).unwrap(), &images).unwrap();
    let name = &record["name"];
    assert_eq!(prompt.tokens, tokens(&record["render"]["token_ids"]), "{name}: {text}");
    let ids: Value = prompt.media.iter().map(|span| span.id.as_str()).collect();
    let places: Value = prompt.media.iter().map(|span| json!({"offset": span.start, "length": span.tokens})).collect();
    assert_eq!(ids, or_empty(&record["render"]["mm_hashes"]["image"]), "{name}");
    assert_eq!(places, or_empty(&record["render"]["mm_placeholders"]["image"]), "{name}");
    true
}

fn or_empty(list: &Value) -> Value {
    if list.is_null() { json!([]) } else { list.clone() }
}

#[test]
fn prompts_are_those_of_vllm() {
    let model = Model::load(&vectors().join("tiny-qwen3-vl")).unwrap();
    let mut compared = 0;
    for run in ["main", "bytes", "pool"] {
        let mut cache = MediaCache::default();
        for record in records(run) {
            if record["path"] == "/reset_mm_cache" {
                cache.clear();
            } else if record["request"].is_object() {
                compared += usize::from(check(&model, &record, &mut cache));
            }
        }
    }
    assert!(compared > 90, "{compared}");
}

#[test]
fn images_are_keyed_and_counted_as_vllm_does() {
    let text = std::fs::read_to_string(vectors().join("image_ids.json")).unwrap();
    let model = Model::load(&vectors().join("tiny-qwen3-vl")).unwrap();
    for row in serde_json::from_str::<Value>(&text).unwrap()["images"].as_array().unwrap() {
        let file = row["file"].as_str().unwrap();
        let bytes = std::fs::read(vectors().join("images").join(file)).unwrap();
        let picture = image::read(&bytes).unwrap();
        assert_eq!(row["vllm_default_id"], image::default_id(&bytes, picture.converted, MODEL_STRING), "{file}");
        let count = model.image_tokens(picture.width, picture.height).unwrap();
        assert_eq!(row["image_tokens"], count, "{file}");
    }
}
