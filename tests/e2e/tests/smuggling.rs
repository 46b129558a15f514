//! Requests that two programs could read differently: each is refused, or reaches the engine as exactly one request, both at the balancer and
//! at a sidecar. A recorder before the engine has the bytes that it saw.

#![expect(clippy::unwrap_used, reason = "helpers of tests: a failure is the test's")]

use std::sync::{Arc, Mutex};
use std::time::Duration;

use e2e::{Fleet, FleetConfig, Mode};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};

const LIMIT: Duration = Duration::from_secs(20);
/// After an answer has begun, silence for this long is its end.
const QUIET: Duration = Duration::from_millis(400);
const CHAT: &str = "/v1/chat/completions";
const BODY: &str = r#"{"model":"tiny-vl","messages":[{"role":"user","content":"hello"}],"max_tokens":1}"#;
/// What must never be taken for a request of its own.
const HIDDEN: &str = "GET /hidden HTTP/1.1\r\nhost: a\r\n\r\n";

/// Bytes that went to the engine, by connection.
#[derive(Clone, Default)]
struct Recorder(Arc<Mutex<Vec<Vec<u8>>>>);

impl Recorder {
    /// Listens before the engine at `engine`.
    async fn start(engine: String) -> (Self, String) {
        let (this, listener) = (Self::default(), TcpListener::bind("127.0.0.1:0").await.unwrap());
        let url = format!("http://{}", listener.local_addr().unwrap());
        let recorder = this.clone();
        tokio::spawn(async move {
            while let Ok((client, _)) = listener.accept().await {
                let Ok(engine) = TcpStream::connect(&engine).await else { return };
                tokio::spawn(recorder.clone().pass(client, engine));
            }
        });
        (this, url)
    }

    async fn pass(self, client: TcpStream, engine: TcpStream) {
        let place = {
            let mut all = self.0.lock().unwrap();
            all.push(Vec::new());
            all.len() - 1
        };
        let (mut from_client, mut to_client) = client.into_split();
        let (mut from_engine, mut to_engine) = engine.into_split();
        tokio::spawn(async move { tokio::io::copy(&mut from_engine, &mut to_client).await });
        let mut bytes = [0; 4096];
        while let Ok(read @ 1..) = from_client.read(&mut bytes).await {
            self.0.lock().unwrap()[place].extend_from_slice(&bytes[..read]);
            if to_engine.write_all(&bytes[..read]).await.is_err() {
                return;
            }
        }
    }

    /// (head in lower case, body) of every request but the sidecar's own questions.
    fn requests(&self) -> Vec<(String, Vec<u8>)> {
        let all = self.0.lock().unwrap().clone();
        let mut found = Vec::new();
        for mut bytes in all.iter().map(Vec::as_slice) {
            while !bytes.is_empty() {
                let (head, body, rest) = split(bytes);
                bytes = rest;
                if head.starts_with("post") || head.contains("hidden") {
                    found.push((head, body));
                }
            }
        }
        found
    }
}

/// One request, read in the one way that RFC 9112 allows; anything ambiguous panics.
fn split(bytes: &[u8]) -> (String, Vec<u8>, &[u8]) {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").expect("a whole head") + 4;
    let head = String::from_utf8(bytes[..end].to_vec()).unwrap().to_ascii_lowercase();
    let values = |name: &str| -> Vec<&str> { head.lines().filter_map(|line| line.strip_prefix(name)).collect() };
    let (lengths, codings) = (values("content-length: "), values("transfer-encoding: "));
    let mut rest = &bytes[end..];
    match (lengths.as_slice(), codings.as_slice()) {
        ([], []) => (head.clone(), Vec::new(), rest),
        ([length], []) => {
            let (body, rest) = rest.split_at(length.parse().unwrap());
            (head.clone(), body.to_vec(), rest)
        }
        ([], ["chunked"]) => {
            let mut body = Vec::new();
            loop {
                let line = rest.windows(2).position(|window| window == b"\r\n").expect("a chunk's length");
                let length = usize::from_str_radix(std::str::from_utf8(&rest[..line]).unwrap(), 16).unwrap();
                let (chunk, after) = rest[line + 2..].split_at(length);
                body.extend_from_slice(chunk);
                rest = after.strip_prefix(b"\r\n").expect("the end of a chunk");
                if length == 0 {
                    return (head.clone(), body, rest);
                }
            }
        }
        other => panic!("ambiguous to an engine: {other:?} in {head}"),
    }
}

