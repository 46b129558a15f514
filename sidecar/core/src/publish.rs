//! From engine events to the prefix-closed sets of sequence hashes that balancers index.
//!
//! Per tier t there is a level: L₀ = closure of the GPU blocks, L_t = L_{t−1} ∪ {block in tier t whose parent is in L_t}, so a GPU prefix
//! may continue from CPU memory. L₀ ⊆ L₁ ⊆ L₂. A level above the highest tier ever stored to equals the one below and is left empty:
//! a reader takes the deepest of the levels up to the one it asks for.
//!
//! **Invariants:** each level is prefix-closed; a delta may be cut after any entry and every level is still closed (removals children
//! first, then stores parents first). What cannot be known (unknown parent, opaque key, over the limit) is not published: under-credit only.

mod forest;
mod sets;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::collections::HashSet;

use fovea_kv::event::{Attention, BlockExtra, KvEvent, Removed, Stored};
use fovea_kv::sums::SetSums;
use fovea_kv::{BlockHash, BlockHasher, EngineHash, SequenceHash, Tier, root};

use forest::{Forest, Key, Parent};
pub use sets::{Delta, LevelDelta};

/// Groups remembered as not indexable. Models have a handful.
const MAX_OTHER_GROUPS: usize = 64;

#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Blocks remembered, those without KV that hold a place in a chain included; about 300 bytes each.
    /// Beyond it new blocks are not taken (under-credit).
    pub max_blocks: usize,
    /// Tokens per block; `None` = as the first full-attention event says.
    pub block_size: Option<u32>,
}

impl Default for Config {
    fn default() -> Self {
        Self { max_blocks: 1 << 20, block_size: None }
    }
}

/// What is held and published at this moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gauges {
    /// Blocks remembered: held ones and those that only hold a place in a chain.
    pub known: usize,
    /// Blocks held, by tier.
    pub held: [usize; 3],
    /// Sequence hashes published, by level.
    pub published: [usize; 3],
    /// Held blocks whose chain is not known up to its start.
    pub orphans: usize,
    /// Held blocks with a key that cannot be predicted.
    pub opaque: usize,
}

/// What was left out or stood out since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Stores of a block that its tier held already: a second copy.
    pub duplicate_stores: u64,
    /// Removals of a block that its tier is not known to hold.
    pub unknown_removals: u64,
    /// Stores by hash alone of a block that is not known.
    pub unmapped_stores: u64,
    /// Blocks not taken because `max_blocks` are remembered.
    pub over_limit: u64,
    /// Blocks of another size than the engine's own: taken by hash alone.
    pub other_block_size: u64,
    /// Blocks in groups without full attention.
    pub other_attention: u64,
    /// Blocks withdrawn or published again because an ancestor went or came.
    pub subtree_blocks: u64,
}

/// Everything one engine rank holds, and what of it is published.
#[derive(Debug)]
pub struct Publisher {
    config: Config,
    block_size: Option<u32>,
    forest: Forest,
    counters: Counters,
    hasher: BlockHasher,
    other_groups: HashSet<u32>,
    full_groups: HashSet<u32>,
}

impl Publisher {
    pub fn new(config: Config) -> Self {
        // Nodes are named by 32 bits; the highest value means "none".
        let max_blocks = config.max_blocks.min(u32::MAX as usize - 1);
        Self {
            config: Config { max_blocks, ..config },
            block_size: config.block_size,
            forest: Forest::default(),
            counters: Counters::default(),
            hasher: BlockHasher::default(),
            other_groups: HashSet::new(),
            full_groups: HashSet::new(),
        }
    }

    /// Takes one event. O(blocks in it), plus the descendants of blocks that come or go below others.
    pub fn apply(&mut self, event: &KvEvent) {
        match event {
            KvEvent::Stored(stored) => self.store(stored),
            KvEvent::Removed(removed) => self.remove(removed),
            KvEvent::Cleared => self.clear(),
        }
        #[cfg(test)]
        self.check_invariants();
    }

    /// The engine's cache is empty. The next delta withdraws all that was published.
    pub fn clear(&mut self) {
        self.forest.clear();
    }

    /// A new epoch: everything is forgotten, what has been sent too, so that the next delta is relative to nothing.
    pub fn reset(&mut self) {
        self.forest = Forest::default();
        self.block_size = self.config.block_size;
        self.other_groups.clear();
        self.full_groups.clear();
    }

    /// Net difference between what the last call left and what is published at this moment, and makes it the new base.
    pub fn take_delta(&mut self) -> Delta {
        self.forest.sets.take_delta()
    }

    /// Whether [`Self::take_delta`] may have something to say.
    pub fn is_dirty(&self) -> bool {
        self.forest.sets.is_dirty()
    }

    /// All hashes of one level as of the last [`Self::take_delta`], parents first.
    pub fn snapshot(&self, level: Tier) -> Vec<SequenceHash> {
        self.forest.sets.snapshot(level)
    }

