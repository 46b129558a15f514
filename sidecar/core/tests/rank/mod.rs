//! One engine rank as a sidecar follows it: every event goes through the publisher and the closed loop.

use std::time::{Duration, Instant};

use fovea_kv::event::KvEvent;
use fovea_kv::{EngineHash, SequenceHash};
use fovea_sidecar_core::publish::{self, Publisher};
use fovea_sidecar_core::verify::{Config, Expected, FlightId, Outcome, Verdict, Verifier};

pub struct Rank {
    pub publisher: Publisher,
    pub verifier: Verifier,
    now: Instant,
}

impl Rank {
    pub fn new() -> Self {
        Self {
            publisher: Publisher::new(publish::Config::default()),
            verifier: Verifier::new(Config::default()),
            now: Instant::now(),
        }
    }

    pub fn apply(&mut self, events: &[KvEvent]) {
        for event in events {
            let names = |publisher: &Publisher, hashes: &[EngineHash]| -> Vec<Option<SequenceHash>> {
                hashes.iter().map(|&hash| publisher.translate(hash, 0)).collect()
            };
            if let KvEvent::Removed(removed) = event {
                self.verifier.removed(&names(&self.publisher, &removed.hashes));
            }
            self.publisher.apply(event);
            match event {
                KvEvent::Stored(stored) => {
                    let parent = stored.parent.and_then(|hash| self.publisher.translate(hash, 0));
                    self.verifier.stored(stored, parent, &names(&self.publisher, &stored.hashes));
                }
                KvEvent::Cleared => self.verifier.cleared(),
                KvEvent::Removed(_) => {}
            }
        }
        self.verifier.check_invariants();
    }

    pub fn begin(&mut self, id: FlightId, expected: Expected) {
        self.verifier.begin(id, expected, self.now);
    }

    /// The answer came; the verdicts after the grace.
    pub fn end(&mut self, id: FlightId, outcome: Outcome) -> Vec<Verdict> {
        self.verifier.finished(id, outcome, self.now);
        self.now += Duration::from_secs(1);
        self.verifier.settle(|hash| self.publisher.holds(hash), self.now)
    }
}
