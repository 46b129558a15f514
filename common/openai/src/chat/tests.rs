use proptest::prelude::*;
use serde_json::json;

use crate::chat::ChatRequest;
use crate::completion::CompletionRequest;
use crate::cut::CutPolicy;
use crate::edit::Edits;
use crate::scan;

const FULL: &str = r#"{
  "model": "tiny-vl", "stream": true, "stream_options": {"include_usage": true}, "n": 2, "max_tokens": 5, "priority": -1,
  "cache_salt": "s", "user": "u", "session_id": "i", "prompt_cache_key": "p", "unknown": [1, {"a": "b"}],
  "mm_processor_kwargs": {"max_pixels": 5}, "media_io_kwargs": {}, "add_special_tokens": false,
  "tools": [{"type": "function", "function": {"name": "f"}}], "documents": [{"a": 1}], "reasoning_effort": "low",
  "chat_template_kwargs": {"enable_thinking": false}, "add_generation_prompt": false, "continue_final_message": "yes",
  "vllm_xargs": {"kv_cache_report_mode": "full"}, "kv_transfer_params": {"do_remote_decode": true},
  "messages": [
    {"role": "system", "content": "be\n\u00e9"},
    {"role": "user", "name": "n", "content": [
      {"type": "text", "text": "t"}, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}, "uuid": "k"}]},
    {"role": "assistant", "content": null, "tool_calls": [{"id": "c"}]},
    {"role": "user", "content": [{"image_url": "https://x/y"}]}
  ]
}"#;

#[test]
fn a_whole_request_is_read() {
    let request = ChatRequest::parse(FULL).unwrap();
    let common = &request.common;
    assert_eq!(common.model.as_deref(), Some("tiny-vl"));
    assert!(common.stream.on && common.stream.include_usage);
    assert_eq!((common.n, common.max_tokens, common.priority), (Some(2), Some(5), Some(-1)));
    assert_eq!((common.cache_salt.as_deref(), common.user.as_deref()), (Some("s"), Some("u")));
    assert_eq!((common.session_id.as_deref(), common.prompt_cache_key.as_deref()), (Some("i"), Some("p")));
    assert!(common.mm_processor_kwargs["max_pixels"] == 5 && common.media_io_kwargs.is_empty());
    assert_eq!(common.add_special_tokens, Some(false));
    assert_eq!(common.cuts.len(), 2);
    assert_eq!(request.tools.unwrap(), [json!({"type": "function", "function": {"name": "f"}})]);
    assert_eq!(request.documents.unwrap(), [json!({"a": 1})]);
    assert_eq!(request.reasoning_effort, Some(json!("low")));
    assert_eq!(request.chat_template_kwargs["enable_thinking"], false);
    assert!(!request.add_generation_prompt && request.continue_final_message);
    let messages = json!([
        {"role": "system", "content": "be\né"},
        {"role": "user", "name": "n", "content": [{"type": "text", "text": "t"}, {"type": "image"}]},
        {"role": "assistant", "content": null, "tool_calls": [{"id": "c"}]},
        {"role": "user", "content": [{"type": "image"}]},
    ]);
    assert_eq!(request.messages, messages);
    let places: Vec<_> = request.media.iter().map(|part| (part.message, part.url.as_deref())).collect();
    assert_eq!(places, [(1, Some("data:image/png;base64,AAAA")), (3, Some("https://x/y"))]);
    assert!(request.media.iter().all(|part| FULL.as_bytes()[part.insert_at - 1] == b'{'));
}

