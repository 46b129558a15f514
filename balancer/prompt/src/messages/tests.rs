use serde_json::{Value, json};

use super::{adapt_roles, normalise, normalise_tools};
use crate::input::Placeholders;
use crate::template::ContentFormat::{self, OpenAi, String};

const PLACEHOLDERS: Placeholders<'static> = Placeholders { image: "<img>", video: "<vid>", audio: "" };

fn run(message: &Value, format: ContentFormat) -> Result<Value, std::string::String> {
    let normalised = normalise(&json!([message]), format, &PLACEHOLDERS).map_err(|error| error.to_string())?;
    Ok(Value::Object(normalised.into_iter().next().expect("one message gives one")))
}

#[track_caller]
fn check(format: ContentFormat, message: Value, expect: Value) {
    assert_eq!(run(&message, format), Ok(expect), "{message}");
}

#[track_caller]
fn check_content(format: ContentFormat, content: Value, expect: Value) {
    check(format, json!({"role": "user", "content": content}), json!({"role": "user", "content": expect}));
}

#[track_caller]
fn check_refused(format: ContentFormat, message: Value, problem: &str) {
    let error = run(&message, format).unwrap_err();
    assert!(error.contains(problem), "{message}: {error}");
}

#[test]
fn content_becomes_a_list_of_parts() {
    check_content(OpenAi, Value::Null, json!([]));
    check_content(OpenAi, json!("t"), json!([{"type": "text", "text": "t"}]));
    check_content(OpenAi, json!(["t", {"type": "text", "text": null}]), json!([{"type": "text", "text": "t"}]));
    check_content(
        OpenAi,
        json!([{"type": "image", "k": 1}, {"type": "audio"}]),
        json!([{"type": "image", "k": 1}, {"type": "audio"}]),
    );
    check_content(
        OpenAi,
        json!([{"type": "thinking", "thinking": "h", "closed": true, "k": 1}, {"type": "refusal", "refusal": "no"}]),
        json!([{"type": "text", "text": "h", "k": 1}, {"type": "text", "text": "no"}]),
    );
    check_content(
        OpenAi,
        json!([{"type": "tool_reference", "name": "f"}]),
        json!([{"type": "tool_reference", "name": "f"}]),
    );
}

#[test]
fn content_becomes_one_text_with_missing_placeholders_in_front() {
    check_content(String, Value::Null, json!(""));
    check_content(String, json!(["a", "", {"type": "text", "text": "b"}]), json!("a\nb"));
    check_content(
        String,
        json!(["a", {"type": "image"}, {"type": "video"}, {"type": "image"}]),
        json!("<img>\n<img>\n<vid>\na"),
    );
    check_content(String, json!([{"type": "image"}, "see <img>", {"type": "image"}]), json!("<img>\nsee <img>"));
    check_content(String, json!([{"type": "image"}]), json!("<img>"));
    check_content(String, json!([{"type": "audio"}, "x"]), json!("x"));
    check_refused(String, json!({"role": "user", "content": [{"type": "image"}, "<img><img>"]}), "more placeholders");
}

#[test]
fn unknown_parts_and_wrong_types_are_told() {
    check_refused(OpenAi, json!({"role": "user", "content": [{"type": "video_clip"}]}), "video_clip");
    check_refused(OpenAi, json!({"role": "user", "content": [{"type": "text", "text": 7}]}), "not a string");
    check_refused(OpenAi, json!({"role": "user", "content": 7}), "neither text nor parts");
    check_refused(OpenAi, json!({"content": "x"}), "role");
    check_refused(OpenAi, json!(7), "not an array of objects");
}

#[test]
fn the_billing_header_leaves_system_messages() {
    let system = |content: Value| json!({"role": "system", "content": content});
    check(String, system(json!("x-anthropic-billing-header: 1\nrest")), system(json!("rest")));
    check(
        OpenAi,
        system(json!(["x-anthropic-billing-header: 1", "b"])),
        system(json!([{"type": "text", "text": "b"}])),
    );
    check_content(String, json!("x-anthropic-billing-header: 1\nrest"), json!("x-anthropic-billing-header: 1\nrest"));
}

