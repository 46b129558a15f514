//! An engine's events as the doctor needs them: does a socket answer, does a replay, and what do the events of the probe show.

use std::collections::BTreeSet;
use std::time::Duration;

use fovea_kv::event::{KvEvent, Stored};
use fovea_kv::{MediaId, sglang};
use http::Method;
use serde_json::Value;
use tokio::time::Instant;

use super::ask::Ask;
use super::check::chain;
use crate::engine::discover::{Rank, Source, Wire};
use crate::engine::events::{EventSource, ReplayStream, SourceEvent, ZmqSource};

/// Until a socket is connected, or an engine has connected to ours (libzmq dials again after 100 ms and more).
const CONNECT: Duration = Duration::from_secs(2);
/// Until the first reply of a replay. SGLang and vLLM look at the socket each 100 ms.
const REPLAY: Duration = Duration::from_secs(2);
/// Most media identities or pads remembered of one request.
const MARKS_MAX: usize = 4096;
/// Path of TensorRT-LLM's queue.
const QUEUE: &str = "/kv_cache_events";
/// Servers before 1.3 hold an idle poll for 2 s.
const QUEUE_TIME: Duration = Duration::from_secs(5);
/// Between two looks at an empty queue.
const POLL: Duration = Duration::from_millis(50);
/// Most messages passed over before the probe.
const DRAINED_MAX: usize = 10_000;

/// How one rank's sockets answered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Link {
    pub rank: u32,
    /// `None` = this rank publishes nothing.
    pub endpoint: Option<String>,
    /// The sidecar binds.
    pub bind: bool,
    pub connected: bool,
    pub replay: Replay,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Replay {
    /// No endpoint is known.
    None,
    /// There can be none: events are fetched.
    Pull,
    /// The first batch that is still there.
    From(u64),
    /// Nothing was published so far.
    Empty,
    Failed(String),
}

/// What stored blocks show while one request runs. Other traffic is in it too where the engine echoes no session.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Marks {
    pub blocks: u64,
    pub media: BTreeSet<String>,
    pub pads: BTreeSet<u32>,
    pub block_sizes: BTreeSet<u32>,
}

/// Source of the events of one rank.
pub enum Listener {
    Zmq { source: Box<ZmqSource>, wire: Wire },
    Pull,
}

/// Opens a rank's sockets; the listener is there when the socket is connected, or none is needed.
pub async fn open(rank: &Rank, ask: &Ask) -> (Link, Option<Listener>) {
    let mut link = Link { rank: rank.rank, endpoint: None, bind: false, connected: false, replay: Replay::None };
    let zmq = match &rank.source {
        None => return (link, None),
        Some(Source::Pull(_)) => {
            let pull = Link { endpoint: Some(QUEUE.into()), connected: true, replay: Replay::Pull, ..link };
            return (pull, Some(Listener::Pull));
        }
        Some(Source::Zmq(zmq)) => zmq,
    };
    link.endpoint = Some(zmq.endpoint.clone());
    link.bind = zmq.bind;
    let mut source = ZmqSource::new(zmq.clone());
    let connected = async { while source.next().await != SourceEvent::Connected {} };
    link.connected = tokio::time::timeout(ask.limit(CONNECT), connected).await.is_ok();
    if zmq.replay.is_some() {
        link.replay = first_reply(&mut source, ask.limit(REPLAY)).await;
    }
    let listener = link.connected.then(|| Listener::Zmq { source: Box::new(source), wire: zmq.wire });
    (link, listener)
}

/// One reply is enough, so that the engine's publisher, which sends nothing else meanwhile, is soon let go.
async fn first_reply(source: &mut ZmqSource, limit: Duration) -> Replay {
    let first = async { source.replay(0).await?.next().await };
    match tokio::time::timeout(limit, first).await {
        Err(_) => Replay::Failed(format!("no reply within {limit:?}")),
        Ok(Err(error)) => Replay::Failed(chain(&error)),
        Ok(Ok(None)) => Replay::Empty,
        Ok(Ok(Some(frame))) => Replay::From(frame.seq),
    }
}