    /// Sums of each level's [`Self::snapshot`], kept up to date.
    pub fn sums(&self) -> &[SetSums; 3] {
        self.forest.sets.sums()
    }

    /// Our name for an engine's block, while it is remembered and its chain is known; published or not.
    pub fn translate(&self, hash: EngineHash, group: u32) -> Option<SequenceHash> {
        self.forest.sequence(&Key { hash, group })
    }

    /// A block of this name is held with all its ancestors, in any tier.
    pub fn holds(&self, hash: SequenceHash) -> bool {
        self.forest.sets.holds(hash)
    }

    /// Tokens per block, once known.
    pub fn block_size(&self) -> Option<u32> {
        self.block_size
    }

    /// More than one group, or one without full attention, was seen: depth is an upper bound.
    pub fn is_hybrid(&self) -> bool {
        !self.other_groups.is_empty() || self.full_groups.len() > 1
    }

    pub fn gauges(&self) -> Gauges {
        self.forest.gauges()
    }

    pub fn counters(&self) -> Counters {
        Counters { subtree_blocks: self.forest.subtree_blocks, ..self.counters }
    }

    /// Recomputes everything that is kept up to date by steps, and panics when it differs. For tests.
    pub fn check_invariants(&self) {
        assert!(self.forest.len() <= self.config.max_blocks, "more blocks than allowed");
        self.forest.check_invariants();
        for level in Tier::ALL {
            let counted: SetSums = self.snapshot(level).into_iter().collect();
            assert_eq!(self.sums()[usize::from(level.index())].total(), counted.total(), "sums follow what is sent");
        }
    }

    fn store(&mut self, stored: &Stored) {
        let blocks = stored.hashes.len() as u64;
        if stored.attention != Attention::Full {
            if self.other_groups.len() < MAX_OTHER_GROUPS {
                self.other_groups.insert(stored.group);
            }
            self.counters.other_attention += blocks;
            return;
        }
        if self.full_groups.len() < MAX_OTHER_GROUPS {
            self.full_groups.insert(stored.group);
        }
        if !stored.tokens.is_empty() {
            if stored.block_size > 0 && *self.block_size.get_or_insert(stored.block_size) == stored.block_size {
                return self.store_chain(stored);
            }
            self.counters.other_block_size += blocks;
        }
        for &hash in &stored.hashes {
            match self.forest.find(&Key { hash, group: stored.group }) {
                Some(node) => self.hold(node, stored.tier),
                None => self.counters.unmapped_stores += 1,
            }
        }
    }

    fn store_chain(&mut self, stored: &Stored) {
        let group = stored.group;
        let salt = stored.extra.first().and_then(|extra| extra.salt.as_deref()).unwrap_or("");
        let before = match stored.parent {
            None => Parent::Root(root(stored.lora.as_deref().unwrap_or(""), salt)),
            Some(hash) => match self.place(Key { hash, group }) {
                Some(node) => Parent::Node(node),
                None => return self.counters.over_limit += stored.hashes.len() as u64,
            },
        };
        let mut parent = before;
        let blocks = stored.hashes.iter().zip(stored.tokens.chunks_exact(stored.block_size as usize));
        for (index, (&hash, tokens)) in blocks.enumerate() {
            let Some(node) = self.place(Key { hash, group }) else {
                self.counters.over_limit += (stored.hashes.len() - index) as u64;
                break;
            };
            if !self.forest.is_identified(node) {
                let block = block_hash(&mut self.hasher, tokens, stored.extra.get(index));
                self.forest.identify(node, parent, block);
            }
            self.hold(node, stored.tier);
            parent = Parent::Node(node);
        }
        if let Parent::Node(node) = before {
            // Made for a child that was not taken.
            self.forest.forget_if_idle(node);
        }
    }

    /// The node of a block; a new one when there is room.
    fn place(&mut self, key: Key) -> Option<u32> {
        let known = self.forest.find(&key);
        if known.is_none() && self.forest.len() >= self.config.max_blocks {
            return None;
        }
        Some(known.unwrap_or_else(|| self.forest.insert(key)))
    }

    fn hold(&mut self, node: u32, tier: Tier) {
        if !self.forest.hold(node, tier) {
            self.counters.duplicate_stores += 1;
        }
    }

    fn remove(&mut self, removed: &Removed) {
        if self.other_groups.contains(&removed.group) {
            return;
        }
        for &hash in &removed.hashes {
            let found = self.forest.find(&Key { hash, group: removed.group });
            if !found.is_some_and(|node| self.forest.release(node, removed.tier)) {
                self.counters.unknown_removals += 1;
            }
        }
    }
}

/// `None` = opaque.
fn block_hash(hasher: &mut BlockHasher, tokens: &[u32], extra: Option<&BlockExtra>) -> Option<BlockHash> {
    hasher.begin();
    hasher.push_tokens(tokens);
    if let Some(extra) = extra {
        if extra.opaque {
            return None;
        }
        extra.media.iter().for_each(|(id, offset)| hasher.push_span(id, *offset));
    }
    Some(hasher.finish())
}
