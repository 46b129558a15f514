//! The KV blocks of one engine, by sequence hash: prefix hits, allocation, eviction, and what changed.
//!
//! Mirrors the rules of `vllm/v1/core/block_pool.py` (0.32): idle blocks are given up in order of release, a request's last block
//! first; blocks without a hash before all others; several copies of one hash may exist, and each one's eviction is announced.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use fovea_kv::SequenceHash;

/// Sequence hashes are uniformly distributed already: they are their own hash.
#[derive(Default)]
pub struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        self.0 = bytes.iter().fold(self.0, |hash, byte| hash.rotate_left(8) ^ u64::from(*byte));
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}

/// Of `u64` keys that are uniformly distributed already.
pub type HashTable<V> = HashMap<u64, V, BuildHasherDefault<AsIs>>;

/// End of a list of copies, and of the idle list (its anchor).
const NONE: u32 = 0;

#[derive(Clone, Copy, Debug, Default)]
struct Block {
    /// 0 = holds nothing worth keeping.
    hash: u64,
    users: u32,
    before: u32,
    after: u32,
    /// The next copy of the same hash.
    copy: u32,
}

#[derive(Debug)]
pub struct Pool {
    /// Place 0 is the anchor of the ring of idle blocks: `after` is the next to be given up.
    blocks: Vec<Block>,
    idle: u32,
    /// The first copy of each hash held.
    cached: HashTable<u32>,
    removed: Vec<SequenceHash>,
}

impl Pool {
    pub fn new(capacity: u32) -> Self {
        let blocks = vec![Block::default(); capacity as usize + 1];
        let mut pool = Self { blocks, idle: 0, cached: HashTable::default(), removed: Vec::new() };
        (1..=capacity).for_each(|id| pool.put_back(id));
        pool
    }

    pub fn capacity(&self) -> u32 {
        u32::try_from(self.blocks.len() - 1).unwrap_or(u32::MAX)
    }

    /// Blocks that no request holds.
    pub fn idle(&self) -> u32 {
        self.idle
    }

    pub fn holds(&self, hash: SequenceHash) -> bool {
        self.cached.contains_key(&hash.0)
    }

    /// Distinct hashes held.
    pub fn distinct(&self) -> usize {
        self.cached.len()
    }

    /// Leading hashes of `chain` that are held, `most` at the most.
    pub fn hits(&self, chain: &[SequenceHash], most: u32) -> u32 {
        let held = chain.iter().take(most as usize).take_while(|hash| self.holds(**hash)).count();
        u32::try_from(held).unwrap_or(u32::MAX)
    }

    /// The blocks of the first `hits` hashes of `chain`, and empty ones up to `count`; `None`, and nothing changed, without room.
    pub fn admit(&mut self, chain: &[SequenceHash], hits: u32, count: u32) -> Option<Vec<u32>> {
        let mut blocks: Vec<u32> = chain[..hits as usize].iter().map(|hash| self.cached[&hash.0]).collect();
        let idle_hits = blocks.iter().filter(|id| self.blocks[**id as usize].users == 0).count();
        let fresh = count.saturating_sub(hits);
        if u64::from(fresh) + idle_hits as u64 > u64::from(self.idle) {
            return None;
        }
        blocks.iter().for_each(|id| self.take(*id));
        for _ in 0..fresh {
            let id = self.blocks[NONE as usize].after;
            self.take(id);
            self.forget(id);
            blocks.push(id);
        }
        Some(blocks)
    }

    /// The block holds the KV of `hash` from here on.
    pub fn store(&mut self, id: u32, hash: SequenceHash) {
        let first = self.cached.insert(hash.0, id).unwrap_or(NONE);
        self.blocks[id as usize].hash = hash.0;
        if first == NONE {
            return;
        }
        // The oldest copy stays the first.
        self.cached.insert(hash.0, first);
        let second = std::mem::replace(&mut self.blocks[first as usize].copy, id);
        self.blocks[id as usize].copy = second;
    }

