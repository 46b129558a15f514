//! A thousand sidecars and a few balancers in one process: joins, loads and deltas for a while, then one balancer that comes back cold.
//!
//! The sidecars' sets are made up as they are sent, so that what is measured is the balancers; frames, inboxes, indexes, fleets, choice and
//! the sidecars' rings are the real ones.

use std::time::Instant;

use anyhow::{Context as _, ensure};
use bytes::Bytes;
use fovea_balancer_core::choose::{self, Candidate, Query};
use fovea_balancer_core::fleet::{Fleet, Freshness, WorkerKey};
use fovea_balancer_core::index::{Index, WorkerIndex};
use fovea_balancer_core::load::{Charge, Report};
use fovea_gossip::codec::{Decoder, encode_sidecar};
use fovea_gossip::inbox::{Change, Inbox};
use fovea_gossip::message::{FromSidecar, LevelDelta, Load};
use fovea_gossip::outbox::{Cursor, Next, Outbox, RingLimits, snapshot_frames};
use fovea_kv::SequenceHash;

use crate::balancer::{MODEL, description};
use crate::prompt::BLOCK;
use crate::stream::hello;

#[derive(Clone, Copy, Debug)]
pub struct Size {
    pub sidecars: usize,
    pub balancers: usize,
    /// Blocks per worker, half of them shared by eight workers.
    pub blocks: u64,
    /// Virtual seconds of load and deltas.
    pub seconds: u64,
}

/// Load messages and deltas of a worker in a second.
const LOADS: u64 = 20;
const DELTAS: u64 = 20;
const DELTA_HASHES: u64 = 10;

struct Stream {
    cursor: Cursor,
    decoder: Decoder<FromSidecar>,
    inbox: Inbox,
    place: Option<(WorkerKey, WorkerIndex)>,
    /// Frames on their way.
    wire: std::collections::VecDeque<Bytes>,
}

struct Front {
    fleet: Fleet<u8>,
    index: Index,
    streams: Vec<Stream>,
    live: usize,
}

#[derive(Default)]
struct Counted {
    messages: u64,
    bytes: u64,
}

impl Front {
    fn new(sidecars: usize, now: Instant) -> anyhow::Result<Self> {
        let mut this = Self {
            fleet: Fleet::new(Freshness::default()),
            index: Index::new(1 << 30),
            streams: Vec::with_capacity(sidecars),
            live: 0,
        };
        for sidecar in 0..sidecars {
            let (mut inbox, index) = (Inbox::new(), this.index.add_worker());
            inbox.apply(FromSidecar::Hello(hello(sidecar, 2, true)))?;
            let key = this.fleet.add(description(sidecar, index, true), now);
            let (cursor, decoder, wire) = Default::default();
            this.streams.push(Stream { cursor, decoder, inbox, place: Some((key, index)), wire });
        }
        Ok(this)
    }

    /// Puts what is new for one stream on it.
    fn send(&mut self, sidecar: usize, outbox: &Outbox, blocks: u64) {
        let stream = &mut self.streams[sidecar];
        loop {
            match outbox.poll(&mut stream.cursor) {
                Next::Frame(frame) => stream.wire.push_back(frame),
                Next::NeedSnapshot { worker, epoch, seq } => {
                    let set = (0..blocks).map(|at| hash(sidecar, at, blocks)).collect();
                    stream.wire.extend(snapshot_frames(worker, epoch, seq, [set, Vec::new(), Vec::new()]));
                    stream.cursor.snapshot_taken(worker, epoch, seq);
                }
                Next::Idle => return,
            }
        }
    }