struct World {
    fleet: Fleet,
    recorder: Recorder,
    _engine: e2e::Program,
}

async fn world() -> World {
    let mut fleet = Fleet::without_workers(FleetConfig::tiny(1, Mode::Precise)).await.unwrap();
    let engine = fleet.start_engine(0, 0).await.unwrap();
    let (recorder, url) = Recorder::start(engine.addr("http").unwrap()).await;
    fleet.attach(&[url]).await.unwrap();
    World { fleet, recorder, _engine: engine }
}

impl World {
    /// Sends the bytes, and gives all that comes until the connection ends, or nothing more has come for a while after an answer.
    async fn talk(&self, at: &str, raw: &[u8]) -> String {
        let mut stream = TcpStream::connect(at).await.unwrap();
        stream.write_all(raw).await.unwrap();
        let (mut answer, mut wait) = (Vec::new(), LIMIT);
        while let Ok(Ok(1..)) = tokio::time::timeout(wait, stream.read_buf(&mut answer)).await {
            wait = QUIET;
        }
        String::from_utf8_lossy(&answer).into_owned()
    }

    /// `expect`: the status at the balancer and at the sidecar; 0 = closed without an answer.
    async fn check(&self, what: &str, raw: &str, expect: [u16; 2]) {
        let ports = [self.fleet.balancer.addr("http").unwrap(), self.fleet.sidecars[0].addr("http").unwrap()];
        for (port, expect) in ports.iter().zip(expect) {
            let before = self.recorder.requests().len();
            let answer = self.talk(port, raw.as_bytes()).await;
            let status = answer.strip_prefix("HTTP/1.1 ").and_then(|rest| rest[..3].parse().ok()).unwrap_or(0);
            let program = if *port == ports[0] { "balancer" } else { "sidecar" };
            assert_eq!(status, expect, "{what} at the {program}: {answer}");
            let seen = self.recorder.requests().split_off(before);
            assert_eq!(seen.len(), usize::from(status == 200), "{what} at {port}: {seen:?}");
            for (head, body) in seen {
                assert_eq!(String::from_utf8_lossy(&body), BODY, "{what} at {port}");
                assert!(head.starts_with(&format!("post {CHAT} http/1.1\r\n")), "{what} at {port}: {head}");
                for ours in ["x-fovea-", "hidden", "x-data-parallel-rank", "x-prefiller-", "x-private"] {
                    assert!(!head.contains(ours), "{what} at {port}: {head}");
                }
            }
        }
    }
}

fn post(headers: &str, body: &str) -> String {
    format!("POST {CHAT} HTTP/1.1\r\nhost: a\r\n{headers}\r\n{body}")
}

fn sized(headers: &str) -> String {
    post(&format!("content-length: {}\r\n{headers}", BODY.len()), BODY)
}

fn chunked(headers: &str) -> String {
    post(headers, &format!("{:x}\r\n{BODY}\r\n0\r\n\r\n", BODY.len()))
}

