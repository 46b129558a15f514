//! Real Python processes that work, fail, hang, die and babble. Skipped, with a line that says so, where there is no python3.

mod tensors;
mod torch;

use std::fs;
use std::process::Command;
use std::time::Duration;

use fovea_kv::MediaId;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use super::*;
use crate::error::EncodeError;
use crate::service::{Encoder, Health, ServiceConfig};
use crate::tensor::{Expect, check};

/// What it does is told by the picture's bytes; a row is the worker's process id.
const PROBE: &str = r#"
import array, base64, os, struct, sys, time
import dynamo.vllm.multimodal_utils.vision_encoder_backend
from dynamo.vllm.multimodal_utils.custom_encoder.adapter.qwen3_vl import Qwen3VLImageEncoding
from dynamo.vllm.multimodal_utils.custom_encoder.backend.base import VisionEncoderBackend
from dynamo.vllm.multimodal_utils.custom_encoder import Preprocessed, VisionEncoderBackend

def rows(value):
    return memoryview(struct.pack("<2f", value, 1.0)).cast("B").cast("f", (1, 2))

class Probe(VisionEncoderBackend):
    preprocess_concurrency = 2
    max_batch_cost = 4
    deterministic = True

    def build(self, model_id):
        self.model = model_id

    def preprocess(self, raw):
        head, _, data = raw.partition(",")
        if head != "data:image/png;base64":
            raise RuntimeError(head)
        item = base64.b64decode(data)
        if item == b"bad":
            raise ValueError("no such picture")
        if item == b"broken":
            raise RuntimeError("/secret/path")
        return Preprocessed(item, cost=9 if item == b"large" else True if item == b"cost" else 1)

    def forward_batch(self, items, target_bucket=None):
        assert target_bucket is None
        out = []
        for item in items:
            if item == b"hang":
                time.sleep(1000)
            if item == b"slow":
                time.sleep(0.02)
            if item == b"die":
                os.kill(os.getpid(), 9)
            if item == b"value":
                raise ValueError("odd picture")
            if item == b"runtime":
                raise RuntimeError("/secret/path")
            if item == b"memory":
                raise MemoryError("none left")
            if item == b"device":
                raise RuntimeError("CUDA error: an illegal memory access was encountered")
            if item == b"each":
                out.append(ValueError("this one"))
            elif item == b"shape":
                out.append(array.array("f", [1.0]))
            elif item != b"short":
                out.append(rows(float(os.getpid())))
        return None if items == [b"none"] else out

    def close(self):
        print("closing " + "x" * 10000)
        open(os.path.join(self.model, "closed"), "w").close()

class Raws(VisionEncoderBackend):
    raw_input = "bytes"
    def build(self, model_id):
        pass
    def forward_batch(self, items, target_bucket=None):
        return [rows(float(len(item))) for item in items]

class Unused(Raws):
    def preprocess(self, raw):
        return Preprocessed(raw)

class Cost(Raws):
    max_batch_cost = True

class Failing(Raws):
    def build(self, model_id):
        raise RuntimeError("no weights")

class Dying(Raws):
    def build(self, model_id):
        os._exit(3)

class Slow(Raws):
    def build(self, model_id):
        time.sleep(1000)

class Other:
    pass
"#;

/// False, with a line, where tests of Python cannot run.
fn python() -> bool {
    let found = Command::new("python3").arg("--version").output().is_ok_and(|output| output.status.success());
    if !found {
        println!("skipped: no python3");
    }
    found
}

struct Rig {
    encoder: Encoder,
    folder: TempDir,
    transfer: TempDir,
}

fn config(class: &str, folder: &TempDir) -> PythonConfig {
    fs::write(folder.path().join("probe.py"), PROBE).expect("written");
    let mut config = PythonConfig::new(class, folder.path().to_string_lossy());
    config.python_path = vec![folder.path().to_owned()];
    config.restart_backoff = [Duration::from_millis(10), Duration::from_millis(100)];
    config.heartbeat = Duration::from_millis(50);
    config
}