    /// Takes at most one frame of a stream. False = there was none.
    fn take(&mut self, sidecar: usize, counted: &mut Counted) -> anyhow::Result<bool> {
        let stream = &mut self.streams[sidecar];
        let Some(bytes) = stream.wire.pop_front() else { return Ok(false) };
        (counted.messages, counted.bytes) = (counted.messages + 1, counted.bytes + bytes.len() as u64);
        stream.decoder.push(&bytes);
        let (key, place) = stream.place.context("a stream has a place")?;
        while let Some(message) = stream.decoder.next()? {
            for change in stream.inbox.apply(message)? {
                match change {
                    Change::Begin { .. } => self.index.begin_snapshot(place),
                    Change::Live { .. } => {
                        self.index.go_live(place);
                        self.live += 1;
                    }
                    Change::Removed { level, hashes, .. } => self.index.apply_removed(place, level, &hashes),
                    Change::Stored { level, hashes, .. } => self.index.apply_stored(place, level, &hashes)?,
                    Change::Load(load) => self.fleet.report(key, report(&load)),
                    other => anyhow::bail!("{other:?} is not expected here"),
                }
            }
        }
        Ok(true)
    }

    /// Routes a prompt of one worker's blocks: blocks confirmed of the worker chosen.
    fn route(&mut self, of: usize, blocks: u64, now: Instant) -> anyhow::Result<u32> {
        let chain: Vec<_> = (0..64).map(|at| hash(of, at, blocks)).collect();
        let (mut depths, mut explained) = (Vec::new(), Vec::new());
        self.index.depths(&chain, &mut depths);
        let candidates: Vec<_> = self
            .fleet
            .candidates(&0, MODEL, now)
            .map(|worker| {
                let found = depths.binary_search_by_key(&worker.about.index, |depth| depth.worker);
                Candidate {
                    key: worker.key,
                    affinity: worker.key.0,
                    overlap_blocks: found.map_or([0; 3], |at| depths[at].depth),
                    embedded: 0,
                    waiting_tokens: worker.load.waiting_tokens(),
                    decode_tokens: worker.load.decode_tokens(),
                }
            })
            .collect();
        let query = Query { prompt_tokens: 64 * BLOCK + 1, block_tokens: BLOCK, ..Query::default() };
        let chosen = choose::choose(&candidates, &query, &choose::Settings::default(), &mut explained);
        let chosen = chosen.context("no worker takes requests")?;
        let booking = self.fleet.book(chosen.key, Charge::default(), [].into(), now).context("the worker is there")?;
        self.fleet.release(chosen.key, booking, false);
        Ok(chosen.overlap_blocks[0])
    }
}

/// Runs it; the record is for the last line.
///
/// # Errors
/// When a worker is not exact at the end, or a request found none.
pub fn run(size: Size) -> anyhow::Result<serde_json::Value> {
    let Size { sidecars, balancers, blocks, seconds } = size;
    let (now, ring) = (Instant::now(), RingLimits::default());
    let mut outboxes: Vec<_> = (0..sidecars).map(|at| Outbox::new(&[at as u64 + 1], ring)).collect();
    let base = memory("VmRSS");
    let mut fronts = (0..balancers).map(|_| Front::new(sidecars, now)).collect::<anyhow::Result<Vec<_>>>()?;
    let (mut joins, mut steady, mut cold) = <(Counted, Counted, Counted)>::default();
    for front in &mut fronts {
        load_all(front, &outboxes, blocks, &mut joins, |_, _| Ok(()))?;
    }
    let joined = memory("VmRSS");
    for second in 0..seconds {
        steady_second(second, &mut outboxes, &mut fronts, &mut steady)?;
    }
    let rings: usize = outboxes.iter().map(|outbox| outbox.held(0).0).max().unwrap_or(0);
    // One comes back with nothing. The rings do not reach back to its start.
    fronts[0] = Front::new(sidecars, now)?;
    let started = Instant::now();
    let (mut served, mut by_load) = (0_u64, 0_u64);
    load_all(&mut fronts[0], &outboxes, blocks, &mut cold, |front, frames| {
        if frames % 64 == 0 {
            let asked = usize::try_from(frames).unwrap_or(0) * 7 % sidecars;
            served += 1;
            by_load += u64::from(front.route(asked, blocks, now)? == 0);
        }
        Ok(())
    })?;
    let loading = started.elapsed();
    let exact = (0..sidecars).filter_map(|at| fronts[0].route(at, blocks, now).ok()).filter(|held| *held >= 32).count();
    ensure!(exact == sidecars && fronts[0].live == sidecars, "{exact} of {sidecars} workers are exact");
    Ok(serde_json::json!({
        "sidecars": sidecars, "balancers": balancers, "blocks": blocks, "virtual_seconds": seconds,
        "join": {"messages": joins.messages, "bytes": joins.bytes},
        "steady": {"messages": steady.messages, "bytes": steady.bytes},
        "cold": {"messages": cold.messages, "bytes": cold.bytes, "wall_s": loading.as_secs_f64(),
                 "served_meanwhile": served, "of_these_by_load_alone": by_load, "exact_workers": exact},
        "rss_mib": {"before": base, "all_joined": joined, "peak": memory("VmHWM"),
                    "per_balancer": joined.saturating_sub(base) / balancers as u64},
        "ring_bytes_max": rings,
        "index_entries": fronts[0].index.entries(),
    }))
}