#[tokio::test]
async fn framing_that_can_be_read_in_two_ways_is_refused_or_read_once() {
    let world = world().await;
    world.check("a plain request", &sized(""), [200, 200]).await;
    world.check("a chunked request", &chunked("transfer-encoding: chunked\r\n"), [200, 200]).await;
    let both = |order: [&str; 2]| chunked(&format!("{}{}", order[0], order[1]));
    let (coding, length) = ("transfer-encoding: chunked\r\n", "content-length: 400\r\n");
    world.check("a length after chunks", &both([coding, length]), [200, 200]).await;
    world.check("a length before chunks", &both([length, coding]), [200, 200]).await;
    world.check("two lengths", &post("content-length: 5\r\ncontent-length: 6\r\n", BODY), [400, 400]).await;
    world.check("a list of lengths", &post("content-length: 5, 6\r\n", BODY), [400, 400]).await;
    for length in ["+5", "-1", "0x5", "5 5", "", "99999999999999999999"] {
        world
            .check(&format!("length {length:?}"), &post(&format!("content-length: {length}\r\n"), BODY), [400, 400])
            .await;
    }
    for coding in ["chunked, identity", "identity", "xchunked", "\x0bchunked"] {
        let raw = chunked(&format!("transfer-encoding: {coding}\r\n"));
        world.check(&format!("coding {coding:?}"), &raw, [400, 400]).await;
    }
    // At the sidecar decoded once, and framed anew for the engine.
    world.check("chunks named twice", &chunked("transfer-encoding: chunked, chunked\r\n"), [400, 200]).await;
    world.check("a space before the colon", &chunked("transfer-encoding : chunked\r\n"), [400, 400]).await;
    world.check("a folded header", &sized("x-a: b\r\n c\r\n"), [400, 400]).await;
    world.check("a bare LF between headers", &sized("x-a: b\nx-b: c\r\n"), [200, 200]).await;
    world.check("a NUL in a header", &sized("x-a: b\0c\r\n"), [400, 400]).await;
    let extended = format!("{:x};a=\"b\"\r\n{BODY}\r\n0\r\n\r\n", BODY.len());
    world.check("a chunk extension", &post("transfer-encoding: chunked\r\n", &extended), [200, 200]).await;
    let huge = "fffffffffffffffff\r\n";
    world.check("a chunk's length that overflows", &post("transfer-encoding: chunked\r\n", huge), [400, 400]).await;
}

#[tokio::test]
async fn nothing_hidden_in_a_body_is_taken_for_a_request() {
    let world = world().await;
    let whole = format!("{:x}\r\n{BODY}\r\n0\r\n\r\n{HIDDEN}", BODY.len());
    let length = format!("content-length: {}\r\n", whole.len());
    // By its length the hidden request is body, by its chunks it is the next request.
    let raw = post(&format!("{length}transfer-encoding: chunked\r\n"), &whole);
    world.check("a request after the chunks", &raw, [200, 200]).await;
    // Refused by the balancer, which looks at bodies, and by the engine behind the sidecar, which does not.
    let raw = post("content-length: 0\r\n", HIDDEN);
    for port in [world.fleet.balancer.addr("http").unwrap(), world.fleet.sidecars[0].addr("http").unwrap()] {
        let answer = world.talk(&port, raw.as_bytes()).await;
        assert!(answer.starts_with("HTTP/1.1 400"), "{answer}");
    }
    assert!(world.recorder.requests().iter().all(|(head, _)| !head.contains("hidden")));
}

#[tokio::test]
async fn headers_between_our_programs_cannot_be_sent_by_clients() {
    let world = world().await;
    for headers in [
        "connection: close, x-private\r\nx-private: 1\r\n",
        "connection: x-fovea-preamble\r\n",
        "x-fovea-worker: 127.0.0.1:1\r\nx-data-parallel-rank: 3\r\n",
        "keep-alive: timeout=5\r\nproxy-connection: keep-alive\r\nte: trailers\r\nupgrade: h2c\r\n",
        "x-prefiller-host-port: 10.0.0.1:80\r\n",
    ] {
        world.check(headers, &sized(headers), [200, 200]).await;
    }
    // The balancer drops a client's preamble. The sidecar believes this machine here, and finds no record in the body.
    world.check("a preamble", &sized("x-fovea-preamble: 7\r\n"), [200, 400]).await;
    for (target, at_balancer) in [("http://a/v1/chat/completions", 200), ("http://b/v1/chat/completions", 400)] {
        let raw = sized("").replace(&format!("POST {CHAT} "), &format!("POST {target} "));
        world.check(target, &raw, [at_balancer, 200]).await;
    }
}