#[test]
fn assistant_turns_keep_calls_with_parsed_arguments_and_reasoning() {
    let call =
        |arguments: Value| json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}});
    let turn = |calls: Value| json!({"role": "assistant", "content": "", "tool_calls": calls});
    check(String, turn(json!([])), json!({"role": "assistant", "content": ""}));
    check(String, turn(json!([call(json!("{\"b\":1,\"a\":2}"))])), turn(json!([call(json!({"b": 1, "a": 2}))])));
    for nothing in [json!(""), Value::Null, json!("not json"), json!("[1]"), json!(7), json!("null")] {
        check(String, turn(json!([call(nothing)])), turn(json!([call(json!({}))])));
    }
    check(
        String,
        turn(json!([{"function": {"name": "f"}}])),
        turn(json!([{"function": {"name": "f", "arguments": {}}}])),
    );
    check_refused(String, turn(json!([{"type": "custom"}])), "not of type function");
    check_refused(String, turn(json!([7])), "not an object");
    let reasoned = json!({"role": "assistant", "content": "", "reasoning": "r", "reasoning_content": "r"});
    check(String, json!({"role": "assistant", "reasoning": "r", "refusal": "x"}), reasoned.clone());
    check(String, json!({"role": "assistant", "reasoning_content": "r"}), reasoned);
}

#[test]
fn tool_turns_keep_their_id_and_join_their_texts() {
    let tool = |content: Value| json!({"role": "tool", "content": content, "tool_call_id": "c"});
    check(OpenAi, tool(json!([{"type": "text", "text": "a"}, "b"])), tool(json!("a\nb")));
    check(OpenAi, tool(json!("a")), tool(json!("a")));
    check(OpenAi, tool(Value::Null), tool(json!("")));
    check(
        OpenAi,
        tool(json!(["a", {"type": "image"}])),
        tool(json!([{"type": "text", "text": "a"}, {"type": "image"}])),
    );
}

#[test]
fn names_and_tasks_stay_only_as_texts() {
    check(
        String,
        json!({"role": "user", "name": "n", "task": 7, "x": 1}),
        json!({"role": "user", "content": "", "name": "n"}),
    );
}

#[track_caller]
fn check_roles(knows_developer: bool, conversation: Value, expect: Value) {
    let conversation = serde_json::from_value(conversation).unwrap();
    assert_eq!(serde_json::to_value(adapt_roles(conversation, knows_developer)).unwrap(), expect);
}

#[test]
fn developers_become_the_system_where_the_template_knows_none() {
    let said = |role: &str, content: &str| json!({"role": role, "content": content});
    let developer = json!({"role": "developer", "content": "d", "tools": []});
    check_roles(true, json!([developer]), json!([developer]));
    check_roles(false, json!([developer]), json!([said("system", "d")]));
    check_roles(
        false,
        json!([said("user", "u"), developer, said("system", "s")]),
        json!([said("system", "d\n\ns"), said("user", "u")]),
    );
    let parts = json!({"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "image"}, {"type": "text", "text": "b"}]});
    check_roles(false, json!([parts, developer]), json!([said("system", "a\nb\n\nd")]));
    let late = json!([said("user", "u"), said("system", "s")]);
    check_roles(false, late.clone(), late);
}

#[test]
fn tools_are_written_in_the_order_of_the_engines_model() {
    let tools = [json!({"x": 1, "function": {"strict": true, "parameters": {"b": 1, "a": 2}, "name": "f"}})];
    let expect = r#"[{"type":"function","function":{"name":"f","description":null,"parameters":{"b":1,"a":2},"strict":true},"x":1}]"#;
    assert_eq!(normalise_tools(&tools).unwrap().to_string(), expect);
    normalise_tools(&[json!({"type": "web_search"})]).unwrap_err();
    normalise_tools(&[json!({"type": "function"})]).unwrap_err();
}
