//! The streams between sidecars and balancers: bytes in order with a delay, ends that close, stall or vanish, and what each end says.

use std::collections::VecDeque;

use bytes::Bytes;
use fovea_gossip::codec::{Decoder, encode_balancer, encode_sidecar};
use fovea_gossip::message::{
    BucketMask, Buckets, Digest, EngineFacts, EngineKind, FromBalancer, FromSidecar, HashScheme, Hello, Load, Version,
    WorkerFacts,
};
use fovea_gossip::outbox::{Cursor, Next, repair_frames, snapshot_frames};
use fovea_kv::Tier;

use crate::Tick;
use crate::balancer::{MODEL, Seat};
use crate::prompt::BLOCK;
use crate::sidecar::Sidecar;

/// Bytes that the two sockets take before a writer waits.
pub const WIRE_MAX: usize = 4 << 10;
/// `gossip.write_timeout`.
const STUCK_AFTER: Tick = 500;
const WELCOME_AFTER: Tick = 300;
const HEARTBEAT: Tick = 25;
const LOAD_PAUSE: Tick = 5;
const DIGEST: Tick = 200;

enum Ask {
    Buckets,
    Repair([BucketMask; 3]),
}

pub struct Conn {
    pub sidecar: usize,
    pub balancer: usize,
    /// Life of the sidecar.
    pub life: u64,
    pub sidecar_open: bool,
    pub balancer_open: bool,
    /// The end that is gone said nothing.
    pub silent: bool,
    /// Nothing passes before.
    pub stalled_until: Tick,
    pub to_balancer: VecDeque<(Tick, Bytes)>,
    to_sidecar: VecDeque<(Tick, Bytes)>,
    pub in_flight: usize,
    pub seat: Seat,
    pub was_live: bool,
    pub sent_bytes: u64,
    pub sent_frames: u64,
    opened: Tick,
    cursor: Cursor,
    decoder: Decoder<FromBalancer>,
    welcome: Option<Version>,
    told_events: Option<bool>,
    asked: VecDeque<Ask>,
    load: Option<Load>,
    load_at: Tick,
    heartbeat_at: Tick,
    digest_at: Tick,
    blocked_since: Option<Tick>,
}

impl Conn {
    pub fn new(sidecar: usize, balancer: usize, life: u64, now: Tick) -> Self {
        Self {
            sidecar,
            balancer,
            life,
            sidecar_open: true,
            balancer_open: true,
            silent: false,
            stalled_until: 0,
            to_balancer: VecDeque::new(),
            to_sidecar: VecDeque::new(),
            in_flight: 0,
            seat: Seat::new(now),
            was_live: false,
            sent_bytes: 0,
            sent_frames: 0,
            opened: now,
            cursor: Cursor::default(),
            decoder: Decoder::new(),
            welcome: None,
            told_events: None,
            asked: VecDeque::new(),
            load: None,
            load_at: 0,
            heartbeat_at: now,
            digest_at: now,
            blocked_since: None,
        }
    }

    fn due(&self, queue: &VecDeque<(Tick, Bytes)>, now: Tick) -> Tick {
        let last = queue.back().map_or(0, |(due, _)| *due);
        (now + 1).max(last).max(self.stalled_until)
    }

    fn put(&mut self, bytes: Bytes, now: Tick) {
        (self.sent_bytes, self.sent_frames) = (self.sent_bytes + bytes.len() as u64, self.sent_frames + 1);
        self.heartbeat_at = now + HEARTBEAT;
        self.in_flight += bytes.len();
        self.to_balancer.push_back((self.due(&self.to_balancer, now), bytes));
    }

    fn say(&mut self, message: &FromSidecar, now: Tick) {
        if let Ok(bytes) = encode_sidecar(message) {
            self.put(bytes, now);
        }
    }

    pub fn answer(&mut self, message: &FromBalancer, now: Tick) {
        let due = self.due(&self.to_sidecar, now);
        self.to_sidecar.push_back((due, encode_balancer(message)));
    }

    /// The next frame for the balancer.
    pub fn arrived(&mut self, now: Tick) -> Option<Bytes> {
        if self.stalled_until > now || self.to_balancer.front().is_none_or(|(due, _)| *due > now) {
            return None;
        }
        let (_, bytes) = self.to_balancer.pop_front()?;
        self.in_flight -= bytes.len();
        Some(bytes)
    }

