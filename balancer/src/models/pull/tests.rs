use std::path::Path;

use fovea_balancer_core::choose;
use fovea_balancer_core::fleet::Freshness;
use prometheus_client::registry::Registry;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use super::*;

const TINY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/vllm/tiny-qwen3-vl");
const MISSING: &[u8] = b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n";

/// Base URL of a server that gives each file as `answer` says, whole HTTP answers.
async fn sidecar(answer: impl Fn(&str) -> Vec<u8> + Send + 'static) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = [0; 4096];
            let read = stream.read(&mut head).await.unwrap_or(0);
            let head = String::from_utf8_lossy(&head[..read]).into_owned();
            let asked = head.strip_prefix("GET /fovea/v1/model/").and_then(|rest| rest.split(' ').next());
            let keyed = head.contains("x-fovea-key: secret");
            let answer = asked.filter(|_| keyed).map_or_else(|| MISSING.to_vec(), &answer);
            let _ = stream.write_all(&answer).await;
        }
    });
    url
}

fn ok(body: &[u8]) -> Vec<u8> {
    let mut answer = format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\n\r\n", body.len()).into_bytes();
    answer.extend_from_slice(body);
    answer
}

fn tiny(name: &str) -> Vec<u8> {
    std::fs::read(Path::new(TINY).join(name)).map_or_else(|_| MISSING.to_vec(), |file| ok(&file))
}

async fn pull(url: &str) -> PullEnd {
    let workers = Workers::new(Freshness::default(), choose::Settings::default(), 1000);
    let metrics = PullMetrics::register(&mut Registry::default());
    let key = Some(HeaderValue::from_static("secret"));
    let puller =
        Puller::new(Arc::default(), Arc::new(workers), metrics, Access { key, tls: None }, Duration::from_secs(5));
    puller.pull(url).await.map_or_else(|error| error.end(), |_| PullEnd::Loaded)
}

#[tokio::test]
async fn a_model_is_loaded_from_the_files_that_it_has() {
    assert_eq!(pull(&sidecar(tiny).await).await, PullEnd::Loaded);
}

#[tokio::test]
async fn each_failure_has_its_name() {
    let tokenizer =
        |answer: &'static [u8]| move |name: &str| if name == "tokenizer.json" { answer.to_vec() } else { tiny(name) };
    for (answer, expect) in [
        (MISSING, PullEnd::NoFile),
        (b"HTTP/1.1 403 Forbidden\r\ncontent-length: 0\r\n\r\n", PullEnd::NotTrusted),
        (b"HTTP/1.1 302 Found\r\nlocation: http://127.0.0.1:1/\r\ncontent-length: 0\r\n\r\n", PullEnd::Status),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 99999999\r\n\r\n", PullEnd::TooLarge),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\nshort", PullEnd::Connect),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", PullEnd::Load),
        (b"not http", PullEnd::Connect),
    ] {
        let url = sidecar(tokenizer(answer)).await;
        assert_eq!(pull(&url).await, expect, "{}", String::from_utf8_lossy(answer));
    }
    assert_eq!(pull("http://127.0.0.1:1").await, PullEnd::Connect);
}
