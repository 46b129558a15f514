//! Prompts of 500 blocks that share 64 leading ones, each held by eight workers.

use dynamo_kv_router::protocols::{LocalBlockHash, compute_seq_hash_for_block};

use crate::subject::{Block, Subject};

pub const BLOCKS: usize = 500;
pub const SHARED: usize = 64;
const REPLICAS: usize = 8;
/// Blocks per store event.
const EVENT: usize = 64;

pub fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Local hashes for which every index agrees on the sequence hashes.
pub fn chain(locals: impl Iterator<Item = u64>) -> Vec<Block> {
    let locals: Vec<_> = locals.map(LocalBlockHash).collect();
    let sequences = compute_seq_hash_for_block(&locals);
    locals.iter().zip(sequences).map(|(local, sequence)| Block { local: local.0, sequence }).collect()
}

pub struct Workload {
    pub workers: u32,
    pub prompts: usize,
    /// Workers of one group share the leading blocks.
    group: usize,
}

impl Workload {
    /// Up to 64 workers form one group; of more, each prompt's group is a quarter.
    pub fn new(workers: u32, blocks_per_worker: usize) -> Self {
        let group = if workers <= 64 { workers as usize } else { workers as usize / 4 };
        Self { workers, prompts: workers as usize * blocks_per_worker / (BLOCKS * REPLICAS), group }
    }

    fn system(&self, prompt: usize) -> usize {
        if self.group == self.workers as usize { 0 } else { prompt % 50 }
    }

    fn local(&self, prompt: usize, at: usize) -> u64 {
        let of = if at < SHARED { self.system(prompt) } else { 1000 + prompt };
        mix((of as u64) << 16 | at as u64)
    }

    pub fn prompt(&self, prompt: usize) -> Vec<Block> {
        chain((0..BLOCKS).map(|at| self.local(prompt, at)))
    }

    pub fn unknown(&self, known: usize, prompt: usize, query: usize) -> Vec<Block> {
        let unknown = |at: usize| mix(0xF000_0000_0000_0000 | (query as u64) << 16 | at as u64);
        chain((0..BLOCKS).map(|at| if at < known { self.local(prompt, at) } else { unknown(at) }))
    }

    /// The prompt's holders: different ones, spread evenly.
    pub fn holders(&self, prompt: usize) -> impl Iterator<Item = u32> {
        let (group, workers) = (self.group, self.workers as usize);
        let (first, start) = (self.system(prompt) * 20, prompt * REPLICAS);
        (0..REPLICAS).map(move |replica| ((first + (start + replica * 7 + prompt / 7) % group) % workers) as u32)
    }

    pub fn distinct(&self) -> usize {
        let systems = if self.group == self.workers as usize { 1 } else { 50 };
        SHARED * systems + self.prompts * (BLOCKS - SHARED)
    }

    /// Store events of prompts `from..to`, 64 blocks each.
    pub fn store_events<S: Subject>(&self, from: usize, to: usize) -> Vec<S::Event> {
        let mut events = Vec::new();
        for prompt in from..to.min(self.prompts) {
            let blocks = self.prompt(prompt);
            for worker in self.holders(prompt) {
                for start in (0..BLOCKS).step_by(EVENT) {
                    let parent = start.checked_sub(1).map(|at| &blocks[at]);
                    events.push(S::stored(worker, parent, &blocks[start..(start + EVENT).min(BLOCKS)]));
                }
            }
        }
        events
    }
}

pub struct Class {
    pub name: &'static str,
    /// Leading blocks that are held; the rest is new to everybody.
    pub known: usize,
}

pub const CLASSES: [Class; 4] = [
    Class { name: "full", known: BLOCKS },
    Class { name: "half", known: BLOCKS / 2 },
    Class { name: "shared", known: SHARED },
    Class { name: "miss", known: 0 },
];
