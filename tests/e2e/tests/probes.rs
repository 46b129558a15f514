//! Odd inputs that a multimodal router must still understand, through the real programs: what a request is predicted to find after
//! another one, and what the engine then reuses.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use bytes::Bytes;
use e2e::client::Streamed;
use e2e::workload::{chat, data_url, image_part, noise_png, picture, text_part, words};
use e2e::{Fleet, FleetConfig, Mode, eventually};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream};

/// Tokens of a block. A picture of [`SIDE`]² pixels is 1024 tokens, so a prompt with one and a word is 65 whole blocks and a started one.
const BLOCK: u64 = 16;
const SIDE: u32 = 1024;
/// Longest wait for the last report of load.
const REST_MAX: Duration = Duration::from_secs(10);

/// What becomes of the second request.
enum Want {
    /// Answered by the worker of the first, with this overlap predicted, and reused by the engine.
    Hit(&'static str),
    /// The engine says no, in words with `word`; what was predicted before holds.
    EngineRefuses { view: &'static str, overlap: &'static str, word: &'static str },
    /// The balancer says no, in words with `word`.
    Refused { word: &'static str },
}

struct Probe {
    what: &'static str,
    first: Bytes,
    second: Bytes,
    want: Want,
}

/// A request with these parts and options.
fn ask(parts: &[Value], options: Value) -> Bytes {
    let body = chat("u", &[json!({"role": "user", "content": parts})], 1);
    let mut body: Value = serde_json::from_slice(&body).expect("our own JSON");
    let members = body.as_object_mut().expect("an object");
    members.extend(options.as_object().cloned().unwrap_or_default());
    Bytes::from(body.to_string())
}

/// A request about one picture.
fn about(url: &str) -> Bytes {
    ask(&[image_part(url), text_part("Why?")], Value::Null)
}

fn large(seed: u64) -> String {
    picture(seed, SIDE, SIDE)
}

/// The head of a PNG of 60000×60000 pixels with a wrong checksum, and nothing after it.
fn huge_png() -> Vec<u8> {
    let side = 60_000u32.to_be_bytes();
    [b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR".as_slice(), &side, &side, &[8, 2, 0, 0, 0, 1, 2, 3, 4]].concat()
}

fn overlap(answer: &Streamed) -> (u64, u64) {
    let text = answer.header("x-fovea-overlap");
    let (held, all) = text.split_once('/').unwrap_or_else(|| panic!("x-fovea-overlap is {text:?}"));
    (held.parse().expect("a number"), all.parse().expect("a number"))
}

/// Waits until the balancer knows every block, and that nobody has work left: no choice is then made by load.
async fn rest(fleet: &Fleet) {
    fleet.settled().await.expect("a fleet at rest");
    let url = format!("http://{}/debug/workers", fleet.balancer.addr("admin").expect("an address"));
    let idle = eventually("no worker has work", REST_MAX, || async {
        let state = fleet.client.get_json(&url).await?;
        let busy = |worker: &Value| worker["waiting_tokens"] != 0 || worker["decode_tokens"] != 0;
        Ok((!state["workers"].as_array().into_iter().flatten().any(busy)).then_some(()))
    });
    idle.await.expect("a fleet at rest");
}

async fn check(fleet: &Fleet, probe: &Probe) {
    let (what, url) = (probe.what, fleet.chat_url().expect("a URL"));
    let first = fleet.client.stream(&url, probe.first.clone()).await.expect("an answer");
    let seen = (first.status.as_u16(), first.header("x-fovea-view"), overlap(&first).0);
    assert_eq!(seen, (200, "exact", 0), "{what}, first: {}", first.text);
    rest(fleet).await;
    let second = fleet.client.stream(&url, probe.second.clone()).await.expect("an answer");
    let seen = (second.status.as_u16(), second.header("x-fovea-view"), second.header("x-fovea-overlap"));
    match probe.want {
        Want::Hit(expect) => {
            assert_eq!(seen, (200, "exact", expect), "{what}: {}", second.text);
            assert_eq!(second.header("x-fovea-worker"), first.header("x-fovea-worker"), "{what}");
            let ((held, all), (prompt, cached)) = (overlap(&second), second.tokens());
            assert_eq!((held, all), (prompt / BLOCK, prompt.div_ceil(BLOCK)), "{what}: not all was found");
            // An engine computes at least the last token anew.
            assert_eq!(
                cached,
                held.min((prompt - 1) / BLOCK) * BLOCK,
                "{what}: the engine reused other than predicted"
            );
        }
        Want::EngineRefuses { view, overlap, word } => {
            assert_eq!(seen, (400, view, overlap), "{what}: {}", second.text);
            assert!(second.text.contains(word), "{what}: {}", second.text);
        }
        Want::Refused { word } => {
            let error = serde_json::from_str::<Value>(&second.text).expect("JSON")["error"].clone();
            assert_eq!((seen.0, &error["code"]), (400, &json!("media")), "{what}: {error}");
            let message = error["message"].as_str().unwrap_or_default();
            assert!(message.contains("media part 0") && message.contains(word), "{what}: {message}");
        }
    }
    rest(fleet).await;
}

/// Two workers behind a balancer that may fetch from loopback; `media` = more of its `media` section.
async fn fleet(media: &str) -> Fleet {
    let tiny = FleetConfig::tiny(2, Mode::Precise);
    let engine_args = ["--speed", "0", "--block-size", "16", "--blocks", "8000"].map(str::to_owned).to_vec();
    let balancer_extra = format!("media: {{allow: [127.0.0.1/32], ports: []{media}}}\n");
    Fleet::start(FleetConfig { engine_args, balancer_extra, ..tiny }).await.expect("a fleet")
}

/// The same picture, written in two ways.
fn written_differently() -> Vec<Probe> {
    let hit = |what, first, second| Probe { what, first, second, want: Want::Hit("65/66") };
    let retyped = |seed, kind: &str| about(&large(seed).replacen("data:image/png", kind, 1));
    let named = |seed, uuid: &str| {
        let mut part = image_part(&large(seed));
        part["uuid"] = json!(uuid);
        ask(&[part, text_part("Why?")], Value::Null)
    };
    let literal = || ask(&[text_part("A <|image_pad|> is"), image_part(&large(8))], Value::Null);
    vec![
        hit("1, 2: identical data: URI twice", about(&large(1)), about(&large(1))),
        hit("3: MIME type in other case", about(&large(3)), retyped(3, "data:image/PNG")),
        hit("4: a parameter more", about(&large(4)), retyped(4, "data:image/png;name=a.png")),
        hit("7: a client's uuid", about(&large(7)), named(7, "mine")),
        hit("7: another client's uuid", named(70, "mine"), named(70, "yours")),
        hit("8: a placeholder in the text beside an image", literal(), literal()),
    ]
}

/// Options, sizes and damage.
fn out_of_the_ordinary() -> Vec<Probe> {
    let row = |what, first, second, want| Probe { what, first, second, want };
    let under = |seed, kwargs: Value| {
        ask(&[image_part(&large(seed)), text_part("Why?")], json!({"mm_processor_kwargs": kwargs}))
    };
    let (smaller, equal) = (json!({"max_pixels": 1_000_000}), json!({"max_pixels": 1_048_576}));
    // An engine takes these options only when started so, but what was predicted shows.
    let disabled = |overlap| Want::EngineRefuses { view: "exact", overlap, word: "mm_processor_kwargs are disabled" };
    let text_alone = || ask(&[text_part(&format!("What does <|image_pad|> mean? {}", words(9, 100)))], Value::Null);
    let damaged = image_part(&data_url("image/png", b"no picture"));
    let good_and_damaged = ask(&[image_part(&large(17)), damaged, text_part("Compare.")], Value::Null);
    let unreadable = "prefix;reason=image of unknown format or size";
    let good_part = Want::EngineRefuses { view: unreadable, overlap: "64/65", word: "cannot identify image" };
    let flagged = "prefix;reason=engine_refuses";
    let too_long = Want::EngineRefuses { view: flagged, overlap: "0/1", word: "aspect ratio" };
    let dot = || about(&picture(18, 1, 1));
    vec![
        row("5: counted with the override", about(&large(50)), under(50, smaller), disabled("0/62")),
        row("5: the override is part of the identity", about(&large(51)), under(51, equal), disabled("0/66")),
        row("6: an empty override is none", about(&large(6)), under(6, json!({})), disabled("65/66")),
        row("9: a placeholder in the text, no image", text_alone(), text_alone(), Want::Hit("21/22")),
        row("17: one good and one broken image", about(&large(17)), good_and_damaged, good_part),
        row("18: 1×1", dot(), dot(), Want::Hit("1/2")),
        row("20: 8000×32", about(&large(20)), about(&picture(20, 8000, 32)), too_long),
    ]
}

#[tokio::test]
async fn what_routers_get_wrong_inline_is_right() {
    let fleet = fleet("").await;
    for probe in written_differently().into_iter().chain(out_of_the_ordinary()) {
        check(&fleet, &probe).await;
    }
}

/// Serves `/KIND/SEED`: the picture of that seed. `ranged` honours Range, `plain` does not, `moved` leads to `plain`, `huge` is a bad PNG.
struct Origin {
    address: SocketAddr,
    /// Requests, and answers that carried a file.
    asked: Arc<AtomicUsize>,
    sent: Arc<AtomicUsize>,
    task: tokio::task::JoinHandle<()>,
}

impl Origin {
    async fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a free port");
        let (asked, sent) = (Arc::<AtomicUsize>::default(), Arc::<AtomicUsize>::default());
        let address = listener.local_addr().expect("an address");
        let counts = (Arc::clone(&asked), Arc::clone(&sent));
        let task = tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                counts.0.fetch_add(1, Ordering::Relaxed);
                tokio::spawn(answer(stream, Arc::clone(&counts.1)));
            }
        });
        Self { address, asked, sent, task }
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    /// (requests, files sent) since the last call.
    fn counts(&self) -> (usize, usize) {
        (self.asked.swap(0, Ordering::Relaxed), self.sent.swap(0, Ordering::Relaxed))
    }
}

impl Drop for Origin {
    fn drop(&mut self) {
        self.task.abort();
    }
}

async fn answer(mut stream: TcpStream, sent: Arc<AtomicUsize>) -> std::io::Result<()> {
    let (read, mut write) = stream.split();
    let mut lines = BufReader::new(read).lines();
    let first = lines.next_line().await?.unwrap_or_default();
    let (mut tag, mut range) = (None, None);
    while let Some(line) = lines.next_line().await?.filter(|line| !line.is_empty()) {
        match line.to_ascii_lowercase().split_once(": ") {
            Some(("if-none-match", value)) => tag = Some(value.to_owned()),
            Some(("range", value)) => range = value.strip_prefix("bytes=0-").and_then(|end| end.parse::<usize>().ok()),
            _ => {}
        }
    }
    let path = first.split([' ', '?']).nth(1).unwrap_or_default();
    let (kind, seed) = path.trim_start_matches('/').split_once('/').unwrap_or_default();
    let etag = format!("\"{seed}\"");
    let file = match kind {
        "huge" => huge_png(),
        _ => noise_png(seed.parse().unwrap_or_default(), SIDE, SIDE),
    };
    let (status, more, body) = match (kind, range) {
        ("moved", _) => ("302 Found", format!("location: /plain/{seed}\r\n"), &[][..]),
        _ if tag.as_ref() == Some(&etag) => ("304 Not Modified", String::new(), &[][..]),
        ("ranged", Some(end)) if end + 1 < file.len() => {
            ("206 Partial Content", format!("content-range: bytes 0-{end}/{}\r\n", file.len()), &file[..=end])
        }
        _ => ("200 OK", String::new(), &file[..]),
    };
    sent.fetch_add(usize::from(!body.is_empty()), Ordering::Relaxed);
    let length = body.len();
    let head =
        format!("HTTP/1.1 {status}\r\netag: {etag}\r\n{more}content-length: {length}\r\nconnection: close\r\n\r\n");
    write.write_all(head.as_bytes()).await?;
    write.write_all(body).await?;
    write.shutdown().await
}

#[tokio::test]
async fn what_routers_get_wrong_by_url_is_right() {
    let (fleet, origin) = (fleet("").await, Origin::start().await);
    // (probe, first path, second path, want, files that the origin sends for both)
    let rows = [
        ("10, 11: an origin that honours Range", "/ranged/10", "/ranged/10", Want::Hit("65/66"), 1),
        ("12: same bytes, other query", "/ranged/12?sig=1", "/ranged/12?sig=2", Want::Hit("65/66"), 2),
        ("13, 14: an origin that ignores Range", "/plain/13", "/plain/13", Want::Hit("65/66"), 1),
        ("15: a redirect", "/moved/15", "/moved/15", Want::Hit("65/66"), 1),
        ("19: a head of 60000×60000", "/plain/19", "/huge/19", Want::Refused { word: "pixels" }, 2),
    ];
    for (what, first, second, want, files) in rows {
        let [first, second] = [first, second].map(|path| about(&origin.url(path)));
        check(&fleet, &Probe { what, first, second, want }).await;
        assert_eq!(origin.counts().1, files, "{what}: files sent by the origin");
    }
    let (inline, url) = (noise_png(1, SIDE, SIDE), origin.url("/plain/1"));
    let (first, second) = (about(&url), about(&data_url("image/png", &inline)));
    check(&fleet, &Probe { what: "a file by URL, then inline", first, second, want: Want::Hit("65/66") }).await;
}

#[tokio::test]
async fn a_file_that_may_be_kept_is_asked_for_once() {
    let (fleet, origin) = (fleet(", fresh_for: 1m").await, Origin::start().await);
    for path in ["/ranged/1", "/plain/2"] {
        let body = about(&origin.url(path));
        check(&fleet, &Probe { what: path, first: body.clone(), second: body, want: Want::Hit("65/66") }).await;
        assert_eq!(origin.counts(), (1, 1), "{path}");
    }
}

#[tokio::test]
async fn loopback_is_closed_by_default_and_the_answer_says_why() {
    let fleet = Fleet::start(FleetConfig::tiny(1, Mode::Precise)).await.expect("a fleet");
    let origin = Origin::start().await;
    for (url, word) in [(origin.url("/plain/1"), "port"), ("http://127.0.0.1/a.png".to_owned(), "address")] {
        let second = fleet.client.stream(&fleet.chat_url().expect("a URL"), about(&url)).await.expect("an answer");
        assert_eq!(second.status, 400, "{}", second.text);
        assert!(second.text.contains("media part 0") && second.text.contains(word), "{url}: {}", second.text);
    }
    assert_eq!(origin.counts(), (0, 0), "nobody asked the origin");
}
