//! `fovea-balancer estimate` against what llm-d's own code answered.

#![expect(clippy::unwrap_used, reason = "helpers of tests: a failure is the test's")]

use std::io::Write as _;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

use fovea_balancer::estimate::{Api, Rules, chain, flatten};
use fovea_media::estimate::{Estimate, VideoHints};
use serde_json::{Value, json};

/// This tree holds no copy of the answers: the tests of single rows run everywhere, those of all rows only beside them.
const ANSWERS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../shared/vectors/llm-d/estimates.json");

fn cases(kind: &str) -> Vec<Value> {
    let Ok(text) = std::fs::read(ANSWERS) else { return Vec::new() };
    let Value::Object(mut answers) = serde_json::from_slice(&text).unwrap() else { panic!("not an object") };
    let Some(Value::Array(cases)) = answers.remove("cases") else { panic!("no cases") };
    cases.into_iter().filter(|case| case["kind"] == kind).collect()
}

/// A config file of this test's own, deleted at the end.
struct Config(PathBuf);

impl Config {
    fn new(name: &str, text: &str) -> Self {
        let path = std::env::temp_dir().join(format!("fovea-estimate-{name}-{}.yaml", std::process::id()));
        std::fs::write(&path, text).unwrap();
        Self(path)
    }
}

impl Drop for Config {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.0);
    }
}

fn program(config: Option<&Config>, arguments: &[&str], body: &str) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fovea-balancer"));
    command.arg("estimate").args(arguments);
    if let Some(config) = config {
        command.arg("--config").arg(&config.0);
    }
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    // A program that refuses its config does not read its input.
    let _ = child.stdin.take().unwrap().write_all(body.as_bytes());
    child.wait_with_output().unwrap()
}

fn run(config: Option<&Config>, arguments: &[&str], body: &str) -> Value {
    let output = program(config, arguments, body);
    let notes = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{notes}");
    let text = String::from_utf8(output.stdout).unwrap();
    let sheet: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!(notes.lines().collect::<Vec<_>>(), sheet["notes"].as_array().unwrap().iter().collect::<Vec<_>>());
    sheet
}

/// Of the known differences only one is ours: `audio_url` parts of other URLs have other names.
#[test]
fn every_recorded_request_has_the_numbers_of_llm_d() {
    let (mut seen, mut sounds) = (0, Vec::new());
    for case in cases("request_body") {
        let (input, expect, id) = (&case["input"], &case["expect"], case["id"].as_str().unwrap());
        let text = |key: &str| input[key].as_str().unwrap();
        let config = Config::new(id, &json!({ "estimate": input["estimate"] }).to_string());
        let headers = input.get("headers").and_then(Value::as_object).into_iter().flatten();
        let headers: Vec<_> = headers.map(|(name, value)| format!("{name}={}", value.as_str().unwrap())).collect();
        let block_size = input["block_size"].to_string();
        let mut arguments = vec!["--api", text("api"), "--model", text("model"), "--cache-salt", text("cache_salt")];
        arguments.extend(["--block-size", &block_size]);
        arguments.extend(headers.iter().flat_map(|header| ["--header", header]));
        let sheet = run(Some(&config), &arguments, text("body_json"));
        seen += 1;
        assert_eq!(sheet["prompt_tokens"], expect["prompt_token_counts"], "{id}");
        let counts: Vec<_> = expect["features"].as_array().unwrap().iter().map(|item| &item["length"]).collect();
        assert_eq!(sheet["tokens_per_media"], json!(counts), "{id}");
        if id.starts_with("body-audio-url") {
            sounds.push(sheet["block_hashes"].clone());
            continue;
        }
        assert_eq!(sheet["media"], expect["features"], "{id}");
        let hashes: Vec<_> =
            expect["block_hashes"].as_array().unwrap().iter().flat_map(|h| h.as_array().unwrap()).collect();
        assert_eq!(sheet["block_hashes"], json!(hashes), "{id}");
        assert_eq!(sheet["notes"], json!([]), "{id}");
    }
    assert!(matches!((seen, &sounds[..]), (0, []) | (28, [_, _])), "{seen} requests");
    assert!(sounds.is_empty() || sounds[0] != sounds[1]);
}

#[test]
fn every_recorded_chain_of_blocks_is_that_of_llm_d() {
    let (mut seen, word) = (0, |value: &Value| u32::try_from(value.as_u64().unwrap()).unwrap());
    for case in cases("approx_chain") {
        let (input, tokens) = (&case["input"], &case["input"]["tokens"]);
        let (from, step) = (word(&tokens["from"]), word(&tokens["step"]));
        let words = (0..word(&tokens["count"])).flat_map(|at| from.wrapping_add(at.wrapping_mul(step)).to_le_bytes());
        let (model, salt) = (input["model"].as_str().unwrap(), input["cache_salt"].as_str().unwrap());
        let sizes = [&input["block_size"], &input["max_blocks"]].map(|size| word(size) as usize);
        let hashes = chain(model, salt, &words.collect::<Vec<_>>(), sizes[0], sizes[1]);
        assert_eq!(
            json!(hashes.iter().map(u64::to_string).collect::<Vec<_>>()),
            case["expect"]["block_hashes"],
            "{case}"
        );
        seen += 1;
    }
    assert!(matches!(seen, 0 | 11), "{seen} chains");
}

