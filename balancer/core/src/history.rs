//! What one worker may hold, by what this balancer sent there: for workers whose events cannot be read or believed.
//!
//! The blocks of answered prompts, up to the worker's capacity and for a time. A prompt's end is forgotten before its beginning, as
//! engines give blocks up: a chain shortens from its end, so what is remembered is prefix-closed and a depth is found by bisection.
//! **Invariant:** at most [`Recall::blocks_max`] blocks, about 50 bytes each.

use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher};
use std::time::{Duration, Instant};

use fovea_kv::SequenceHash;
use xxhash_rust::xxh3::xxh3_64_with_seed;

/// How much is remembered of each worker, and for how long.
#[derive(Clone, Copy, Debug)]
pub struct Recall {
    /// A block sent this long ago is not believed to be there any more.
    pub ttl: Duration,
    /// Blocks per worker, whatever its capacity.
    pub blocks_max: usize,
    /// Of the table, so that clients cannot aim at one place in it.
    pub seed: u64,
}

impl Default for Recall {
    /// The time is that of Dynamo 1.6.1's approximate mode.
    fn default() -> Self {
        Self { ttl: Duration::from_secs(120), blocks_max: 16_384, seed: 0 }
    }
}

/// End of the list of blocks.
const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct Node {
    hash: u64,
    tokens: u32,
    newer: u32,
    older: u32,
    /// Seconds since the first prompt.
    used_s: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Seeded(u64);

struct Mix {
    seed: u64,
    value: u64,
}

impl BuildHasher for Seeded {
    type Hasher = Mix;

    fn build_hasher(&self) -> Mix {
        Mix { seed: self.0, value: 0 }
    }
}

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.value
    }

    fn write(&mut self, bytes: &[u8]) {
        self.value = xxh3_64_with_seed(bytes, self.seed ^ self.value);
    }
}

/// Blocks that one worker was sent lately.
#[derive(Debug)]
pub struct History {
    places: HashMap<u64, u32, Seeded>,
    nodes: Vec<Node>,
    free: Vec<u32>,
    newest: u32,
    oldest: u32,
    held_tokens: u64,
    /// Of the first prompt.
    began: Option<Instant>,
}

impl Default for History {
    fn default() -> Self {
        Self {
            places: HashMap::default(),
            nodes: Vec::new(),
            free: Vec::new(),
            newest: NONE,
            oldest: NONE,
            held_tokens: 0,
            began: None,
        }
    }
}

impl History {
    /// A prompt was answered: its blocks of `block_tokens` were there a moment ago. `capacity_tokens`: of the worker; 0 = not known.
    /// O(blocks of the prompt), amortised.
    pub fn sent(
        &mut self,
        chain: &[SequenceHash],
        block_tokens: u32,
        capacity_tokens: u64,
        recall: &Recall,
        now: Instant,
    ) {
        if self.places.is_empty() {
            // Nothing is lost by it, and the table gets this balancer's seed.
            *self = Self { places: HashMap::with_hasher(Seeded(recall.seed)), ..Self::default() };
        }
        let began = *self.began.get_or_insert(now);
        let now_s = seconds(now, began);
        let capacity = if capacity_tokens == 0 { u64::MAX } else { capacity_tokens };
        let fits = usize::try_from(capacity / u64::from(block_tokens.max(1))).unwrap_or(usize::MAX);
        let kept = chain.len().min(fits).min(recall.blocks_max);
        for hash in chain[..kept].iter().rev() {
            self.touch(hash.0, block_tokens, now_s);
        }
        let ttl_s = u32::try_from(recall.ttl.as_secs()).unwrap_or(u32::MAX);
        while let Some(node) = self.nodes.get(self.oldest as usize).copied() {
            let is_old = now_s.saturating_sub(node.used_s) >= ttl_s;
            if !is_old && self.places.len() <= recall.blocks_max && self.held_tokens <= capacity {
                break;
            }
            self.forget(self.oldest, node);
        }
    }

    /// Leading blocks of `chain` that are remembered. O(log blocks).
    pub fn depth(&self, chain: &[SequenceHash], recall: &Recall, now: Instant) -> u32 {
        let Some(began) = self.began else { return 0 };
        let (now_s, ttl_s) = (seconds(now, began), recall.ttl.as_secs());
        let is_held = |hash: &SequenceHash| {
            let node = self.places.get(&hash.0).map(|place| self.nodes[*place as usize]);
            node.is_some_and(|node| u64::from(now_s.saturating_sub(node.used_s)) < ttl_s)
        };
        u32::try_from(chain.partition_point(is_held)).unwrap_or(u32::MAX)
    }

    /// Blocks remembered.
    pub fn blocks(&self) -> usize {
        self.places.len()
    }

    fn touch(&mut self, hash: u64, tokens: u32, used_s: u32) {
        if let Some(place) = self.places.get(&hash).copied() {
            let node = self.nodes[place as usize];
            self.unlink(node);
            self.held_tokens -= u64::from(node.tokens);
            self.nodes[place as usize] = Node { tokens, used_s, ..node };
            self.link(place);
        } else {
            let node = Node { hash, tokens, newer: NONE, older: NONE, used_s };
            let place = self.free.pop().unwrap_or_else(|| {
                self.nodes.push(node);
                u32::try_from(self.nodes.len() - 1).unwrap_or(NONE)
            });
            self.nodes[place as usize] = node;
            self.places.insert(hash, place);
            self.link(place);
        }
        self.held_tokens += u64::from(tokens);
    }

    fn forget(&mut self, place: u32, node: Node) {
        self.unlink(node);
        self.places.remove(&node.hash);
        self.held_tokens -= u64::from(node.tokens);
        self.free.push(place);
    }

    /// Puts a node in as the newest.
    fn link(&mut self, place: u32) {
        let older = std::mem::replace(&mut self.newest, place);
        let node = &mut self.nodes[place as usize];
        (node.newer, node.older) = (NONE, older);
        match self.nodes.get_mut(older as usize) {
            Some(node) => node.newer = place,
            None => self.oldest = place,
        }
    }

    fn unlink(&mut self, node: Node) {
        match self.nodes.get_mut(node.newer as usize) {
            Some(newer) => newer.older = node.older,
            None => self.newest = node.older,
        }
        match self.nodes.get_mut(node.older as usize) {
            Some(older) => older.newer = node.newer,
            None => self.oldest = node.newer,
        }
    }
}

fn seconds(now: Instant, began: Instant) -> u32 {
    u32::try_from(now.saturating_duration_since(began).as_secs()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests;
