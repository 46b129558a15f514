//! Which of a request's template variables reach the template (`resolve_chat_template_kwargs` and `build_chat_params` of vLLM).

use std::collections::HashSet;

use serde_json::{Map, Value};

use crate::error::RenderError;
use crate::input::ChatInput;

/// Parameters of the call itself, which engines refuse or which change more than the template.
const CALL: [&str; 5] = ["chat_template", "tokenize", "messages", "conversation", "tools"];

/// Parameters of transformers' `apply_chat_template`: taken by the call, so never variables of the template.
const PARAMETERS: [&str; 9] = [
    "add_generation_prompt",
    "continue_final_message",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
];

/// Variables from `chat_template_kwargs`, `documents` and `reasoning_effort`.
pub(super) fn select(input: &ChatInput<'_>, variables: &HashSet<String>) -> Result<Map<String, Value>, RenderError> {
    let given = input.chat_template_kwargs;
    if let Some(key) = CALL.iter().find(|key| given.contains_key(**key)) {
        return Err(RenderError::Kwarg { key: (*key).to_owned() });
    }
    let wanted = |key: &str| key == "documents" || (variables.contains(key) && !PARAMETERS.contains(&key));
    let mut kwargs: Map<String, Value> =
        given.iter().filter(|(key, _)| wanted(key)).map(|(key, value)| (key.clone(), value.clone())).collect();
    if let Some(documents) = input.documents {
        kwargs.insert("documents".to_owned(), Value::Array(documents.to_vec()));
    }
    if let Some(effort) = input.reasoning_effort {
        kwargs.insert("reasoning_effort".to_owned(), effort.clone());
        // vLLM turns thinking on with it, unless the client says otherwise.
        kwargs.entry("enable_thinking").or_insert(Value::Bool(effort != "none"));
    }
    Ok(kwargs)
}
