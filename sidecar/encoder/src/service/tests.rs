//! A served encoder under a script: what its thread does, in which order, and what requests are told.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, mpsc};
use std::time::Duration;

use bytes::Bytes;
use fovea_kv::MediaId;

use super::*;
use crate::backend::{Built, Preprocess, Preprocessed};
use crate::error::{BatchError, ErrorKind, ItemError};
use crate::tensor::DType;

type Log = Arc<Mutex<Vec<String>>>;

/// What the encoder does, by the first word of an image: `bad` is refused in preprocessing, `boom` panics, `lost` loses the device,
/// `stop` waits for the gate.
struct Scripted {
    log: Log,
    gate: mpsc::Receiver<()>,
    thread: std::thread::ThreadId,
}

struct Pre;

impl Preprocess for Pre {
    type Item = String;

    fn preprocess(&self, raw: RawImage) -> Result<Preprocessed<String>, ItemError> {
        let text = String::from_utf8_lossy(&raw.bytes).into_owned();
        match text.starts_with("bad") {
            true => Err(ItemError::Invalid(text)),
            false => Ok(Preprocessed { item: text, cost: 1, key: 0 }),
        }
    }
}

impl VisionEncoder for Scripted {
    type Item = String;
    type Pre = Pre;

    fn forward_batch(
        &mut self,
        items: &[String],
        _bucket: Option<u32>,
    ) -> Result<Vec<Result<Embedding, ItemError>>, BatchError> {
        assert_eq!(std::thread::current().id(), self.thread, "one thread");
        self.log.lock().expect("log").push(items.join("+"));
        for item in items {
            match item.as_str() {
                "stop" => self.gate.recv_timeout(Duration::from_secs(10)).expect("the gate opens"),
                "boom" => panic!("asked for"),
                "lost" => return Err(BatchError::DeviceLost("gone".into())),
                _ => {}
            }
        }
        let one = |item: &String| {
            let data = Bytes::from(item.clone().into_bytes());
            Ok(Embedding { rows: 1, width: 1, dtype: DType::F32, data, grid_thw: None })
        };
        Ok(items.iter().map(one).collect())
    }

    fn close(&mut self) {
        assert_eq!(std::thread::current().id(), self.thread, "one thread");
        self.log.lock().expect("log").push("close".into());
    }
}

struct Rig {
    encoder: Encoder,
    log: Log,
    gate: mpsc::Sender<()>,
}

async fn rig(config: ServiceConfig, preprocess_concurrency: usize) -> Rig {
    let log = Log::default();
    let (gate, receiver) = mpsc::channel();
    let inside = log.clone();
    let build = move || {
        let spec = EncoderSpec {
            width: None,
            dtype: None,
            max_batch_cost: NonZeroU32::new(8),
            max_batch_items: None,
            buckets: vec![],
            preprocess_concurrency,
            deterministic: true,
            fingerprint: [0; 32],
        };
        let encoder = Scripted { log: inside, gate: receiver, thread: std::thread::current().id() };
        Ok(Built { encoder, preprocess: Arc::new(Pre), spec })
    };
    let encoder = Encoder::start(config, build).await.expect("started");
    Rig { encoder, log, gate }
}