    /// Ends one request's use of its blocks, the last one first, so that a prefix outlives its continuation.
    pub fn release(&mut self, blocks: &[u32]) {
        for id in blocks.iter().rev() {
            let block = &mut self.blocks[*id as usize];
            block.users -= 1;
            if block.users == 0 {
                self.put_back(*id);
            }
        }
    }

    /// Hashes of the copies given up since the last call, in order.
    pub fn take_removed(&mut self) -> Vec<SequenceHash> {
        std::mem::take(&mut self.removed)
    }

    fn take(&mut self, id: u32) {
        let Block { users, before, after, .. } = self.blocks[id as usize];
        if users == 0 {
            self.blocks[before as usize].after = after;
            self.blocks[after as usize].before = before;
            self.idle -= 1;
        }
        self.blocks[id as usize].users += 1;
    }

    fn put_back(&mut self, id: u32) {
        let anchor = self.blocks[NONE as usize];
        let (before, after) =
            if self.blocks[id as usize].hash == 0 { (NONE, anchor.after) } else { (anchor.before, NONE) };
        self.blocks[before as usize].after = id;
        self.blocks[after as usize].before = id;
        let block = &mut self.blocks[id as usize];
        (block.before, block.after) = (before, after);
        self.idle += 1;
    }

    fn forget(&mut self, id: u32) {
        let hash = std::mem::take(&mut self.blocks[id as usize].hash);
        if hash == 0 {
            return;
        }
        self.removed.push(SequenceHash(hash));
        let next = std::mem::replace(&mut self.blocks[id as usize].copy, NONE);
        let first = self.cached[&hash];
        if first != id {
            let mut at = first;
            while self.blocks[at as usize].copy != id {
                at = self.blocks[at as usize].copy;
            }
            self.blocks[at as usize].copy = next;
        } else if next == NONE {
            self.cached.remove(&hash);
        } else {
            self.cached.insert(hash, next);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chain(hashes: &[u64]) -> Vec<SequenceHash> {
        hashes.iter().copied().map(SequenceHash).collect()
    }

    fn fill(pool: &mut Pool, hashes: &[u64]) -> Vec<u32> {
        let chain = chain(hashes);
        let hits = pool.hits(&chain, u32::MAX);
        let blocks = pool.admit(&chain, hits, hashes.len() as u32).unwrap();
        for (id, hash) in blocks.iter().zip(&chain).skip(hits as usize) {
            pool.store(*id, *hash);
        }
        blocks
    }

    #[test]
    fn the_end_of_the_oldest_prompt_goes_first() {
        let mut pool = Pool::new(4);
        let first = fill(&mut pool, &[1, 2, 3]);
        pool.release(&first);
        let second = fill(&mut pool, &[7, 8]);
        assert_eq!(pool.take_removed(), chain(&[3]));
        pool.release(&second);
        assert_eq!((pool.hits(&chain(&[1, 2, 3]), 9), pool.hits(&chain(&[1, 2, 3]), 1), pool.idle()), (2, 1, 4));
    }

    #[test]
    fn blocks_in_use_stay() {
        let mut pool = Pool::new(3);
        let blocks = fill(&mut pool, &[1, 2]);
        assert_eq!(pool.admit(&chain(&[5, 6]), 0, 2), None);
        let again = pool.admit(&chain(&[1, 2]), 2, 3).unwrap();
        pool.release(&blocks);
        assert_eq!((pool.idle(), pool.hits(&chain(&[1, 2]), 9)), (0, 2));
        pool.release(&again);
        assert_eq!(pool.idle(), 3);
    }

    #[test]
    fn a_hash_is_held_until_its_last_copy_goes() {
        let mut pool = Pool::new(2);
        for _ in 0..2 {
            let blocks = pool.admit(&[], 0, 1).unwrap();
            pool.store(blocks[0], SequenceHash(9));
            pool.release(&blocks);
        }
        let other = pool.admit(&[], 0, 1).unwrap();
        assert!(pool.holds(SequenceHash(9)));
        pool.admit(&[], 0, 1).unwrap();
        assert!(!pool.holds(SequenceHash(9)));
        assert_eq!((pool.take_removed().len(), other.len(), pool.distinct()), (2, 1, 0));
    }
}
