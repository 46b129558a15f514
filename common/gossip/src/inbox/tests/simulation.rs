//! One sidecar, one balancer, a stream that lags, breaks, loses frames and whole lives of the engine. At rest both hold the same.

use std::collections::{BTreeSet, VecDeque};

use bytes::Bytes;

use super::*;
use crate::codec::Decoder;
use crate::outbox::{Cursor, Next, Outbox, RingLimits, snapshot_frames};

const WORKERS: u16 = 3;

struct Random(u64);

impl Random {
    /// Below `n`. SplitMix64.
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % n
    }
}

type Sets = [[BTreeSet<SequenceHash>; 3]; WORKERS as usize];

/// What a balancer holds: the live sets and those being filled.
#[derive(Default)]
struct Mirror {
    live: Sets,
    filling: [Option<[BTreeSet<SequenceHash>; 3]>; WORKERS as usize],
}

impl Mirror {
    fn apply(&mut self, change: Change, cursor: &mut Cursor) {
        let set = |mirror: &mut Self, worker: u16, level: Tier, hashes: Vec<SequenceHash>, store: bool| {
            let worker = usize::from(worker);
            let sets = mirror.filling[worker].as_mut().unwrap_or(&mut mirror.live[worker]);
            for hash in hashes {
                let fits = match store {
                    true => sets[usize::from(level.index())].insert(hash),
                    false => sets[usize::from(level.index())].remove(&hash),
                };
                assert!(fits, "a change that changes nothing: state was not what the sidecar thought");
            }
        };
        match change {
            Change::Begin { worker } => self.filling[usize::from(worker)] = Some(Default::default()),
            Change::Removed { worker, level, hashes } => set(self, worker, level, hashes, false),
            Change::Stored { worker, level, hashes } => set(self, worker, level, hashes, true),
            Change::Live { worker, .. } => {
                let worker = usize::from(worker);
                self.live[worker] = self.filling[worker].take().expect("begun");
            }
            Change::Resync { worker } => {
                self.filling[usize::from(worker)] = None;
                cursor.resync(worker);
            }
            Change::Mend { .. } | Change::Repaired { .. } => unreachable!("nothing asked for a repair"),
            Change::Hello(_)
            | Change::Load(_)
            | Change::Learnt(_)
            | Change::Digest { .. }
            | Change::Buckets(_)
            | Change::Embeddings(_) => {}
        }
    }
}

struct World {
    random: Random,
    truth: Sets,
    outbox: Outbox,
    epoch: u64,
    cursor: Cursor,
    wire: VecDeque<Bytes>,
    decoder: Decoder<FromSidecar>,
    inbox: Inbox,
    mirror: Mirror,
}

impl World {
    fn new(seed: u64) -> Self {
        let epochs: Vec<u64> = (1..=u64::from(WORKERS)).collect();
        let mut world = Self {
            random: Random(seed),
            truth: Sets::default(),
            outbox: Outbox::new(&epochs, RingLimits { bytes: 2000, frames: 12 }),
            epoch: 100,
            cursor: Cursor::default(),
            wire: VecDeque::new(),
            decoder: Decoder::new(),
            inbox: Inbox::new(),
            mirror: Mirror::default(),
        };
        world.connect();
        world
    }

    /// A new connection: all that was under way is lost.
    fn connect(&mut self) {
        self.wire = VecDeque::from([crate::codec::encode_sidecar(&FromSidecar::Hello(hello(WORKERS.into()))).unwrap()]);
        (self.cursor, self.decoder, self.inbox) = Default::default();
        self.mirror = Mirror::default();
    }

    fn worker(&mut self) -> u16 {
        u16::try_from(self.random.below(WORKERS.into())).unwrap()
    }

    fn change(&mut self, worker: u16) {
        let mut levels = <[LevelDelta; 3]>::default();
        for (level, set) in levels.iter_mut().zip(&mut self.truth[usize::from(worker)]) {
            for _ in 0..self.random.below(5) {
                let hash = SequenceHash(self.random.below(40) + 1);
                let touched = level.removed.contains(&hash) || level.stored.contains(&hash);
                match (touched, set.contains(&hash)) {
                    (true, _) => {}
                    (false, true) => {
                        set.remove(&hash);
                        level.removed.push(hash);
                    }
                    (false, false) => {
                        set.insert(hash);
                        level.stored.push(hash);
                    }
                }
            }
        }
        self.outbox.push(worker, levels);
    }

    fn reset(&mut self) {
        let worker = self.worker();
        self.epoch += 1;
        self.truth[usize::from(worker)] = Default::default();
        self.outbox.reset(worker, self.epoch);
    }

    fn send(&mut self) -> bool {
        match self.outbox.poll(&mut self.cursor) {
            Next::Frame(bytes) => self.wire.push_back(bytes),
            Next::NeedSnapshot { worker, epoch, seq } => {
                let levels = self.truth[usize::from(worker)].clone().map(|set| set.into_iter().collect());
                self.wire.extend(snapshot_frames(worker, epoch, seq, levels));
                self.cursor.snapshot_taken(worker, epoch, seq);
            }
            Next::Idle => return false,
        }
        true
    }

    fn receive(&mut self) -> bool {
        let Some(bytes) = self.wire.pop_front() else { return false };
        self.decoder.push(&bytes);
        while let Some(message) = self.decoder.next().unwrap() {
            for change in self.inbox.apply(message).unwrap() {
                self.mirror.apply(change, &mut self.cursor);
            }
        }
        true
    }

    fn step(&mut self) {
        match self.random.below(100) {
            0..35 => {
                let worker = self.worker();
                self.change(worker);
            }
            35..65 => _ = self.send(),
            65..94 => _ = self.receive(),
            94..96 => self.reset(),
            96..98 => self.lose_a_delta(),
            98 => self.connect(),
            _ => {}
        }
    }

    /// TCP never does this; a bug might.
    fn lose_a_delta(&mut self) {
        const DELTA: u8 = 3;
        if self.wire.front().is_some_and(|frame| frame[6] == DELTA) {
            self.wire.pop_front();
        }
    }

    /// Ends with a delta of each worker: a loss shows at the next one.
    fn settle(&mut self) {
        for worker in 0..WORKERS {
            let before = self.outbox.watermark(worker);
            while self.outbox.watermark(worker) == before {
                self.change(worker);
            }
        }
        let mut steps = 0;
        while self.send() || self.receive() {
            steps += 1;
            assert!(steps < 10_000, "never comes to rest");
        }
    }
}

#[test]
fn at_rest_the_balancer_holds_what_the_sidecar_publishes() {
    for seed in 0..300 {
        let mut world = World::new(seed);
        for round in 0..4 {
            (0..150).for_each(|_| world.step());
            world.settle();
            assert!(world.mirror.live == world.truth, "seed {seed}, round {round}");
            for worker in 0..WORKERS {
                assert_eq!(world.inbox.watermark(worker), world.outbox.watermark(worker), "seed {seed}");
            }
        }
    }
}
