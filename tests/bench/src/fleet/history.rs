//! What a router without events can know: the blocks of the prompts it sent to one worker, up to a capacity and for a time.

use std::collections::VecDeque;

use fovea_kv::SequenceHash;

use super::Micros;
use super::pool::HashTable;

/// As Dynamo's approximate mode.
const TTL: Micros = 120_000_000;

#[derive(Debug)]
pub struct History {
    capacity: usize,
    clock: u64,
    /// (use, when) of each block.
    blocks: HashTable<(u64, Micros)>,
    /// In order of use; an entry counts while it is the last use of its block.
    order: VecDeque<(u64, SequenceHash)>,
}

impl History {
    pub fn new(capacity: usize) -> Self {
        Self { capacity, clock: 0, blocks: HashTable::default(), order: VecDeque::new() }
    }

    /// Leading blocks of `chain` that were sent lately.
    pub fn depth(&self, chain: &[SequenceHash], now: Micros) -> u32 {
        let fresh = |hash: &&SequenceHash| self.blocks.get(&hash.0).is_some_and(|(_, at)| now - at < TTL);
        chain.iter().take_while(fresh).count() as u32
    }

    /// A prompt was sent. Its end is forgotten first, as an engine gives it up first.
    pub fn sent(&mut self, chain: &[SequenceHash], now: Micros) {
        for hash in chain.iter().rev() {
            self.clock += 1;
            self.blocks.insert(hash.0, (self.clock, now));
            self.order.push_back((self.clock, *hash));
        }
        while self.blocks.len() > self.capacity {
            let Some((used, hash)) = self.order.pop_front() else { break };
            if self.blocks.get(&hash.0).is_some_and(|(last, _)| *last == used) {
                self.blocks.remove(&hash.0);
            }
        }
    }
}
