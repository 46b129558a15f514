use std::collections::VecDeque;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};

use bytes::Bytes;
use fovea_gossip::message::EngineKind;
use fovea_kv::Tier;
use tokio::sync::mpsc;

use super::*;
use crate::config::Config;
use crate::engine::events::{Frame, ReplayError};
use crate::worker::lock;

/// A source whose events a test sends, and whose replays it has written down.
struct Scripted {
    events: mpsc::Receiver<SourceEvent>,
    replays: Arc<Mutex<VecDeque<Vec<Frame>>>>,
    asked: mpsc::UnboundedSender<u64>,
    reconnects: Arc<AtomicU32>,
}

/// In a replay: nothing comes any more, no end marker either.
const SILENCE: u8 = 255;

struct ScriptedReplay(VecDeque<Frame>);

impl EventSource for Scripted {
    type Replay = ScriptedReplay;

    async fn next(&mut self) -> SourceEvent {
        match self.events.recv().await {
            Some(event) => event,
            None => std::future::pending().await,
        }
    }

    fn reconnect(&mut self) {
        self.reconnects.fetch_add(1, Relaxed);
    }

    async fn replay(&mut self, from: u64) -> Result<ScriptedReplay, ReplayError> {
        self.asked.send(from).unwrap();
        let replay = lock(&self.replays).pop_front().ok_or(ReplayError::None)?;
        Ok(ScriptedReplay(replay.into()))
    }
}

impl ReplayStream for ScriptedReplay {
    async fn next(&mut self) -> Result<Option<Frame>, ReplayError> {
        match self.0.front() {
            Some(frame) if frame.seq == u64::from(SILENCE) => std::future::pending().await,
            _ => Ok(self.0.pop_front()),
        }
    }
}

/// One step's events: block `n` stored, on top of block `n − 1`. Positional layout, msgpack by hand.
fn batch(n: u8) -> Bytes {
    let parent: &[u8] = if n == 0 { &[0xc0] } else { &[n - 1] };
    let mut bytes = vec![0x93, 0xcb, 0, 0, 0, 0, 0, 0, 0, 0, 0x91, 0x99, 0xab];
    bytes.extend_from_slice(b"BlockStored");
    bytes.extend_from_slice(&[0x91, n]);
    bytes.extend_from_slice(parent);
    bytes.extend_from_slice(&[0x92, n, n, 0x02, 0xc0, 0xc0, 0xc0, 0xc0, 0x00]);
    Bytes::from(bytes)
}

fn frame(seq: u8) -> Frame {
    Frame { seq: seq.into(), payload: batch(seq) }
}

struct Rig {
    state: Arc<State>,
    worker: Arc<Worker>,
    events: mpsc::Sender<SourceEvent>,
    asked: mpsc::UnboundedReceiver<u64>,
    replays: Arc<Mutex<VecDeque<Vec<Frame>>>>,
    reconnects: Arc<AtomicU32>,
    stop: CancellationToken,
}

fn rig(replays: &[&[u8]]) -> Rig {
    let state = State::new(&Config::default());
    let worker = Arc::clone(&state.rebuild(&[0], EngineKind::Vllm).workers[0]);
    let (events, receiver) = mpsc::channel(16);
    let (sender, asked) = mpsc::unbounded_channel();
    let replays: VecDeque<Vec<Frame>> =
        replays.iter().map(|seqs| seqs.iter().map(|&seq| frame(seq)).collect()).collect();
    let replays = Arc::new(Mutex::new(replays));
    let reconnects = Arc::new(AtomicU32::new(0));
    let source = Scripted {
        events: receiver,
        replays: Arc::clone(&replays),
        asked: sender,
        reconnects: Arc::clone(&reconnects),
    };
    let pace = Pace { flush_interval: Duration::from_millis(5), audit_after: Duration::from_secs(5) };
    let stop = CancellationToken::new();
    let follower =
        Follower::new(source, Wire::Vllm, Arc::clone(&worker), Arc::clone(&state), EventMetrics::default(), pace);
    tokio::spawn(follower.run(stop.clone()));
    Rig { state, worker, events, asked, replays, reconnects, stop }
}

impl Rig {
    async fn live(&self, seqs: &[u8]) {
        for &seq in seqs {
            self.events.send(SourceEvent::Frame(frame(seq))).await.unwrap();
        }
    }

    /// Waits until so many blocks are published.
    async fn published(&self, blocks: usize) {
        let mut published = self.state.published();
        loop {
            published.mark_unchanged();
            let (_, _, levels) = self.worker.snapshot().unwrap();
            if levels[usize::from(Tier::Gpu.index())].len() == blocks {
                return;
            }
            published.changed().await.unwrap();
        }
    }
}

impl Drop for Rig {
    fn drop(&mut self) {
        self.stop.cancel();
    }
}

