//! A model engine behind a link that drops, repeats and reorders: what the replica holds at rest is what the engine holds.

use std::collections::{BTreeMap, VecDeque};

use super::*;
use crate::event::{Removed, Stored};
use crate::{EngineHash, Tier};

const STEPS: usize = 300;
const SEEDS: u64 = 2000;

/// Xorshift64*; names its seed when the test fails.
struct Random {
    seed: u64,
    state: u64,
}

impl Random {
    fn new(seed: u64) -> Self {
        Self { seed, state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1 }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        (self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % bound
    }

    fn one_in(&mut self, bound: usize) -> bool {
        self.below(bound) == 0
    }
}

impl Drop for Random {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("simulation seed: {}", self.seed);
        }
    }
}

/// Copies per hash.
type Cache = BTreeMap<u8, u32>;

const CLEAR: u8 = 255;
const GARBAGE: u8 = 254;

/// Payload of the simulation: 8 bytes that no other batch has, then `hash` to store, `hash | 128` to remove, or `CLEAR`.
fn decode(payload: &[u8]) -> Result<Batch, DecodeError> {
    let hash = |byte: u8| vec![EngineHash::Int(u64::from(byte & 127))];
    let event = |&byte: &u8| match byte {
        CLEAR => KvEvent::Cleared,
        128.. => KvEvent::Removed(Removed { hashes: hash(byte), tier: Tier::Gpu, group: 0 }),
        _ => KvEvent::Stored(Stored {
            hashes: hash(byte),
            parent: None,
            tokens: Vec::new(),
            block_size: 0,
            tier: Tier::Gpu,
            lora: None,
            extra: Vec::new(),
            group: 0,
            attention: crate::event::Attention::Full,
            session: None,
        }),
    };
    if payload.contains(&GARBAGE) {
        return Err(DecodeError::Truncated { at: payload.len() });
    }
    Ok(Batch { events: payload[8..].iter().map(event).collect(), ..Batch::default() })
}

fn apply(cache: &mut Cache, events: &[KvEvent]) {
    for event in events {
        match event {
            KvEvent::Cleared => cache.clear(),
            KvEvent::Stored(Stored { hashes, .. }) | KvEvent::Removed(Removed { hashes, .. }) => {
                for hash in hashes {
                    let EngineHash::Int(hash) = *hash else { unreachable!("the model has numbers only") };
                    let copies = cache.entry(hash as u8).or_default();
                    *copies = if matches!(event, KvEvent::Stored(_)) { *copies + 1 } else { copies.saturating_sub(1) };
                }
                cache.retain(|_, copies| *copies > 0);
            }
        }
    }
}

/// The engine: its cache, its batches of this life as far back as it keeps them, and its clock.
struct Engine {
    cache: Cache,
    log: VecDeque<(u64, Vec<u8>)>,
    next: u64,
    kept: usize,
    clock: u64,
    /// A reset was called; the next batch tells.
    cleared: bool,
}

impl Engine {
    fn batch(&mut self, random: &mut Random, garbage: bool) -> (u64, Vec<u8>) {
        self.clock += 1;
        // Seven bits a byte: the clock must not look like garbage.
        let mut payload: Vec<u8> = (0..8).map(|byte| (self.clock >> (7 * byte) & 127) as u8).collect();
        if std::mem::take(&mut self.cleared) || random.one_in(60) {
            payload.push(CLEAR);
        }
        for _ in 0..random.below(4) {
            let hash = random.below(10) as u8;
            payload.push(if random.one_in(2) { hash | 128 } else { hash });
        }
        if garbage {
            // Of no consequence for the cache, so that only the loss of trust is seen.
            payload.truncate(8);
            payload.push(GARBAGE);
        } else if let Ok(batch) = decode(&payload) {
            apply(&mut self.cache, &batch.events);
        }
        let batch = (self.next, payload);
        self.next += 1;
        self.log.push_back(batch.clone());
        if self.log.len() > self.kept {
            self.log.pop_front();
        }
        batch
    }

    fn restart(&mut self) {
        self.cache.clear();
        self.log.clear();
        self.next = 0;
        self.cleared = false;
    }
}

struct World {
    engine: Engine,
    replica: Replica,
    held: Cache,
    link: VecDeque<(u64, Vec<u8>)>,
    connected: bool,
    asked: Option<(u64, u64)>,
    /// No replay endpoint.
    deaf: bool,
}