/// Gives one balancer everything, the streams by turns, one frame each; not more than a few snapshots are under way.
fn load_all(
    front: &mut Front,
    outboxes: &[Outbox],
    blocks: u64,
    counted: &mut Counted,
    mut between: impl FnMut(&mut Front, u64) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    const AT_ONCE: usize = 32;
    for group in (0..outboxes.len()).collect::<Vec<_>>().chunks(AT_ONCE) {
        group.iter().for_each(|at| front.send(*at, &outboxes[*at], blocks));
        let mut more = true;
        while more {
            more = false;
            for at in group {
                more |= front.take(*at, counted)?;
                between(front, counted.messages)?;
            }
        }
    }
    Ok(())
}

/// A second of every worker's loads and deltas: ten blocks come, and go with the next delta.
fn steady_second(
    second: u64,
    outboxes: &mut [Outbox],
    fronts: &mut [Front],
    counted: &mut Counted,
) -> anyhow::Result<()> {
    for turn in 0..LOADS.max(DELTAS) {
        for (at, outbox) in outboxes.iter_mut().enumerate() {
            let new =
                |turn: u64| (0..DELTA_HASHES).map(move |i| mix(at as u64 + 1, turn * DELTA_HASHES + i, 3)).collect();
            let number = second * DELTAS + turn;
            let mut levels = <[LevelDelta; 3]>::default();
            levels[0].stored = new(number);
            levels[0].removed = number.checked_sub(1).map(new).unwrap_or_default();
            outbox.push(0, levels);
            let load =
                Load { worker: 0, waiting: 1, prefill_tokens: mix(7, number, at as u64).0 % 4096, ..Load::default() };
            let load = encode_sidecar(&FromSidecar::Load(load))?;
            for front in &mut *fronts {
                front.send(at, outbox, 0);
                front.streams[at].wire.push_back(load.clone());
                while front.take(at, counted)? {}
            }
        }
    }
    Ok(())
}

fn report(load: &Load) -> Report {
    Report {
        running: load.running,
        waiting: load.waiting,
        prefill_tokens: load.prefill_tokens,
        decode_tokens: load.decode_tokens,
    }
}

fn hash(sidecar: usize, at: u64, blocks: u64) -> SequenceHash {
    if at < blocks / 2 { mix(sidecar as u64 / 8 + 1, at, 1) } else { mix(sidecar as u64 + 1, at, 2) }
}

fn mix(a: u64, b: u64, c: u64) -> SequenceHash {
    let mut z = (a << 40 ^ b << 2 ^ c).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    SequenceHash((z ^ (z >> 31)).max(1))
}

/// A figure of `/proc/self/status`, in MiB; 0 where there is none.
fn memory(field: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find(|line| line.starts_with(field));
    line.and_then(|line| line.split_whitespace().nth(1)?.parse::<u64>().ok()).unwrap_or(0) / 1024
}
