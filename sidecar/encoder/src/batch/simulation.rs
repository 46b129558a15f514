//! Random requests, cancels, failures and shutdowns against a plain record of what was promised. A failure prints its seed.

use std::collections::HashMap;
use std::num::NonZeroU32;

use super::*;

const SEEDS: u64 = 400;
const STEPS: usize = 300;

/// SplitMix64 (Steele et al. 2014).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}

/// An image: what its result must say.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Image {
    serial: u64,
    bad: bool,
    poison: bool,
}

struct World {
    random: Random,
    batcher: Batcher<Image, u64>,
    limits: (u64, usize),
    waiting: HashMap<RequestId, Vec<Image>>,
    in_flight: Vec<Batch<Image>>,
    serial: u64,
    answered: usize,
    forwards: usize,
    images: usize,
    closed: bool,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random(seed);
        let cost = random.below(12) as u32;
        let items = random.below(6) as u32;
        let queued = u64::from(cost).max(1) + random.below(60);
        let limits = Limits::new(NonZeroU32::new(cost), NonZeroU32::new(items), queued, vec![4, 8]).expect("limits");
        let limits_max =
            (if cost == 0 { u64::MAX } else { cost.into() }, if items == 0 { usize::MAX } else { items as usize });
        Self {
            random,
            batcher: Batcher::new(limits),
            limits: limits_max,
            waiting: HashMap::new(),
            in_flight: Vec::new(),
            serial: 0,
            answered: 0,
            forwards: 0,
            images: 0,
            closed: false,
        }
    }

    fn submit(&mut self) {
        let count = 1 + self.random.below(5);
        let keys = 1 + self.random.below(3);
        let mut work = Vec::new();
        for _ in 0..count {
            self.serial += 1;
            let item =
                Image { serial: self.serial, bad: self.random.below(20) == 0, poison: self.random.below(30) == 0 };
            let cost = self.random.below(8) as u32 + u32::from(self.random.below(50) != 0);
            work.push(Work { item, cost, key: self.random.below(keys) });
        }
        let images: Vec<Image> = work.iter().map(|work| work.item.clone()).collect();
        match self.batcher.submit(work) {
            Ok(id) => {
                assert!(!self.closed, "accepted after close");
                self.images += images.len();
                assert!(self.waiting.insert(id, images).is_none(), "id given twice");
            }
            Err(error) => assert!(!self.closed || error == EncodeError::Closed),
        }
    }

    fn answer(&mut self, done: Vec<Done<u64>>) {
        for Done { request, result } in done {
            let images = self.waiting.remove(&request).expect("answered once, and only when it waits");
            self.answered += 1;
            if let Ok(results) = result {
                let wanted: Vec<u64> = images.iter().map(|image| image.serial).collect();
                assert_eq!(results, wanted, "results in order");
                assert!(!images.iter().any(|image| image.bad || image.poison), "a bad image has no result");
            }
        }
    }

    fn take(&mut self) {
        let Some(batch) = self.batcher.next_batch() else { return };
        assert!(batch.cost() <= self.limits.0 && batch.items().len() <= self.limits.1, "within bounds");
        assert!(!batch.items().is_empty());
        self.in_flight.push(batch);
    }

    fn finish(&mut self) {
        if self.in_flight.is_empty() {
            return;
        }
        let at = self.random.below(self.in_flight.len() as u64) as usize;
        let batch = self.in_flight.swap_remove(at);
        self.forwards += 1;
        let memory = self.random.below(4) == 0 && batch.cost() > 3;
        let outcome = match self.random.below(40) {
            0 => Err(BatchError::Unavailable("gone".into())),
            1 => Ok(vec![]),
            _ if memory => Err(BatchError::OutOfMemory),
            _ if batch.items().iter().any(|image| image.poison) => Err(BatchError::Internal("poison".into())),
            _ => Ok(batch.items().iter().map(judge).collect()),
        };
        let done = self.batcher.finish(batch, outcome);
        self.answer(done);
    }

    fn cancel(&mut self) {
        let Some(&id) = self.waiting.keys().min() else { return };
        assert!(self.batcher.cancel(id), "a waiting request can be cancelled");
        self.waiting.remove(&id);
        self.answered += 1;
    }

    fn step(&mut self) {
        match self.random.below(20) {
            0..7 => self.submit(),
            7..12 => self.take(),
            12..18 => self.finish(),
            _ => self.cancel(),
        }
        self.batcher.check_invariants();
    }

    fn run(mut self) -> usize {
        for _ in 0..STEPS {
            self.step();
        }
        if self.random.below(2) == 0 {
            let done = self.batcher.close();
            self.closed = true;
            self.answer(done);
            self.submit();
        } else if self.random.below(4) == 0 {
            let done = self.batcher.abort(&EncodeError::Unavailable);
            self.closed = true;
            self.answer(done);
        }
        while !self.waiting.is_empty() || !self.in_flight.is_empty() {
            self.take();
            self.finish();
            self.batcher.check_invariants();
        }
        assert!(self.batcher.is_idle() && self.batcher.queued_cost() == 0);
        assert!(self.forwards <= 2 * self.images, "another try is bounded");
        self.answered
    }
}

fn judge(image: &Image) -> Result<u64, ItemError> {
    if image.bad { Err(ItemError::Invalid("bad".into())) } else { Ok(image.serial) }
}

#[test]
fn every_request_is_answered_once_and_in_order() {
    let mut answered = 0;
    for seed in 0..SEEDS {
        let run = std::panic::catch_unwind(|| World::new(seed).run());
        answered += run.unwrap_or_else(|_| panic!("seed {seed}"));
    }
    assert!(answered > SEEDS as usize * 20, "the simulation does something: {answered}");
}