#[tokio::test(start_paused = true)]
async fn history_is_replayed_and_live_batches_follow() {
    let mut rig = rig(&[&[0, 1]]);
    rig.events.send(SourceEvent::Connected).await.unwrap();
    rig.live(&[2]).await;
    rig.published(3).await;
    assert_eq!(rig.asked.recv().await, Some(0));
    assert!(rig.worker.stream().complete);
    assert_eq!(rig.worker.stream().watermark, Some(2));
    assert_eq!(rig.worker.facts().block_size, 2);
}

#[tokio::test(start_paused = true)]
async fn a_gap_is_healed_by_a_replay() {
    let mut rig = rig(&[&[0], &[0, 1, 2]]);
    rig.events.send(SourceEvent::Connected).await.unwrap();
    rig.published(1).await;
    rig.live(&[2]).await;
    rig.published(3).await;
    assert_eq!((rig.asked.recv().await, rig.asked.recv().await), (Some(0), Some(0)));
}

#[tokio::test(start_paused = true)]
async fn a_lost_last_batch_is_found_by_the_audit() {
    let mut rig = rig(&[&[0], &[0, 1]]);
    rig.events.send(SourceEvent::Connected).await.unwrap();
    rig.live(&[0]).await;
    rig.published(2).await;
    assert_eq!((rig.asked.recv().await, rig.asked.recv().await), (Some(0), Some(0)));
    assert!(rig.worker.stream().live && rig.worker.stream().complete);
    while rig.reconnects.load(Relaxed) == 0 {
        tokio::task::yield_now().await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_cache_reset_that_the_proxy_saw_withdraws_everything_at_once() {
    let rig = rig(&[&[0, 1]]);
    rig.events.send(SourceEvent::Connected).await.unwrap();
    rig.published(2).await;
    rig.state.cache_reset();
    rig.published(0).await;
    rig.live(&[2]).await;
    assert!(rig.worker.stream().live);
}

#[tokio::test(start_paused = true)]
async fn without_replay_what_comes_is_taken_but_never_called_complete() {
    let mut rig = rig(&[]);
    rig.events.send(SourceEvent::Connected).await.unwrap();
    assert_eq!((rig.asked.recv().await, rig.asked.recv().await), (Some(0), Some(0)));
    rig.events.send(SourceEvent::Frame(Frame { seq: 9, payload: batch(0) })).await.unwrap();
    rig.published(1).await;
    assert!(rig.worker.stream().live && !rig.worker.stream().complete);
}

#[tokio::test(start_paused = true)]
async fn a_new_life_of_the_engine_is_a_new_epoch() {
    let rig = rig(&[&[0, 1], &[], &[0]]);
    rig.events.send(SourceEvent::Connected).await.unwrap();
    rig.published(2).await;
    let (before, _) = rig.worker.sent();
    rig.events.send(SourceEvent::Disconnected).await.unwrap();
    rig.events.send(SourceEvent::Connected).await.unwrap();
    rig.published(1).await;
    assert!(rig.worker.sent().0 > before);
    assert!(lock(&rig.replays).is_empty());
}

#[tokio::test(start_paused = true)]
async fn broken_messages_are_passed_over() {
    let rig = rig(&[&[0]]);
    rig.events.send(SourceEvent::Connected).await.unwrap();
    rig.events.send(SourceEvent::Malformed).await.unwrap();
    rig.live(&[1]).await;
    rig.published(2).await;
}

#[tokio::test(start_paused = true)]
async fn an_audit_that_fails_takes_nothing_away() {
    let mut rig = rig(&[]);
    rig.events.send(SourceEvent::Connected).await.unwrap();
    rig.events.send(SourceEvent::Frame(Frame { seq: 9, payload: batch(0) })).await.unwrap();
    rig.published(1).await;
    let (epoch, _) = rig.worker.sent();
    // Two from the connect, then two audits of two tries each.
    for _ in 0..7 {
        rig.asked.recv().await;
    }
    let (now, _, levels) = rig.worker.snapshot().unwrap();
    assert_eq!((now, levels[0].len(), rig.worker.stream().live), (epoch, 1, true));
}

#[tokio::test(start_paused = true)]
async fn a_replay_that_falls_silent_is_asked_for_again_however_busy_the_engine_is() {
    let mut rig = rig(&[&[0, SILENCE], &[0]]);
    rig.events.send(SourceEvent::Connected).await.unwrap();
    assert_eq!(rig.asked.recv().await, Some(0));
    let mut seq = 0;
    loop {
        assert!(seq < 20, "no second replay");
        tokio::select! {
            _ = rig.asked.recv() => break,
            () = tokio::time::sleep(Duration::from_millis(500)) => seq += 1,
        }
        rig.live(&[seq]).await;
    }
    rig.published(usize::from(seq) + 1).await;
    assert!(rig.worker.stream().complete);
}