    /// One tick of the sidecar's end. False = it gives the stream up.
    pub fn speak(&mut self, sidecar: &Sidecar, minor: u16, load: Load, now: Tick) -> bool {
        if !self.hear(now) {
            return false;
        }
        let events = sidecar.replica.is_live();
        if self.told_events.is_none() {
            self.told_events = Some(events);
            self.say(&FromSidecar::Hello(hello(self.sidecar, minor, events)), now);
        }
        let Some(version) = self.welcome else { return now < self.opened + WELCOME_AFTER };
        if self.in_flight > WIRE_MAX {
            return now < *self.blocked_since.get_or_insert(now) + STUCK_AFTER;
        }
        self.blocked_since = None;
        self.blocks(sidecar, now);
        if self.told_events != Some(events) && self.in_flight <= WIRE_MAX {
            // Deltas before the claim that they are complete.
            self.told_events = Some(events);
            self.say(&FromSidecar::Hello(hello(self.sidecar, minor, events)), now);
        }
        while let Some(ask) = self.asked.pop_front() {
            self.reply(ask, sidecar, now);
        }
        if self.load != Some(load) && now >= self.load_at {
            (self.load, self.load_at) = (Some(load), now + LOAD_PAUSE);
            self.say(&FromSidecar::Load(load), now);
        }
        if minor >= 2 && version.takes_digests() && now >= self.digest_at {
            self.digest_at = now + DIGEST;
            self.digest(sidecar, now);
        }
        if now >= self.heartbeat_at {
            self.say(&FromSidecar::Heartbeat, now);
        }
        true
    }

    fn hear(&mut self, now: Tick) -> bool {
        while self.stalled_until <= now && self.to_sidecar.front().is_some_and(|(due, _)| *due <= now) {
            let Some((_, bytes)) = self.to_sidecar.pop_front() else { break };
            self.decoder.push(&bytes);
            loop {
                match self.decoder.next() {
                    Ok(None) => break,
                    Err(_) => return false,
                    Ok(Some(FromBalancer::Welcome(version))) => self.welcome = Some(version),
                    Ok(Some(FromBalancer::Ack { .. })) => {}
                    Ok(Some(FromBalancer::Resync { worker })) => self.cursor.resync(worker),
                    Ok(Some(FromBalancer::AskBuckets { .. })) => self.asked.push_back(Ask::Buckets),
                    Ok(Some(FromBalancer::AskRepair { buckets, .. })) => self.asked.push_back(Ask::Repair(buckets)),
                }
            }
        }
        true
    }

    fn blocks(&mut self, sidecar: &Sidecar, now: Tick) {
        while self.in_flight <= WIRE_MAX {
            match sidecar.outbox.poll(&mut self.cursor) {
                Next::Frame(frame) => self.put(frame, now),
                Next::NeedSnapshot { worker, epoch, seq } => {
                    let levels = Tier::ALL.map(|level| sidecar.publisher.snapshot(level));
                    snapshot_frames(worker, epoch, seq, levels).for_each(|frame| self.put(frame, now));
                    self.cursor.snapshot_taken(worker, epoch, seq);
                }
                Next::Idle => break,
            }
        }
    }

    fn reply(&mut self, ask: Ask, sidecar: &Sidecar, now: Tick) {
        let Some((epoch, seq)) = sidecar.outbox.watermark(0).filter(|(epoch, seq)| self.cursor.is_at(0, *epoch, *seq))
        else {
            return;
        };
        match ask {
            Ask::Buckets => {
                let levels = Box::new(sidecar.publisher.sums().each_ref().map(|sums| *sums.buckets()));
                self.say(&FromSidecar::Buckets(Buckets { worker: 0, epoch, seq, levels }), now);
            }
            Ask::Repair(buckets) => {
                let levels = Tier::ALL.map(|level| sidecar.publisher.snapshot(level));
                repair_frames(0, epoch, seq, buckets, levels).for_each(|frame| self.put(frame, now));
            }
        }
    }

    fn digest(&mut self, sidecar: &Sidecar, now: Tick) {
        if let Some((epoch, seq)) =
            sidecar.outbox.watermark(0).filter(|(epoch, seq)| self.cursor.is_at(0, *epoch, *seq))
        {
            let levels = sidecar.publisher.sums().each_ref().map(|sums| sums.total());
            self.say(&FromSidecar::Digest(Digest { worker: 0, epoch, seq, levels }), now);
        }
    }
}

pub fn hello(sidecar: usize, minor: u16, events: bool) -> Hello {
    Hello {
        protocol: Version { major: 1, minor },
        advertised_url: sidecar.to_string(),
        engine: EngineFacts {
            kind: EngineKind::Vllm,
            version: "0.32".to_owned(),
            engine_model: MODEL.to_owned(),
            served_names: vec![MODEL.to_owned()],
            lora_names: Vec::new(),
            max_model_len: 4096,
            exif: true,
            hash_scheme: HashScheme::Fovea1,
            hybrid: false,
        },
        workers: vec![WorkerFacts { dp_rank: 0, block_size: BLOCK, capacity_blocks: 0, events }],
        draining: false,
        media_trusted: true,
        encoder_fingerprint: None,
    }
}