#[test]
fn what_is_absent_or_null_has_the_engines_default() {
    let request =
        ChatRequest::parse(r#"{"messages":[],"tools":null,"stream":null,"chat_template_kwargs":null,"n":"x"}"#)
            .unwrap();
    assert!(request.add_generation_prompt && !request.continue_final_message && !request.common.stream.on);
    assert!(request.tools.is_none() && request.chat_template_kwargs.is_empty() && request.common.n.is_none());
}

#[track_caller]
fn check_refused(body: &str, field: &str, offset: usize) {
    let error = ChatRequest::parse(body).unwrap_err();
    assert_eq!((error.field.as_str(), error.offset), (field, offset), "{error}");
}

#[test]
fn errors_name_the_field_and_the_place() {
    check_refused("", "body", 0);
    check_refused("[]", "body", 0);
    check_refused("{} x", "body", 3);
    check_refused(r#"{"model":"m"}"#, "messages", 0);
    check_refused(r#"{"messages":{}}"#, "messages", 12);
    check_refused(r#"{"messages":[7]}"#, "messages[0]", 13);
    check_refused(r#"{"messages":[{"content":"x"}]}"#, "messages[0]", 13);
    check_refused(r#"{"messages":[{"role":"user","content":7}]}"#, "messages[0].content", 38);
    check_refused(r#"{"messages":[{"role":"user","content":["a",{"type":3}]}]}"#, "messages[0].content[1].type", 51);
    check_refused(r#"{"messages":[],"tools":{}}"#, "tools", 23);
    check_refused(r#"{"messages":[],"stream":"maybe"}"#, "stream", 24);
    check_refused(r#"{"messages":[],"model":"a","model":"b"}"#, "model", 27);
    check_refused(r#"{"messages":[{"role":"user","content":"\ud800"}]}"#, "messages[0].content", 38);
}

#[test]
fn requests_that_would_fill_the_memory_are_refused() {
    let values = format!(r#"{{"messages":[{{"role":"user","content":"","x":[{}0]}}]}}"#, "0,".repeat(1 << 18));
    assert!(ChatRequest::parse(&values).unwrap_err().to_string().contains("262144"));
    let members: String = (0..300).map(|number| format!("\"{number}\":0,")).collect();
    assert!(
        ChatRequest::parse(&format!("{{{members}\"messages\":[]}}")).unwrap_err().to_string().contains("256 members")
    );
}

proptest! {
    /// Bytes of a good body are changed, taken out, or doubled.
    #[test]
    fn a_damaged_body_never_panics_and_edits_of_a_good_one_leave_json(
        damage in prop::collection::vec((0..FULL.len() - 8, any::<u8>(), 0..3), 1..4),
    ) {
        let mut bytes = FULL.as_bytes().to_vec();
        for (at, with, how) in damage {
            match how {
                0 => bytes[at] = with,
                1 => drop(bytes.remove(at)),
                _ => bytes.insert(at, bytes[at]),
            }
        }
        let Ok(body) = String::from_utf8(bytes) else { return Ok(()) };
        let _ = CompletionRequest::parse(&body);
        let read = ChatRequest::parse(&body);
        if let Ok(scan) = scan(&body, CutPolicy::default(), true) {
            let cut = Edits::new(scan.cuts, []).unwrap().apply(body.as_bytes());
            let value: serde_json::Value = serde_json::from_slice(&cut).unwrap();
            prop_assert!(value["kv_transfer_params"].is_null() && value["vllm_xargs"]["kv_cache_report_mode"].is_null());
        }
        if let Ok(read) = read {
            for part in &read.media {
                let edits = Edits::new(part.uuid_cut.clone(), [(part.insert_at, br#""uuid":"ours","#.to_vec())]).unwrap();
                let edited = edits.apply(body.as_bytes());
                serde_json::from_slice::<serde_json::Value>(&edited).unwrap();
            }
        }
    }
}

#[test]
fn fields_of_other_engines_that_set_blocks_apart_are_named() {
    let check = |rest: &str, namespace, prompt_ids, logprobs| {
        let body = format!(r#"{{"messages":[]{rest}}}"#);
        let common = ChatRequest::parse(&body).unwrap().common;
        assert_eq!((common.namespace, common.prompt_ids), (namespace, prompt_ids), "{body}");
        assert_eq!([common.prompt_logprobs, common.echo, common.logprobs], logprobs, "{body}");
        assert_eq!(body[..common.insert_at].chars().last(), Some('{'));
    };
    check(r#","extra_key":"t","input_ids":null"#, Some("extra_key"), None, [false; 3]);
    check(r#","lora_path":null,"input_ids":[1]"#, None, Some("input_ids"), [false; 3]);
    check(r#","echo":1,"logprobs":null,"prompt_logprobs":0"#, None, None, [true, false, false]);
    check(r#","echo":true,"logprobs":true"#, None, None, [false, true, true]);
}