fn chat(parts: Value) -> String {
    json!({"model": "m", "messages": [{"role": "user", "content": parts}]}).to_string()
}

#[test]
fn model_and_salt_are_those_of_the_request() {
    let text = json!({"type": "text", "text": "describe this"});
    let image = json!({"type": "image_url", "image_url": {"url": "https://example.com/a.png"}});
    let sheet = run(None, &[], &chat(json!([text, image])));
    assert_eq!(sheet["tokens_per_media"], json!([225]));
    let hashes = ["3068204919926969086", "13627072899759670671", "3044446631102358176", "6262769843584167616"];
    assert_eq!(sheet["block_hashes"], json!(hashes));
    // No block is smaller than 64 tokens.
    assert_eq!(run(None, &["--block-size", "16"], &chat(json!([text, image])))["block_hashes"], json!(hashes));
    let salted = run(None, &["--cache-salt", "s"], &chat(json!([text, image])));
    assert_ne!(salted["block_hashes"], json!(hashes));
}

#[test]
fn a_config_file_of_llm_d_is_understood() {
    let text = "apiVersion: llm-d.ai/v1alpha1\nkind: EndpointPickerConfig\nplugins:\n- type: max-score-picker\n- name: t\n  type: token-producer\n  \
        parameters:\n    estimate:\n      image: {mode: static, static: {staticToken: 70}}\n      video: {defaultDuration: 1, maxVideoTokens: 300}\n";
    let parts =
        json!([{"type": "image_url", "image_url": {"url": "u"}}, {"type": "video_url", "video_url": {"url": "v"}}]);
    let theirs = Config::new("theirs", text);
    assert_eq!(run(Some(&theirs), &[], &chat(parts.clone()))["tokens_per_media"], json!([70, 300]));
    let headers = ["--header", "X-LLM-D-Video-Duration-Seconds=0.5"];
    assert_eq!(run(Some(&theirs), &headers, &chat(parts.clone()))["tokens_per_media"], json!([70, 225]));
    for (name, text) in [
        ("typo", text.replace("staticToken", "statikToken")),
        ("ours", "estimate: {image: {statikToken: 1}}".to_owned()),
    ] {
        let output = program(Some(&Config::new(name, &text)), &[], &chat(parts.clone()));
        let notes = String::from_utf8(output.stderr).unwrap();
        assert!(!output.status.success() && notes.contains("statikToken"), "{notes}");
    }
}

#[test]
fn what_is_not_known_or_not_believed_is_noted() {
    // 33 bytes that claim 10^6 × 10^6 pixels.
    let png = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAPQkAAD0JACAIAAADTD68q";
    let image = json!({"type": "image_url", "image_url": {"url": png}});
    let video = json!({"type": "video_url", "video_url": {"url": "v"}});
    let sheet = run(None, &["--header", "x-llm-d-video-duration-seconds=1e9"], &chat(json!([image, video])));
    assert_eq!(sheet["tokens_per_media"], json!([1 << 20, 1 << 20]));
    assert_eq!(sheet["block_hashes"].as_array().unwrap().len(), 2048);
    assert!(sheet["notes"][0].as_str().unwrap().contains("no limit"), "{sheet}");
    let body = json!({"messages": [{"role": "user", "content": "x"}], "tools": [{"function": {"parameters": {"maximum": 0.5}}}]});
    let sheet = run(None, &[], &body.to_string());
    assert_eq!(sheet["block_hashes"], json!([]));
    assert!(sheet["notes"][0].as_str().unwrap().contains("how llm-d writes it is not known"), "{sheet}");
}

#[test]
fn a_body_that_is_refused_is_told_where_and_why() {
    let output = program(None, &[], &chat(json!([{"type": "image_url", "image_url": "u"}])));
    let notes = String::from_utf8(output.stderr).unwrap();
    assert!(!output.status.success() && output.stdout.is_empty());
    assert!(notes.contains("messages[0]: ") && notes.contains("expected an object with a `url`"), "{notes}");
}

#[test]
fn no_body_panics() {
    let bodies = [
        "",
        "[]",
        "{}",
        "{\"messages\":1}",
        "{\"messages\":[null]}",
        "{\"messages\":[{\"content\":{}}]}",
        "{\"messages\":[{\"content\":[1]}]}",
        "{\"messages\":[{\"content\":[{\"type\":\"image_url\",\"image_url\":\"u\"}]}]}",
        "{\"prompt\":[[1]]}",
        "{\"prompt\":[-1]}",
        "{\"messages\":[{\"content\":[{\"type\":\"tool_result\",\"content\":7}]}],\"system\":{}}",
        "{\"messages\":[{\"content\":[{},{\"type\":\"image\"},{\"type\":\"input_audio\"},{\"type\":\"tool_use\",\"input\":null}]}]}",
    ];
    let estimate = Estimate::default();
    for api in [Api::Chat, Api::Messages, Api::Completions, Api::Responses] {
        for body in bodies {
            let rules = Rules { estimate: &estimate, videos: VideoHints::default(), tokens_max: 8 };
            if let Ok(flat) = flatten(api, body, rules) {
                assert!(flat.prompts.iter().all(|prompt| prompt.bytes().len() <= 32), "{api:?} {body}");
            }
        }
    }
}