impl World {
    fn new(random: &mut Random) -> Self {
        let kept = [3, 30, 10_000][random.below(3)];
        let cache = Cache::new();
        let engine = Engine { cache, log: VecDeque::new(), next: 0, kept, clock: 0, cleared: false };
        let deaf = random.one_in(6);
        let replica = Replica::new(decode);
        Self { engine, replica, held: Cache::new(), link: VecDeque::new(), connected: false, asked: None, deaf }
    }

    fn input(&mut self, input: Input) {
        for action in self.replica.step(input) {
            match action {
                Action::AskReplay { ask, from } => self.asked = Some((ask, from)),
                Action::Apply(batch) => apply(&mut self.held, &batch.events),
                Action::Reset => self.held.clear(),
                Action::Undecodable { .. } | Action::Count(_) => {}
            }
        }
    }

    /// Answers the replay asked for last: whole, cut short without an end marker, or not at all.
    fn answer(&mut self, random: &mut Random, faults: bool) {
        let Some((ask, from)) = self.asked.take() else { return };
        let batches: Vec<_> = self.engine.log.iter().filter(|(seq, _)| *seq >= from).cloned().collect();
        let cut = if faults && random.one_in(4) { Some(random.below(batches.len() + 1)) } else { None };
        if self.deaf {
            return self.input(Input::ReplayFailed { ask });
        }
        for (seq, payload) in batches.iter().take(cut.unwrap_or(usize::MAX)).cloned() {
            self.input(Input::Replayed { ask, seq, payload });
        }
        self.input(if cut.is_some() { Input::ReplayFailed { ask } } else { Input::ReplayEnd { ask } });
    }

    fn publish(&mut self, random: &mut Random, faults: bool) {
        let garbage = faults && random.one_in(80);
        let batch = self.engine.batch(random, garbage);
        if !self.connected || faults && random.one_in(10) {
            return;
        }
        if faults && random.one_in(20) {
            self.link.push_back(batch.clone());
        }
        self.link.push_back(batch);
        let last = self.link.len() - 1;
        if faults && last > 0 && random.one_in(10) {
            self.link.swap(last, last - 1);
        }
    }

    fn disconnect(&mut self) {
        self.connected = false;
        self.link.clear();
        self.asked = None;
        self.input(Input::Disconnected);
    }

    fn step(&mut self, random: &mut Random) {
        match random.below(40) {
            0 => {
                self.disconnect();
                self.engine.restart();
            }
            1 => self.disconnect(),
            2 => {
                self.engine.cache.clear();
                self.engine.cleared = true;
                self.input(Input::CacheReset);
            }
            39 => self.input(Input::Audit),
            3..8 if !self.connected => {
                self.connected = true;
                self.input(Input::Connected);
            }
            8..14 => self.answer(random, true),
            14..28 => {
                if let Some((seq, payload)) = self.link.pop_front() {
                    self.input(Input::Live { seq, payload });
                }
            }
            _ => self.publish(random, true),
        }
    }

    /// No more faults: two last batches, and everything delivered.
    fn settle(&mut self, random: &mut Random) {
        if !self.connected {
            self.connected = true;
            self.input(Input::Connected);
        }
        for _ in 0..2 {
            self.publish(random, false);
            for round in 0.. {
                assert!(round < 10_000, "replays without end");
                if let Some((seq, payload)) = self.link.pop_front() {
                    self.input(Input::Live { seq, payload });
                } else if self.asked.is_some() {
                    self.answer(random, false);
                } else {
                    break;
                }
            }
        }
    }
}

#[test]
fn at_rest_the_replica_holds_what_the_engine_holds_or_says_that_history_is_lost() {
    let (mut whole, mut lost) = (0, 0);
    for seed in 0..SEEDS {
        let random = &mut Random::new(seed);
        let mut world = World::new(random);
        for _ in 0..random.below(STEPS) {
            world.step(random);
        }
        world.settle(random);
        assert!(world.replica.is_live());
        if world.replica.is_complete() {
            assert_eq!(world.held, world.engine.cache);
            whole += 1;
        } else {
            let truth = &world.engine.cache;
            assert!(world.held.iter().all(|(hash, copies)| truth.get(hash).is_some_and(|held| held >= copies)));
            lost += 1;
        }
    }
    assert!(whole > SEEDS / 4 && lost > SEEDS / 20, "{whole} whole, {lost} with history lost");
}