impl Listener {
    /// Passes over what was published before.
    pub async fn drain(&mut self, ask: &Ask) {
        match self {
            Self::Pull => drop(ask.bare(Method::POST, QUEUE, QUEUE_TIME).await),
            Self::Zmq { source, .. } => {
                for _ in 0..DRAINED_MAX {
                    if tokio::time::timeout(Duration::ZERO, source.next()).await.is_err() {
                        break;
                    }
                }
            }
        }
    }

    /// Gathers events until `enough`, or the limit is over. With a session its own events count, unless none came.
    pub async fn gather(
        &mut self,
        ask: &Ask,
        session: Option<&str>,
        limit: Duration,
        enough: impl Fn(&Marks) -> bool,
    ) -> Marks {
        let (mut ours, mut others) = (Marks::default(), Marks::default());
        let end = Instant::now() + ask.limit(limit);
        while !enough(if session.is_some() { &ours } else { &others }) {
            match self {
                Self::Zmq { source, wire } => match tokio::time::timeout_at(end, source.next()).await {
                    Err(_) => break,
                    Ok(SourceEvent::Frame(frame)) => {
                        let batch = wire.decode(&frame.payload).unwrap_or_default();
                        for event in &batch.events {
                            if let KvEvent::Stored(stored) = event {
                                let is_ours = session.is_some() && stored.session.as_deref() == session;
                                if is_ours { &mut ours } else { &mut others }.add(stored, batch.pairs);
                            }
                        }
                    }
                    Ok(_) => {}
                },
                Self::Pull => {
                    let Ok(answer) = ask.bare(Method::POST, QUEUE, QUEUE_TIME).await else { break };
                    let queue = answer.json();
                    others.add_queue(&queue);
                    if Instant::now() >= end || !answer.status.is_success() {
                        break;
                    }
                    if queue.as_array().is_none_or(Vec::is_empty) {
                        tokio::time::sleep(POLL).await;
                    }
                }
            }
        }
        if ours.blocks > 0 { ours } else { others }
    }
}

impl Marks {
    /// With EAGLE tokens come in `pairs`, in which pads cannot be seen.
    fn add(&mut self, stored: &Stored, pairs: bool) {
        self.blocks += stored.hashes.len() as u64;
        if self.block_sizes.len() < MARKS_MAX && stored.block_size > 0 {
            self.block_sizes.insert(stored.block_size);
        }
        let media = stored.extra.iter().flat_map(|extra| &extra.media);
        self.media.extend(media.map(|(id, _): &(MediaId, i32)| id.to_string()).take(MARKS_MAX));
        let room = if pairs { 0 } else { MARKS_MAX.saturating_sub(self.pads.len()) };
        self.pads.extend(stored.tokens.iter().copied().filter(|&token| sglang::is_pad(token)).take(room));
    }

    /// Events of the queue as they stand: the media keys are texts there, and nothing of the model need be known.
    fn add_queue(&mut self, queue: &Value) {
        for item in queue.as_array().into_iter().flatten() {
            let blocks = item.pointer("/data/blocks").and_then(Value::as_array);
            for block in blocks.into_iter().flatten() {
                self.blocks += 1;
                let keys = block.get("mm_keys").and_then(Value::as_array).into_iter().flatten();
                let ids = keys.filter_map(|key| key.get("hash").and_then(Value::as_str));
                self.media.extend(ids.map(super::check::shown).take(MARKS_MAX));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn media_keys_of_a_queue_are_found() {
        let queue = serde_json::json!([{}, {"event_id": 1, "data": {"type": "created"}},
            {"event_id": 2, "data": {"type": "stored", "blocks": [
                {"mm_keys": []}, {"mm_keys": [{"type": "mm_key", "hash": "ab", "start_offset": 0}]}]}}]);
        let mut marks = Marks::default();
        marks.add_queue(&queue);
        assert_eq!((marks.blocks, marks.media), (2, BTreeSet::from(["ab".to_owned()])));
    }
}