fn images(texts: &[&'static str]) -> Vec<RawImage> {
    let one = |(index, text): (usize, &&'static str)| {
        let bytes = Bytes::from_static(text.as_bytes());
        RawImage { bytes, mime: None, id: MediaId([0; 32]), index }
    };
    texts.iter().enumerate().map(one).collect()
}

impl Rig {
    async fn encode(&self, texts: &[&'static str]) -> Result<String, EncodeError> {
        let rows = self.encoder.encode(images(texts)).await?;
        Ok(rows.iter().map(|row| String::from_utf8_lossy(&row.data).into_owned()).collect::<Vec<_>>().join(","))
    }

    fn spawn(&self, texts: &'static [&'static str]) -> tokio::task::JoinHandle<Result<Vec<Embedding>, EncodeError>> {
        let encoder = self.encoder.clone();
        tokio::spawn(async move { encoder.encode(images(texts)).await })
    }

    async fn until(&self, what: &str, reached: impl Fn(&Self) -> bool) {
        let wait = async {
            while !reached(self) {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(10), wait).await.unwrap_or_else(|_| panic!("never: {what}"));
    }

    fn logged(&self) -> String {
        self.log.lock().expect("log").join(" ")
    }
}

#[tokio::test]
async fn results_come_in_order_with_and_without_a_pool() {
    for pool in [0, 3] {
        let rig = rig(ServiceConfig::default(), pool).await;
        assert_eq!(rig.encode(&["a", "b", "c"]).await, Ok("a,b,c".into()));
        assert_eq!(rig.encode(&[]).await, Ok(String::new()));
        rig.encoder.close().await;
        assert_eq!(rig.logged(), "a+b+c close");
        assert_eq!(rig.encoder.health(), Health::Closed);
        assert_eq!(rig.encode(&["a"]).await, Err(EncodeError::Closed));
    }
}

#[tokio::test]
async fn a_bad_image_stops_its_request_before_any_forward_pass() {
    let rig = rig(ServiceConfig::default(), 2).await;
    let error = rig.encode(&["a", "bad one", "bad two"]).await.expect_err("refused");
    assert_eq!((error.status(), error.to_string().as_str()), (400, "image 1: bad one"));
    assert_eq!(rig.logged(), "");
    assert_eq!(rig.encoder.stats().errors_of(ErrorKind::Invalid), 1);
}

#[tokio::test]
async fn requests_that_wait_are_taken_together() {
    let rig = rig(ServiceConfig::default(), 0).await;
    let first = rig.spawn(&["stop"]);
    rig.until("the first is in flight", |rig| rig.logged() == "stop").await;
    let others = [rig.spawn(&["a"]), rig.spawn(&["b", "c"])];
    rig.until("both wait", |rig| rig.encoder.stats().queued_cost == 3).await;
    rig.gate.send(()).expect("gate");
    first.await.expect("task").expect("encoded");
    for other in others {
        other.await.expect("task").expect("encoded");
    }
    let stats = rig.encoder.stats();
    assert_eq!((stats.requests, stats.images, stats.batches, stats.batch_items), (3, 4, 2, 4));
    assert_eq!((stats.queued_cost, stats.pending_images), (0, 0));
}

#[tokio::test]
async fn a_dropped_request_leaves_the_queue() {
    let rig = rig(ServiceConfig::default(), 0).await;
    let first = rig.spawn(&["stop"]);
    rig.until("the first is in flight", |rig| rig.logged() == "stop").await;
    let dropped = rig.spawn(&["never"]);
    rig.until("it waits", |rig| rig.encoder.stats().queued_cost == 1).await;
    dropped.abort();
    rig.until("it is gone", |rig| rig.encoder.stats().queued_cost == 0).await;
    rig.gate.send(()).expect("gate");
    first.await.expect("task").expect("encoded");
    rig.encoder.close().await;
    assert_eq!(rig.logged(), "stop close");
    assert_eq!(rig.encoder.stats().errors_of(ErrorKind::Cancelled), 1);
}

#[tokio::test]
async fn more_than_may_wait_is_answered_busy() {
    let config = ServiceConfig { max_queued_cost: 8, max_pending_images: 9, ..ServiceConfig::default() };
    let rig = rig(config, 0).await;
    let first = rig.spawn(&["stop"]);
    rig.until("the first is in flight", |rig| rig.logged() == "stop").await;
    let second = rig.spawn(&["a", "b", "c", "d"]);
    rig.until("the second waits", |rig| rig.encoder.stats().queued_cost == 4).await;
    let error = rig.encode(&["x", "y", "z", "x", "y"]).await.expect_err("full");
    assert_eq!((error.status(), error.retry_after_s()), (503, Some(1)));
    assert_eq!(rig.encode(&["x"; 10]).await.expect_err("never fits").status(), 413);
    rig.gate.send(()).expect("gate");
    first.await.expect("task").expect("encoded");
    second.await.expect("task").expect("encoded");
}

#[tokio::test]
async fn closing_lets_the_forward_pass_finish_and_fails_the_rest() {
    let rig = rig(ServiceConfig::default(), 0).await;
    let first = rig.spawn(&["stop"]);
    rig.until("the first is in flight", |rig| rig.logged() == "stop").await;
    let waiting = rig.spawn(&["a"]);
    rig.until("the second waits", |rig| rig.encoder.stats().queued_cost == 1).await;
    let closing = tokio::spawn({
        let encoder = rig.encoder.clone();
        async move { encoder.close().await }
    });
    assert_eq!(waiting.await.expect("task"), Err(EncodeError::Closed));
    rig.gate.send(()).expect("gate");
    closing.await.expect("closed");
    assert!(first.await.expect("task").is_ok());
    assert_eq!(rig.logged(), "stop close");
}

#[tokio::test]
async fn a_panic_fails_all_and_is_not_followed_by_close() {
    let rig = rig(ServiceConfig::default(), 0).await;
    assert_eq!(rig.encode(&["boom"]).await, Err(EncodeError::Unavailable));
    rig.until("it is failed", |rig| rig.encoder.health() == Health::Failed).await;
    assert_eq!(rig.encode(&["a"]).await, Err(EncodeError::Unavailable));
    assert_eq!(rig.logged(), "boom");
}

#[tokio::test]
async fn a_lost_device_ends_the_service() {
    let rig = rig(ServiceConfig::default(), 0).await;
    assert_eq!(rig.encode(&["lost"]).await, Err(EncodeError::Unavailable));
    rig.until("it is failed", |rig| rig.encoder.health() == Health::Failed).await;
    assert_eq!(rig.logged(), "lost close");
}

#[tokio::test]
async fn the_last_handle_dropped_closes_the_encoder() {
    let Rig { encoder, log, gate: _gate } = rig(ServiceConfig::default(), 0).await;
    let watched = Arc::downgrade(&encoder.service);
    drop(encoder);
    assert!(watched.upgrade().is_none());
    let wait = async {
        while log.lock().expect("log").is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(10), wait).await.expect("closed");
}

#[tokio::test]
async fn a_failed_build_is_told_and_never_closed() {
    let start = Encoder::start::<Scripted, _>(ServiceConfig::default(), || Err(BuildError::Config("no".into())));
    assert_eq!(start.await.err(), Some(BuildError::Config("no".into())));
    let start = Encoder::start::<Scripted, _>(ServiceConfig::default(), || panic!("asked for"));
    assert_eq!(start.await.err(), Some(BuildError::Failed("panicked".into())));
}

#[tokio::test]
async fn a_short_delay_gathers_a_batch() {
    let config = ServiceConfig { coalesce: Duration::from_millis(200), ..ServiceConfig::default() };
    let rig = rig(config, 0).await;
    let all = [rig.spawn(&["a"]), rig.spawn(&["b"]), rig.spawn(&["c"])];
    for one in all {
        one.await.expect("task").expect("encoded");
    }
    assert_eq!(rig.encoder.stats().batches, 1);
    let full = tokio::time::timeout(Duration::from_millis(100), rig.encode(&["x"; 8]));
    full.await.expect("a full batch does not wait").expect("encoded");
}