async fn rig(class: &str, adjust: impl FnOnce(&mut PythonConfig)) -> Rig {
    let (folder, transfer) = (TempDir::new().expect("folder"), TempDir::new().expect("folder"));
    let mut config = config(class, &folder);
    config.transfer_dir = Some(transfer.path().to_owned());
    adjust(&mut config);
    let encoder = Encoder::start(ServiceConfig::default(), || PythonEncoder::build(config)).await.expect("started");
    Rig { encoder, folder, transfer }
}

fn images(items: &[&'static [u8]]) -> Vec<RawImage> {
    let one = |(index, &bytes): (usize, &&'static [u8])| {
        let bytes = Bytes::from_static(bytes);
        RawImage { bytes, mime: None, id: MediaId([0; 32]), index }
    };
    items.iter().enumerate().map(one).collect()
}

fn first_number(embedding: &Embedding) -> f32 {
    embedding.data.first_chunk().map(|bytes| f32::from_le_bytes(*bytes)).expect("a row")
}

impl Rig {
    async fn encode(&self, items: &[&'static [u8]]) -> Result<Vec<Embedding>, EncodeError> {
        let wait = tokio::time::timeout(Duration::from_secs(60), self.encoder.encode(images(items)));
        wait.await.expect("every request is answered")
    }

    async fn process(&self) -> Pid {
        let rows = self.encode(&[b"x"]).await.expect("encoded");
        Pid::from_raw(first_number(&rows[0]) as i32).expect("a process id")
    }

    async fn until_ready_again(&self, restarts: u64) {
        let wait = async {
            while self.encoder.health() != Health::Ready || self.encoder.stats().restarts < restarts {
                tokio::time::sleep(Duration::from_millis(5)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(60), wait).await.expect("it comes back");
    }
}

#[tokio::test]
async fn a_class_is_built_fed_and_closed() {
    if !python() {
        return;
    }
    let rig = rig("probe:Probe", |_| {}).await;
    let spec = rig.encoder.spec();
    assert_eq!((spec.max_batch_cost, spec.preprocess_concurrency), (NonZeroU32::new(4), 2));
    assert!(spec.deterministic && spec.buckets.is_empty());
    let rows = rig.encode(&[b"a".as_slice(); 9]).await.expect("encoded");
    assert_eq!((rows.len(), rows[8].rows, rows[8].width, rows[8].dtype), (9, 1, 2, DType::F32));
    rig.encoder.close().await;
    assert!(rig.folder.path().join("closed").exists());
    assert_eq!(fs::read_dir(rig.transfer.path()).expect("folder").count(), 0, "nothing is left behind");
}

#[tokio::test]
async fn without_a_pool_the_raw_image_comes_with_the_batch() {
    if !python() {
        return;
    }
    let rig = rig("probe.Raws", |_| {}).await;
    let rows = rig.encode(&[b"four", b"seven.."]).await.expect("encoded");
    assert_eq!(rows.iter().map(first_number).collect::<Vec<_>>(), [4.0, 7.0]);
}

/// A stand-in for an installed Dynamo: its class must be the one asked for.
const INSTALLED: &str = r#"
class Preprocessed:
    pass
class VisionEncoderBackend:
    max_batch_cost = 77
    buckets = None
    preprocess_concurrency = 0
    def preprocess(self, raw):
        return raw
    def close(self):
        pass
"#;

#[tokio::test]
async fn an_installed_dynamo_comes_before_our_names() {
    if !python() {
        return;
    }
    let rig = rig("mine:Raws", |config| {
        let mut folder = config.python_path[0].clone();
        let mine =
            PROBE.split("class Raws").nth(1).and_then(|rest| rest.split("class Unused").next()).expect("a class");
        let names = "from dynamo.vllm.multimodal_utils.custom_encoder import VisionEncoderBackend\n\
                     import struct\ndef rows(value):\n    \
                     return memoryview(struct.pack('<f', value)).cast('B').cast('f', (1, 1))\n";
        fs::write(folder.join("mine.py"), format!("{names}class Raws{mine}")).expect("written");
        for name in ["dynamo", "vllm", "multimodal_utils"] {
            folder = folder.join(name);
            fs::create_dir(&folder).expect("made");
            fs::write(folder.join("__init__.py"), "").expect("written");
        }
        fs::write(folder.join("custom_encoder.py"), INSTALLED).expect("written");
    });
    let rig = rig.await;
    assert_eq!(rig.encoder.spec().max_batch_cost, NonZeroU32::new(77));
    assert_eq!(first_number(&rig.encode(&[b"four"]).await.expect("encoded")[0]), 4.0);
}

#[tokio::test]
async fn each_failure_of_a_class_is_told_as_it_may_be() {
    if !python() {
        return;
    }
    let rig = rig("probe:Probe", |_| {}).await;
    let rows: &[(&[&'static [u8]], u16, &str)] = &[
        (&[b"x", b"bad"], 400, "image 1: no such picture"),
        (&[b"broken"], 500, "image 0: the encoder failed on it"),
        (&[b"cost"], 500, "image 0: the encoder failed on it"),
        (&[b"large"], 413, "image 0: it costs the encoder 9, which takes 4 at once: send fewer or smaller images"),
        (&[b"value"], 400, "image 0: odd picture"),
        (&[b"runtime"], 500, "image 0: the encoder failed on it"),
        (&[b"x", b"each"], 400, "image 1: this one"),
        (&[b"shape"], 500, "image 0: the encoder failed on it"),
        (&[b"short"], 500, "images: the encoder failed on it"),
        (&[b"none"], 500, "image 0: the encoder failed on it"),
    ];
    for (items, status, text) in rows {
        let error = rig.encode(items).await.expect_err("fails");
        assert_eq!((error.status(), error.to_string().as_str()), (*status, *text), "{}", error.detail());
    }
    assert_eq!(rig.encode(&[b"x", b"memory"]).await.expect_err("fails").status(), 503);
    assert_eq!(rig.encoder.stats().restarts, 0, "none of it ends the process");
    assert_eq!(rig.encode(&[b"device"]).await, Err(EncodeError::Unavailable));
    rig.until_ready_again(1).await;
    rig.encode(&[b"x"]).await.expect("encoded");
}

#[tokio::test]
async fn a_kill_under_load_answers_everybody_and_the_encoder_comes_back() {
    if !python() {
        return;
    }
    let rig = rig("probe:Probe", |_| {}).await;
    let victim = rig.process().await;
    let load = |_| {
        let encoder = rig.encoder.clone();
        tokio::spawn(async move { encoder.encode(images(&[b"slow", b"slow", b"slow"])).await })
    };
    let tasks: Vec<_> = (0..20).map(load).collect();
    while rig.encoder.stats().batches < 3 {
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
    kill_process(victim, Signal::KILL).expect("killed");
    let (mut good, mut lost) = (0, 0);
    for task in tasks {
        match tokio::time::timeout(Duration::from_secs(60), task).await.expect("answered").expect("no panic") {
            Ok(rows) => good += usize::from(rows.len() == 3),
            Err(error) => lost += usize::from(error.status() == 503),
        }
    }
    assert_eq!(good + lost, 20, "rows or a 503: {good}, {lost}");
    assert!(lost > 0);
    rig.until_ready_again(1).await;
    assert_ne!(rig.process().await, victim);
    assert_eq!(fs::read_dir(rig.transfer.path()).expect("folder").count(), 1, "one worker, one folder");
}

#[tokio::test]
async fn a_hang_is_ended_and_the_encoder_comes_back() {
    if !python() {
        return;
    }
    let rig = rig("probe:Probe", |config| config.forward_timeout = Duration::from_millis(500)).await;
    let victim = rig.process().await;
    assert_eq!(rig.encode(&[b"hang"]).await, Err(EncodeError::Unavailable));
    rig.until_ready_again(1).await;
    assert_ne!(rig.process().await, victim);
}

#[tokio::test]
async fn a_silent_process_is_ended_and_the_encoder_comes_back() {
    if !python() {
        return;
    }
    let rig = rig("probe:Probe", |config| config.heartbeat_timeout = Duration::from_millis(500)).await;
    let victim = rig.process().await;
    kill_process(victim, Signal::STOP).expect("stopped");
    assert_eq!(rig.encode(&[b"x"]).await.expect_err("lost").status(), 503);
    rig.until_ready_again(1).await;
    assert_ne!(rig.process().await, victim);
}

#[test]
fn a_worker_ends_when_its_sidecar_is_gone() {
    if !python() {
        return;
    }
    let folder = TempDir::new().expect("folder");
    let config = config("probe:Raws", &folder);
    let mut process = process::start(&config).expect("started");
    let mut reader = wire::FrameReader::default();
    let mut read =
        |socket: &mut std::os::unix::net::UnixStream| reader.read(socket).expect("a frame").expect("no time-out");
    assert_eq!(read(&mut process.socket)["op"], "hello");
    let build = json!({"class": config.class, "model": config.model, "path": config.python_path});
    std::io::Write::write_all(&mut process.socket, &wire::head(&build, 0)).expect("sent");
    assert_eq!(read(&mut process.socket)["op"], "ready");
    drop(process.socket);
    let (sender, receiver) = std::sync::mpsc::channel();
    let mut child = process.child;
    std::thread::spawn(move || sender.send(child.wait()));
    let status = receiver.recv_timeout(Duration::from_secs(60)).expect("it ends").expect("reaped");
    assert!(!status.success());
}

#[test]
fn an_item_that_nobody_waits_for_is_forgotten_by_the_worker() {
    let (ours, mut theirs) = std::os::unix::net::UnixStream::pair().expect("a socket");
    let session = Session::new(0, PathBuf::new(), None, ours);
    let late = session.call(|_| json!({"op": "preprocess"}), &[], Duration::from_millis(1));
    assert_eq!(late, Err(CallError::TimedOut));
    session.resolve(1, json!({"id": 1, "handle": 42}));
    session.send(json!({"op": "ping"}), &[]).expect("sent");
    let mut reader = wire::FrameReader::default();
    let mut next = || reader.read(&mut theirs).expect("a frame").expect("no time-out");
    assert_eq!(next()["op"], "preprocess");
    assert_eq!(next()["drop"], json!([42]));
    session.end();
    assert_eq!(session.call(|_| json!({}), &[], Duration::from_secs(9)), Err(CallError::Lost));
}

const LARGE: &str = r#"
from dynamo.vllm.multimodal_utils.custom_encoder import VisionEncoderBackend
class Large(VisionEncoderBackend):
    raw_input = "bytes"
    def build(self, model_id):
        self.rows = memoryview(bytearray(1024 * 4096 * 4)).cast("f", (1024, 4096))
    def forward_batch(self, items, target_bucket=None):
        return [self.rows for item in items]
"#;

/// Not a pass or fail: prints what the process adds to an encoder. `cargo test … round_trip -- --ignored --nocapture`.
#[tokio::test]
#[ignore = "a measurement"]
async fn cost_of_a_round_trip() {
    if !python() {
        return;
    }
    for (class, name, bytes) in
        [("large:Large", "1024 rows of 4096 float32, 16 MiB", 300_000), ("probe:Raws", "one row", 20)]
    {
        let rig = rig(class, |config| {
            fs::write(config.python_path[0].join("large.py"), LARGE).expect("written");
            config.transfer_dir = None;
        });
        let rig = rig.await;
        let raw = RawImage { bytes: Bytes::from(vec![0; bytes]), mime: None, id: MediaId([0; 32]), index: 0 };
        let mut times = Vec::new();
        for _ in 0..101 {
            let start = std::time::Instant::now();
            rig.encoder.encode(vec![raw.clone()]).await.expect("encoded");
            times.push(start.elapsed());
        }
        times.sort_unstable();
        println!("{name}: p50 {:?}, p90 {:?}", times[50], times[90]);
    }
}

#[tokio::test]
async fn a_start_that_fails_names_the_remedy() {
    if !python() {
        return;
    }
    let rows = [
        ("nothing", "write pkg.module:Class"),
        ("no_such_module:Probe", "encoder.python.python_path"),
        ("probe:Nobody", "check the name"),
        ("probe:Other", "derive it from that class"),
        ("probe:Unused", "set it to 1 or more"),
        ("probe:Cost", "max_batch_cost is True"),
        ("probe:Failing", "no weights"),
        ("probe:Dying", "last words"),
        ("probe:Slow", "start_timeout"),
    ];
    for (class, remedy) in rows {
        let folder = TempDir::new().expect("folder");
        let mut config = config(class, &folder);
        config.start_timeout = Duration::from_secs(if class == "probe:Slow" { 1 } else { 60 });
        let error = PythonEncoder::build(config).err().expect("no start").to_string();
        assert!(error.contains(remedy), "{class}: {error}");
    }
    let folder = TempDir::new().expect("folder");
    let mut missing = config("probe:Probe", &folder);
    missing.interpreter = folder.path().join("python9");
    let error = PythonEncoder::build(missing).err().expect("no start").to_string();
    assert!(error.contains("encoder.python.interpreter"), "{error}");
}

const BABBLE: &str = r#"
import os, socket, struct, json
link = socket.socket(fileno=os.dup(0))
def send(message):
    text = json.dumps(message).encode()
    link.sendall(struct.pack("<II", len(text), 0) + text)
send({"op": "hello", "protocol": 1})
link.recv(1 << 16)
send({"op": "ready", "buckets": [], "preprocess_concurrency": 0, "deterministic": False, "fingerprint": "0"})
data = link.recv(1 << 16)
while b"forward" not in data:
    send({"op": "pong"})
    data = link.recv(1 << 16)
link.sendall(b"\xff" * 100000)
link.recv(1 << 16)
"#;

#[tokio::test]
async fn a_babbling_worker_fails_its_requests_and_is_replaced() {
    if !python() {
        return;
    }
    let rig = rig("probe:Probe", |config| config.scripts[0].1 = BABBLE).await;
    for restarts in 1..3 {
        assert_eq!(rig.encode(&[b"x"]).await, Err(EncodeError::Unavailable));
        rig.until_ready_again(restarts).await;
    }
    let folder = TempDir::new().expect("folder");
    let mut config = config("probe:Probe", &folder);
    config.scripts[0].1 = "import os; os.write(0, b'GET / HTTP/1.1 and so on')";
    let error = PythonEncoder::build(config).err().expect("no start").to_string();
    assert!(error.contains("another protocol"), "{error}");
}

#[tokio::test]
async fn the_plain_example_gives_what_an_engine_takes() {
    if !python() {
        return;
    }
    let examples = concat!(env!("CARGO_MANIFEST_DIR"), "/../../deploy/examples/encoder");
    let picture = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/encoder/resize/gradient_up.in.png");
    let rig = rig("plain:PlainEncoder", |config| config.python_path = vec![examples.into()]).await;
    let bytes = Bytes::from(fs::read(picture).expect("a vector"));
    let raw = RawImage { bytes, mime: None, id: MediaId([0; 32]), index: 0 };
    let alone = rig.encoder.encode(vec![raw.clone()]).await.expect("encoded");
    let together = rig.encoder.encode(vec![raw.clone(), raw]).await.expect("encoded");
    assert!(together.iter().all(|rows| *rows == alone[0]));
    let expect = Expect { width: 64, rows: None, merge: Some(2), dtype: rig.encoder.spec().dtype };
    check(alone[0].clone(), &expect).expect("an engine survives it");
}
