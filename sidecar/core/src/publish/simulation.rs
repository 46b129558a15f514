//! Random stores, removals, clears and resets against a brute-force model that knows only the definitions.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

use super::*;

const NODES: usize = 24;
const STEPS: usize = 400;
const SEEDS: u64 = 100;

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

/// A block of the engine: two of them may have equal content after an equal parent.
struct Block {
    parent: Option<usize>,
    token: u32,
    salt: Option<Arc<str>>,
    opaque: bool,
}

struct Model {
    blocks: Vec<Block>,
    copies: Vec<[u32; 3]>,
    /// Stored with its tokens since it was last forgotten.
    identified: Vec<bool>,
    top: usize,
}

impl Model {
    fn new(random: &mut Random) -> Self {
        let blocks = (0..NODES)
            .map(|index| {
                let parent = (index > 0 && !random.one_in(6)).then(|| random.below(index));
                let salt = (parent.is_none() && random.one_in(2)).then(|| Arc::from("salt"));
                Block { parent, token: random.below(3) as u32, salt, opaque: random.one_in(15) }
            })
            .collect();
        Self { blocks, copies: vec![[0; 3]; NODES], identified: vec![false; NODES], top: 0 }
    }

    fn hash(index: usize) -> EngineHash {
        EngineHash::Int(index as u64 + 1)
    }

    fn sequence(&self, index: usize) -> SequenceHash {
        let block = &self.blocks[index];
        let previous =
            block.parent.map_or_else(|| root("", block.salt.as_deref().unwrap_or("")), |parent| self.sequence(parent));
        fovea_kv::chain(previous, block_hash(&mut BlockHasher::default(), &[block.token; 2], None).unwrap())
    }

    /// Held, or standing above a block that is.
    fn exists(&self) -> Vec<bool> {
        let mut exists: Vec<_> = self.copies.iter().map(|copies| *copies != [0; 3]).collect();
        for index in (0..NODES).rev() {
            if let (true, true, Some(parent)) = (exists[index], self.identified[index], self.blocks[index].parent) {
                exists[parent] = true;
            }
        }
        exists
    }

    fn forget(&mut self) {
        let exists = self.exists();
        self.identified.iter_mut().zip(exists).for_each(|(identified, exists)| *identified &= exists);
    }

    fn hold(&mut self, index: usize, tier: Tier) {
        self.copies[index][usize::from(tier.index())] += 1;
        self.top = self.top.max(usize::from(tier.index()));
    }

    fn levels(&self) -> [BTreeSet<SequenceHash>; 3] {
        let mut inside = [false; NODES];
        [0, 1, 2].map(|level| {
            for index in 0..NODES {
                let block = &self.blocks[index];
                let follows = block.parent.is_none_or(|parent| inside[parent]);
                let known = self.identified[index] && !block.opaque;
                inside[index] |= follows && known && self.copies[index][level] > 0;
            }
            let hashes = (0..NODES).filter(|&index| inside[index] && level <= self.top);
            hashes.map(|index| self.sequence(index)).collect()
        })
    }
}

/// A balancer that checks closure after every single entry.
#[derive(Default)]
struct Mirror {
    levels: [BTreeSet<SequenceHash>; 3],
}

impl Mirror {
    fn apply(&mut self, delta: &Delta, parents: &HashMap<SequenceHash, Option<SequenceHash>>) {
        for (held, level) in self.levels.iter_mut().zip(&delta.levels) {
            for hash in &level.removed {
                assert!(held.remove(hash), "removes only what is there");
                assert!(!held.iter().any(|child| parents[child] == Some(*hash)), "children before parents");
            }
            for hash in &level.stored {
                assert!(parents[hash].is_none_or(|parent| held.contains(&parent)), "parents before children");
                assert!(held.insert(*hash), "stores only what is not there");
            }
        }
    }
}

