//! Chats in a real template: any messages, tools and options are a prompt with tokens, or an error; never a hang, a panic or deep recursion.
#![no_main]

use std::path::Path;
use std::sync::LazyLock;

use fovea_prompt::{ChatInput, DateTime, Placeholders, PromptModel};
use libfuzzer_sys::fuzz_target;
use serde_json::{Map, Value};

static MODEL: LazyLock<PromptModel> = LazyLock::new(|| {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../vectors/vllm/tiny-qwen3-vl");
    PromptModel::load(&dir).expect("the committed model loads")
});

fuzz_target!(|input: (&str, bool, bool)| {
    let (text, add_generation_prompt, continue_final_message) = input;
    // An object gives everything that a request may; anything else is the messages.
    let body: Value =
        serde_json::from_str(text).unwrap_or_else(|_| serde_json::json!([{"role": "user", "content": text}]));
    let list = |key: &str| body.get(key).and_then(Value::as_array).map(Vec::as_slice);
    let kwargs = body.get("chat_template_kwargs").and_then(Value::as_object).cloned().unwrap_or_else(Map::new);
    let chat = ChatInput {
        messages: body.get("messages").unwrap_or(&body),
        tools: list("tools"),
        documents: list("documents"),
        chat_template: None,
        chat_template_kwargs: &kwargs,
        reasoning_effort: body.get("reasoning_effort"),
        add_generation_prompt,
        continue_final_message,
        placeholders: Placeholders { image: "<|vision_start|><|image_pad|><|vision_end|>", ..Placeholders::default() },
        now: DateTime::constant(2026, 1, 31, 12, 0, 0, 0),
    };
    if let Ok(prompt) = MODEL.render_chat(&chat) {
        let _ = MODEL.encode(&prompt, false, &mut Vec::new());
    }
});
