//! A sidecar without its sockets: the real replica, publisher and outbox, and the follower's few rules between them.

use std::collections::{BTreeSet, HashMap, VecDeque};

use fovea_gossip::message::LevelDelta;
use fovea_gossip::outbox::{Outbox, RingLimits};
use fovea_kv::replica::{Action, Input, Replica};
use fovea_kv::sums::Sums;
use fovea_kv::{SequenceHash, Tier, vllm};
use fovea_sidecar_core::publish::{Config, Publisher};

use crate::engine::{Engine, Frame};
use crate::random::Random;
use crate::{Break, Tick};

/// Silence after which the engine is asked whether a batch was lost.
const AUDIT_AFTER: Tick = 200;
/// A replay takes so long.
const REPLAY_AFTER: Tick = 2;

pub struct Sidecar {
    pub up: bool,
    /// Since when.
    pub since: Tick,
    pub life: u64,
    /// Wall clock minus virtual time, in µs.
    pub skew: u64,
    pub replica: Replica,
    pub publisher: Publisher,
    pub outbox: Outbox,
    /// Frames of the subscription under way: due at.
    pub link: VecDeque<(Tick, Frame)>,
    pub subscribed: bool,
    /// No new subscription before.
    pub subscribe_at: Tick,
    replay: Option<(u64, u64, Tick)>,
    audit_at: Tick,
    auditing: bool,
    live_seq: Option<u64>,
    audited: Option<u64>,
    /// What was published at each (life, epoch, seq).
    pub history: HashMap<(u64, u64, u64), [Sums; 3]>,
    pub ring: RingLimits,
}

impl Sidecar {
    pub fn new(ring: RingLimits, skew: u64, now: Tick) -> Self {
        let mut this = Self {
            up: true,
            since: now,
            life: 0,
            skew,
            replica: Replica::new(vllm::decode),
            publisher: Publisher::new(Config::default()),
            outbox: Outbox::new(&[1], ring),
            link: VecDeque::new(),
            subscribed: false,
            subscribe_at: now,
            replay: None,
            audit_at: now,
            auditing: false,
            live_seq: None,
            audited: None,
            history: HashMap::new(),
            ring,
        };
        this.begin(now);
        this
    }

    /// A new process.
    pub fn restart(&mut self, now: Tick) {
        self.life += 1;
        (self.up, self.since) = (true, now);
        self.begin(now);
    }

    fn begin(&mut self, now: Tick) {
        self.replica = Replica::new(vllm::decode);
        self.publisher = Publisher::new(Config::default());
        self.outbox = Outbox::new(&[self.new_epoch(0, now)], self.ring);
        self.link.clear();
        (self.subscribed, self.subscribe_at, self.replay) = (false, now, None);
        self.auditing = false;
        self.note();
    }

    fn new_epoch(&self, before: u64, now: Tick) -> u64 {
        (now * 10_000 + self.skew).max(before + 1)
    }

    fn note(&mut self) {
        let (epoch, seq) = self.outbox.watermark(0).unwrap_or_default();
        self.history.insert((self.life, epoch, seq), self.publisher.sums().each_ref().map(|sums| sums.total()));
    }

    pub fn published(&self) -> [BTreeSet<SequenceHash>; 3] {
        Tier::ALL.map(|level| self.publisher.snapshot(level).into_iter().collect())
    }

    /// The subscription ended; the follower learns of it.
    pub fn disconnect(&mut self, now: Tick, again_at: Tick) {
        if std::mem::take(&mut self.subscribed) {
            self.input(Input::Disconnected, now);
        }
        (self.replay, self.auditing) = (None, false);
        self.link.clear();
        self.subscribe_at = again_at;
    }

    /// One tick of the follower.
    pub fn step(&mut self, engine: &Engine, faults: bool, random: &mut Random, broken: Option<Break>, now: Tick) {
        if !self.subscribed {
            if now < self.subscribe_at || !engine.up {
                return;
            }
            (self.subscribed, self.live_seq, self.audit_at) = (true, None, now + AUDIT_AFTER);
            self.input(Input::Connected, now);
        }
        while self.link.front().is_some_and(|(due, _)| *due <= now) {
            let Some((_, (seq, payload))) = self.link.pop_front() else { break };
            self.audit_at = now + AUDIT_AFTER;
            self.live_seq = Some(seq);
            self.input(Input::Live { seq, payload }, now);
        }
        self.replayed(engine, faults, random, now);
        if now >= self.audit_at {
            self.audit_at = now + AUDIT_AFTER;
            if self.replay.is_none() && self.replica.is_live() {
                (self.auditing, self.audited) = (true, self.replica.applied_seq());
                self.input(Input::Audit, now);
            }
        }
        if self.auditing && self.replay.is_none() {
            self.auditing = false;
            if self.replica.applied_seq() > self.live_seq.max(self.audited) {
                // The subscription did not tell: it may belong to an old life.
                self.disconnect(now, now);
            }
        }
        self.flush(broken);
    }

    /// The proxy saw a call that empties the cache.
    pub fn cache_reset(&mut self, broken: Option<Break>, now: Tick) {
        self.input(Input::CacheReset, now);
        self.flush(broken);
    }

    fn replayed(&mut self, engine: &Engine, faults: bool, random: &mut Random, now: Tick) {
        let Some((ask, from, _)) = self.replay.filter(|(_, _, due)| *due <= now && engine.up) else { return };
        let batches: Vec<_> = engine.log.iter().filter(|(seq, _)| *seq >= from).cloned().collect();
        // Cut short without an end marker, as to a slow reader.
        let cut = (faults && random.one_in(5)).then(|| random.below(batches.len() + 1));
        for (seq, payload) in batches.iter().take(cut.unwrap_or(usize::MAX)).cloned() {
            self.input(Input::Replayed { ask, seq, payload }, now);
        }
        if self.replay.is_some_and(|(of, ..)| of == ask) {
            self.replay = None;
        }
        self.input(if cut.is_some() { Input::ReplayFailed { ask } } else { Input::ReplayEnd { ask } }, now);
    }

    fn input(&mut self, input: Input, now: Tick) {
        for action in self.replica.step(input) {
            match action {
                Action::AskReplay { ask, from } => self.replay = Some((ask, from, now + REPLAY_AFTER)),
                Action::Apply(batch) => batch.events.iter().for_each(|event| self.publisher.apply(event)),
                Action::Reset => {
                    self.publisher.reset();
                    let (before, _) = self.outbox.watermark(0).unwrap_or_default();
                    self.outbox.reset(0, self.new_epoch(before, now));
                    self.note();
                    if std::mem::take(&mut self.auditing) {
                        self.subscribe_at = now;
                    }
                }
                Action::Undecodable { .. } | Action::Count(_) => {}
            }
        }
    }

    fn flush(&mut self, broken: Option<Break>) {
        let mut delta = self.publisher.take_delta();
        if delta.is_empty() {
            return;
        }
        self.note_after(&mut delta.levels, broken);
    }

    fn note_after(&mut self, levels: &mut [fovea_sidecar_core::publish::LevelDelta; 3], broken: Option<Break>) {
        if broken == Some(Break::LoseRemoval) {
            levels[0].removed.pop();
        }
        let take = std::mem::take::<fovea_sidecar_core::publish::LevelDelta>;
        let levels = levels.each_mut().map(|level| {
            let level = take(level);
            LevelDelta { removed: level.removed, stored: level.stored }
        });
        self.outbox.push(0, levels);
        self.note();
    }
}