fn chain_event(model: &Model, last: usize, random: &mut Random) -> (Vec<usize>, Stored) {
    let mut chain = vec![last];
    let mut parent = model.blocks[last].parent;
    while let Some(above) = parent.filter(|_| !random.one_in(3)) {
        chain.push(above);
        parent = model.blocks[above].parent;
    }
    chain.reverse();
    let extra = |&index: &usize| BlockExtra {
        salt: model.blocks[index].salt.clone(),
        opaque: model.blocks[index].opaque,
        ..BlockExtra::default()
    };
    let stored = Stored {
        hashes: chain.iter().map(|&index| Model::hash(index)).collect(),
        parent: parent.map(Model::hash),
        tokens: chain.iter().flat_map(|&index| [model.blocks[index].token; 2]).collect(),
        block_size: 2,
        tier: Tier::Gpu,
        lora: None,
        extra: chain.iter().map(extra).collect(),
        group: 0,
        attention: Attention::Full,
        session: None,
    };
    (chain, stored)
}

fn tier(random: &mut Random) -> Tier {
    Tier::ALL[[0, 0, 0, 1, 1, 2][random.below(6)]]
}

/// One random event, applied to both.
fn step(model: &mut Model, publisher: &mut Publisher, random: &mut Random) {
    let index = random.below(NODES);
    let tier = tier(random);
    match random.below(20) {
        0..8 => {
            let (chain, mut stored) = chain_event(model, index, random);
            stored.tier = tier;
            publisher.apply(&KvEvent::Stored(stored));
            for index in chain {
                model.identified[index] = true;
                model.hold(index, tier);
            }
        }
        8..10 => {
            let (_, stored) = chain_event(model, index, random);
            let stored = Stored { hashes: vec![Model::hash(index)], tokens: Vec::new(), tier, ..stored };
            publisher.apply(&KvEvent::Stored(stored));
            if model.exists()[index] {
                model.hold(index, tier);
            }
        }
        19 if random.one_in(8) => {
            publisher.apply(&KvEvent::Cleared);
            model.copies.fill([0; 3]);
        }
        _ => {
            publisher.apply(&KvEvent::Removed(Removed { hashes: vec![Model::hash(index)], tier, group: 0 }));
            let copies = &mut model.copies[index][usize::from(tier.index())];
            *copies = copies.saturating_sub(1);
        }
    }
    model.forget();
}

#[test]
fn published_levels_equal_their_definition_after_any_events() {
    for seed in 0..SEEDS {
        let random = &mut Random::new(seed);
        let mut model = Model::new(random);
        let above = |index: usize| model.blocks[index].parent.map(|parent| model.sequence(parent));
        let parents: HashMap<_, _> = (0..NODES).map(|index| (model.sequence(index), above(index))).collect();
        let mut publisher = Publisher::new(Config::default());
        let mut mirror = Mirror::default();
        for _ in 0..STEPS {
            step(&mut model, &mut publisher, random);
            if random.one_in(100) {
                publisher.reset();
                mirror = Mirror::default();
                model.copies.fill([0; 3]);
                model.identified.fill(false);
                model.top = 0;
            }
            if random.one_in(3) {
                mirror.apply(&publisher.take_delta(), &parents);
                assert_eq!(mirror.levels, model.levels());
                let snapshots = Tier::ALL.map(|level| publisher.snapshot(level).into_iter().collect());
                assert_eq!(mirror.levels, snapshots, "a snapshot is the sum of the deltas");
                assert_eq!(publisher.gauges().known, model.exists().iter().filter(|exists| **exists).count());
            }
        }
    }
}

#[test]
fn a_full_publisher_takes_no_more_and_publishes_a_part_of_the_truth() {
    for seed in 0..SEEDS {
        let random = &mut Random::new(seed);
        let mut model = Model::new(random);
        let mut publisher = Publisher::new(Config { max_blocks: 6, block_size: None });
        for _ in 0..STEPS {
            step(&mut model, &mut publisher, random);
            publisher.take_delta();
            for (level, truth) in Tier::ALL.into_iter().zip(model.levels()) {
                assert!(truth.is_superset(&publisher.snapshot(level).into_iter().collect()));
            }
        }
        assert!(publisher.counters().over_limit > 0);
    }
}
