//! The program: arguments, output, exit status.

use std::path::PathBuf;
use std::process::{Command, Output};

use serde_json::Value;

use super::front::sim;

async fn doctor(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_fovea-sidecar"));
    command.arg("doctor").args(arguments);
    tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap()
}

/// A config file that asks for few open files.
fn config(name: &str, text: &str) -> PathBuf {
    let path = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(name);
    std::fs::write(&path, format!("limits:\n  connections_max: 16\n{text}")).unwrap();
    path
}

#[tokio::test]
async fn json_is_the_last_line_and_the_status_is_zero() {
    let sim = sim(|_| {}).await;
    let (engine, file) = (format!("http://{}", sim.http), config("doctor-json.yaml", ""));
    let output = doctor(&["--engine", &engine, "--config", file.to_str().unwrap(), "--json"]).await;
    let text = String::from_utf8(output.stdout).unwrap();
    let report: Value = serde_json::from_str(text.lines().last().unwrap()).unwrap();
    assert_eq!((output.status.code(), &report["ok"]), (Some(0), &Value::Bool(true)), "{report}");
    for check in report["checks"].as_array().unwrap() {
        let names: Vec<_> = check.as_object().unwrap().keys().collect();
        assert_eq!(names, ["name", "ok", "found", "remedy"]);
        assert!(check["found"].is_string() && (check["ok"].is_boolean() || check["ok"].is_null()), "{check}");
    }
}

#[tokio::test]
async fn people_get_a_line_per_check_and_the_config_file_names_the_engine() {
    let sim = sim(|_| {}).await;
    let file = config("doctor-text.yaml", &format!("engine:\n  url: http://{}\n", sim.http));
    let output = doctor(&["--config", file.to_str().unwrap(), "--no-probe"]).await;
    let text = String::from_utf8(output.stdout).unwrap();
    assert_eq!((output.status.code(), text.lines().count()), (Some(0), 16), "{text}");
    assert!(text.lines().all(|line| line.starts_with("ok ") || line.starts_with("- ")), "{text}");
}

#[tokio::test]
async fn nobody_there_is_status_two_with_a_report() {
    let output = doctor(&["--engine", "http://127.0.0.1:9", "--json", "--timeout", "2s"]).await;
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert_eq!(report["ok"], false);
    assert_eq!((&report["checks"][0]["name"], &report["checks"][0]["ok"]), (&"reachable".into(), &false.into()));
    assert_eq!(report["checks"].as_array().unwrap().len(), 16);
}

#[tokio::test]
async fn wrong_arguments_are_status_two() {
    let config = config("doctor-wrong.yaml", "no_such_field: 1\n");
    for arguments in [
        &[][..],
        &["--engine", "http://127.0.0.1:9/path"],
        &["--engine", "https://127.0.0.1:9"],
        &["--engine", "http://127.0.0.1:9", "--kind", "llamacpp"],
        &["--engine", "http://127.0.0.1:9", "--timeout", "soon"],
        &["--engine", "http://127.0.0.1:9", "--config", config.to_str().unwrap()],
    ] {
        let output = doctor(arguments).await;
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(output.stdout.is_empty() && !output.stderr.is_empty(), "{arguments:?}");
    }
}
