//! The program: its ready line, and how it ends.
#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use serde_json::Value;
use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

fn start() -> (Child, Value) {
    let mut command = Command::new(env!("CARGO_BIN_EXE_engine-sim"));
    command.args([
        "--model-dir",
        concat!(env!("CARGO_MANIFEST_DIR"), "/../vectors/vllm/tiny-qwen3-vl"),
        "--speed",
        "0",
    ]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    (child, serde_json::from_str(&line).unwrap())
}

/// Sends one request and returns all that comes back.
fn ask(ready: &Value, method: &str, path: &str, body: &str) -> String {
    let mut stream = TcpStream::connect(ready["http"].as_str().unwrap()).unwrap();
    let length = body.len();
    write!(
        stream,
        "{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: {length}\r\n\r\n{body}"
    )
    .unwrap();
    let mut answer = String::new();
    let _ = stream.read_to_string(&mut answer);
    answer
}

#[test]
fn it_tells_its_addresses_and_ends_on_sigterm() {
    let (mut child, ready) = start();
    assert_eq!(ready["ready"], true);
    assert!(ready["events"].as_str().unwrap().starts_with("tcp://127.0.0.1:"));
    assert!(ready["replay"].as_str().unwrap().starts_with("tcp://127.0.0.1:"));
    assert!(ask(&ready, "GET", "/health", "").starts_with("HTTP/1.1 200"));
    let killed = Command::new("kill").arg(child.id().to_string()).status().unwrap();
    assert!(killed.success());
    assert!(child.wait().unwrap().success());
}

#[test]
fn it_fails_when_told_to_die() {
    let (mut child, ready) = start();
    ask(&ready, "POST", "/sim/fault", "{\"fault\": \"die\"}");
    assert_eq!(child.wait().unwrap().code(), Some(1));
}
