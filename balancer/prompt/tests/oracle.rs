//! The engine's own renderer as the measure: for every chat request recorded from vLLM 0.32, message rules, template and
//! tokenizer must give the token ids that `/v1/chat/completions/render` gave, and completions the counts that usage told.

#![expect(clippy::unwrap_used, reason = "a missing or broken vector must fail the test")]

use std::fs;
use std::path::{Path, PathBuf};

use fovea_prompt::tokenize::{Fast, Reference, Tokenize};
use fovea_prompt::{ChatInput, DateTime, Placeholders, PromptModel};
use serde_json::{Value, json};

/// `<|image_pad|>` of the tiny model.
const IMAGE_PAD: u32 = 593;

fn vectors() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/vllm")).to_owned()
}

fn model() -> PromptModel {
    PromptModel::load(&vectors().join("tiny-qwen3-vl")).unwrap()
}

/// All records of all capture files, with the file's name.
fn records() -> Vec<(String, Value)> {
    let mut files: Vec<PathBuf> = fs::read_dir(vectors()).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "jsonl"));
    files.sort();
    let read = |path: &PathBuf| {
        let name = path.file_stem().unwrap().to_string_lossy().into_owned();
        let text = fs::read_to_string(path).unwrap();
        let records: Vec<_> = text.lines().map(|line| (name.clone(), serde_json::from_str(line).unwrap())).collect();
        records
    };
    files.iter().flat_map(read).collect()
}

/// The request's messages with media parts replaced by the markers that the renderer takes.
fn marked(request: &Value) -> Value {
    let mut messages = request["messages"].clone();
    let contents = messages.as_array_mut().unwrap().iter_mut().filter_map(|message| message["content"].as_array_mut());
    for part in contents.flatten() {
        if ["image_url", "image_embeds"].iter().any(|key| part.get(key).is_some()) {
            *part = json!({"type": "image"});
        }
    }
    messages
}

fn render(model: &PromptModel, request: &Value) -> String {
    let input = ChatInput {
        messages: &marked(request),
        tools: request["tools"].as_array().map(Vec::as_slice),
        documents: None,
        chat_template: None,
        chat_template_kwargs: &request["chat_template_kwargs"].as_object().cloned().unwrap_or_default(),
        reasoning_effort: None,
        add_generation_prompt: request["add_generation_prompt"].as_bool().unwrap_or(true),
        continue_final_message: request["continue_final_message"].as_bool().unwrap_or(false),
        placeholders: Placeholders::default(),
        now: DateTime::default(),
    };
    model.render_chat(&input).unwrap()
}

/// Requests that the engine rendered, without those that carry prompt embeddings: as many positions as the tensor has rows.
fn rendered_chats() -> Vec<(String, Value)> {
    let mut records = records();
    records.retain(|(_, record)| !record["render"].is_null() && record["path"] == "/v1/chat/completions");
    records.retain(|(_, record)| !record["request"].to_string().contains(r#""type":"prompt_embeds""#));
    records
}

/// The engine's ids with each image's run of placeholders taken back to the one that the template wrote.
fn collapsed(render: &Value) -> Vec<u32> {
    let mut ids: Vec<u32> = serde_json::from_value(render["token_ids"].clone()).unwrap();
    let mut ranges: Vec<(usize, usize)> = Vec::new();
    for range in render["mm_placeholders"]["image"].as_array().into_iter().flatten() {
        let number = |key: &str| usize::try_from(range[key].as_u64().unwrap()).unwrap();
        ranges.push((number("offset"), number("length")));
    }
    ranges.sort_unstable();
    for (offset, length) in ranges.into_iter().rev() {
        ids.splice(offset..offset + length, [IMAGE_PAD]);
    }
    ids
}

#[test]
fn every_recorded_chat_gets_the_engines_token_ids() {
    let model = model();
    assert_eq!(model.tokenizer_name(), "fastokens");
    let records = rendered_chats();
    assert!(records.len() > 90, "only {} records", records.len());
    for (file, record) in records {
        let mut ids = Vec::new();
        model.encode(&render(&model, &record["request"]), false, &mut ids).unwrap();
        assert_eq!(ids, collapsed(&record["render"]), "{file}/{}", record["name"]);
    }
}

#[test]
fn every_recorded_completion_has_the_engines_token_count() {
    let model = model();
    let mut texts = 0;
    for (file, record) in records() {
        if record["path"] != "/v1/completions" || record["status"] != 200 || !record["request"].is_object() {
            continue;
        }
        let count = |text: &str| {
            let mut ids = Vec::new();
            model.encode(text, true, &mut ids).unwrap();
            ids.len()
        };
        let counted: usize = match &record["request"]["prompt"] {
            Value::String(text) => count(text),
            Value::Array(list) if list[0].is_string() => list.iter().map(|text| count(text.as_str().unwrap())).sum(),
            _ => continue,
        };
        texts += 1;
        assert_eq!(Some(counted as u64), record["usage"]["prompt_tokens"].as_u64(), "{file}/{}", record["name"]);
    }
    assert!(texts >= 2, "only {texts} text prompts");
}

fn collect_texts(value: &Value, texts: &mut Vec<String>) {
    match value {
        // Image data is no text that anybody tokenizes.
        Value::String(text) if text.len() < 4096 => texts.push(text.clone()),
        Value::Array(items) => items.iter().for_each(|item| collect_texts(item, texts)),
        Value::Object(members) => members.values().for_each(|item| collect_texts(item, texts)),
        _ => {}
    }
}

#[test]
fn both_tokenizers_give_the_same_ids() {
    let model = model();
    let json = fs::read_to_string(vectors().join("tiny-qwen3-vl/tokenizer.json")).unwrap();
    let fast = Fast::new(serde_json::from_str(&json).unwrap(), 1 << 20).unwrap();
    let reference = Reference::new(&json).unwrap();
    let mut texts: Vec<String> =
        ["", " ", "\n\n\t x", "e\u{301} é Å", "<|im_end|><|image_pad|>x", "a\u{0}b", "👩‍👩‍👧"].map(str::to_owned).into();
    records().iter().for_each(|(_, record)| collect_texts(&record["request"], &mut texts));
    texts.extend(rendered_chats().iter().map(|(_, record)| render(&model, &record["request"])));
    for text in &texts {
        for add_special_tokens in [false, true] {
            let (mut quick, mut sure) = (Vec::new(), Vec::new());
            fast.encode(text, add_special_tokens, &mut quick).unwrap();
            reference.encode(text, add_special_tokens, &mut sure).unwrap();
            assert_eq!(quick, sure, "{text:?}");
        }
    }
    for token in ["<|image_pad|>", "<|im_end|>", "the", "no such token"] {
        assert_eq!(fast.token_to_id(token), reference.token_to_id(token), "{token}");
    }
    assert_eq!(fast.token_to_id("<|image_pad|>"), Some(IMAGE_PAD));
}
