//! `fovea-balancer fetch-check` and `explain --fetch` as programs.

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use super::support::{Reply, origin, png, tagged};

fn run(url: &str, config: Option<&Path>) -> Value {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fovea-balancer"));
    command.args(["fetch-check", url]);
    if let Some(config) = config {
        command.arg("--config").arg(config);
    }
    let output = command.output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// A folder of this test's own.
fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("fovea-fetch-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    folder
}

#[track_caller]
fn check(sheet: &Value, expect: Value) {
    for (field, value) in expect.as_object().unwrap() {
        assert_eq!(&sheet[field], value, "{field} of {sheet}");
    }
}

#[test]
fn refusals_are_answers() {
    check(
        &run("http://169.254.169.254/latest/", None),
        json!({"allowed": false, "reason": "address", "address": "169.254.169.254:80", "status": null, "width": null, "height": null,
            "identity_policy": "content", "id": null}),
    );
    check(&run("http://0x7f.1/", None), json!({"allowed": false, "reason": "host_form", "address": null}));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_image_has_its_size_and_the_engines_identity() {
    let file = png(40, 30, 100);
    let id = fovea_media::identity::vllm_image_id(&file, false, "").to_string();
    let origin = origin(move |_, _| tagged("\"t\"", &file)).await;
    let folder = folder("check");
    for (policy, expect) in [("content", Some(id)), ("validator", None), ("url", None)] {
        let config = folder.join(format!("{policy}.yaml"));
        let text = format!("media: {{allow: [127.0.0.1/32], ports: [], identity: {policy}}}");
        std::fs::write(&config, text).unwrap();
        let sheet = run(&origin.url("/a.png"), Some(&config));
        check(
            &sheet,
            json!({"allowed": true, "reason": null, "address": origin.address.to_string(), "status": 200, "width": 40, "height": 30,
                "identity_policy": policy}),
        );
        match expect {
            Some(id) => assert_eq!(sheet["id"], json!(id)),
            None => assert_eq!(sheet["id"].as_str().unwrap().len(), 64),
        }
    }
    std::fs::remove_dir_all(folder).unwrap();
}

fn explain(config: &Path, urls: &[String]) -> Value {
    let model = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/vllm/tiny-qwen3-vl");
    let images = urls.iter().map(|url| json!({"type": "image_url", "image_url": {"url": url}}));
    let text = json!({"type": "text", "text": "Which is larger?"});
    let content: Vec<_> = images.chain([text]).collect();
    let body = json!({"model": "m", "messages": [{"role": "user", "content": content}]});
    let mut program = Command::new(env!("CARGO_BIN_EXE_fovea-balancer"))
        .args(["explain", "--model-dir", model, "--engine-model", "m", "--block-size", "16", "--fetch", "--config"])
        .arg(config)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    program.stdin.take().unwrap().write_all(body.to_string().as_bytes()).unwrap();
    let output = program.wait_with_output().unwrap();
    assert!(output.status.success());
    serde_json::from_slice(&output.stdout).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn explain_sees_images_behind_urls_up_to_one_that_is_refused() {
    let file = png(64, 96, 100);
    let id = fovea_media::identity::vllm_image_id(&file, false, "m").to_string();
    let origin = origin(move |head, _| match head.starts_with("GET /gone") {
        true => Reply::Plain("404 Not Found", vec![], vec![]),
        false => tagged("\"t\"", &file),
    })
    .await;
    let folder = folder("explain");
    let config = folder.join("balancer.yaml");
    std::fs::write(&config, "media: {allow: [127.0.0.1/32], ports: []}").unwrap();
    // One image under two URLs is one identity.
    let sheet = explain(&config, &[origin.url("/a.png?sig=1"), origin.url("/a.png?sig=2")]);
    check(&sheet, json!({"view": "exact"}));
    let ids: Vec<_> = sheet["media"].as_array().unwrap().iter().map(|item| item["id"].as_str().unwrap()).collect();
    assert_eq!(ids, [&id, &id]);
    let sheet = explain(&config, &[origin.url("/a.png"), origin.url("/gone.png")]);
    check(&sheet, json!({"view": "prefix", "notes": ["the view ends before the first unknown item: status"]}));
    assert_eq!(sheet["media"].as_array().unwrap().len(), 1);
    std::fs::remove_dir_all(folder).unwrap();
}
