//! How many leading blocks of a chain each worker of one pool holds.
//!
//! One exact map per worker: sequence hash → the levels that hold it. Since every published set is prefix-closed, a worker's depth
//! is found by bisection: one probe for a worker without the first block, about log₂(blocks) for the others. A worker
//! leaves, and a snapshot becomes live, by one swap of its map.
//!
//! **Invariant:** the entries of all maps together never exceed the limit given to [`Index::new`]. A worker that would exceed it is taken
//! out as a whole (single entries must not go: children would stay without their parents) until its next snapshot.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use fovea_kv::{SequenceHash, Tier};

/// A worker's place in one pool's index: dense, and used again after [`Index::remove_worker`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct WorkerIndex(pub u32);

/// Leading blocks of a chain that a worker holds, by level; `depth[0] ≤ depth[1] ≤ depth[2]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WorkerDepth {
    pub worker: WorkerIndex,
    pub depth: [u32; 3],
}

/// The index would exceed its limit, so the worker was taken out until its next snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("index is full: worker {} is routed by load alone until its next snapshot", .0.0)]
pub struct IndexFull(pub WorkerIndex);

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

/// Hash → bit per level.
type Blocks = HashMap<u64, u8, BuildHasherDefault<AsIs>>;

#[derive(Default)]
struct Slot {
    taken: bool,
    live: Blocks,
    /// What a snapshot in progress has brought; deltas go here too until it is live.
    coming: Option<Blocks>,
    /// Taken out because the index was full.
    out: bool,
}

impl Slot {
    fn entries(&self) -> usize {
        self.live.len() + self.coming.as_ref().map_or(0, Blocks::len)
    }

    fn target(&mut self) -> &mut Blocks {
        self.coming.as_mut().unwrap_or(&mut self.live)
    }
}

/// The blocks of all workers of one pool. One writer; readers see a worker's set between two whole calls.
pub struct Index {
    slots: Vec<Slot>,
    entries: usize,
    entries_max: usize,
}

impl Index {
    /// `entries_max`: (block, worker) pairs over all workers; about 20–40 bytes each.
    pub fn new(entries_max: usize) -> Self {
        Self { slots: Vec::new(), entries: 0, entries_max }
    }

    /// Takes the lowest free place; it holds nothing.
    pub fn add_worker(&mut self) -> WorkerIndex {
        let free = self.slots.iter().position(|slot| !slot.taken).unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.slots.len() - 1
        });
        self.slots[free] = Slot { taken: true, ..Slot::default() };
        WorkerIndex(u32::try_from(free).unwrap_or(u32::MAX))
    }

    /// Forgets the worker; its place may be used again at once.
    pub fn remove_worker(&mut self, worker: WorkerIndex) {
        if let Some(slot) = self.slot(worker) {
            let freed = std::mem::take(slot).entries();
            self.entries -= freed;
        }
    }

    /// Everything held so far is void: the engine was restarted or dropped its cache.
    pub fn clear(&mut self, worker: WorkerIndex) {
        if let Some(slot) = self.slot(worker) {
            let freed = std::mem::replace(slot, Slot { taken: true, ..Slot::default() }).entries();
            self.entries -= freed;
        }
    }

    /// From here to [`Self::go_live`] changes are collected aside, in any order, while lookups answer from what was held before.
    pub fn begin_snapshot(&mut self, worker: WorkerIndex) {
        if let Some(slot) = self.slot(worker) {
            slot.out = false;
            let freed = slot.coming.replace(Blocks::default()).map_or(0, |old| old.len());
            self.entries -= freed;
        }
    }

    /// The collected set replaces the one before, in one step.
    pub fn go_live(&mut self, worker: WorkerIndex) {
        if let Some(slot) = self.slot(worker)
            && let Some(coming) = slot.coming.take()
        {
            let freed = std::mem::replace(&mut slot.live, coming).len();
            self.entries -= freed;
        }
    }

    /// Withdraws blocks, children before parents. Unknown hashes are ignored.
    pub fn apply_removed(&mut self, worker: WorkerIndex, level: Tier, hashes: &[SequenceHash]) {
        let Some(slot) = self.slot(worker) else { return };
        let (blocks, bit) = (slot.target(), 1 << level.index());
        let before = blocks.len();
        for hash in hashes {
            if let Some(levels) = blocks.get_mut(&hash.0) {
                *levels &= !bit;
                if *levels == 0 {
                    blocks.remove(&hash.0);
                }
            }
        }
        let freed = before - blocks.len();
        self.entries -= freed;
    }

    /// Adds blocks, parents before children. Blocks held already are ignored.
    ///
    /// # Errors
    /// When the limit would be exceeded; the worker then holds nothing until its next snapshot.
    pub fn apply_stored(&mut self, worker: WorkerIndex, level: Tier, hashes: &[SequenceHash]) -> Result<(), IndexFull> {
        let room = self.entries_max - self.entries;
        let Some(slot) = self.slot(worker).filter(|slot| !slot.out) else { return Ok(()) };
        let (blocks, bit) = (slot.target(), 1 << level.index());
        let before = blocks.len();
        for hash in hashes {
            *blocks.entry(hash.0).or_default() |= bit;
            if blocks.len() - before > room {
                let freed = before + (slot.entries() - slot.target().len());
                *slot = Slot { taken: true, out: true, ..Slot::default() };
                self.entries -= freed;
                return Err(IndexFull(worker));
            }
        }
        let added = blocks.len() - before;
        self.entries += added;
        Ok(())
    }

    /// Depth of every worker that holds at least the first block of `chain`, in order of worker. `out` is cleared first.
    pub fn depths(&self, chain: &[SequenceHash], out: &mut Vec<WorkerDepth>) {
        out.clear();
        let Some(first) = chain.first() else { return };
        for (worker, slot) in (0..).zip(&self.slots) {
            if slot.live.contains_key(&first.0) {
                out.push(WorkerDepth { worker: WorkerIndex(worker), depth: depth(&slot.live, chain) });
            }
        }
    }

    /// (block, worker) pairs held, snapshots in progress included.
    pub fn entries(&self) -> usize {
        self.entries
    }

    fn slot(&mut self, worker: WorkerIndex) -> Option<&mut Slot> {
        self.slots.get_mut(worker.0 as usize).filter(|slot| slot.taken)
    }
}

/// Depth at each level. A block counts at a level when that level or a faster one holds it.
fn depth(blocks: &Blocks, chain: &[SequenceHash]) -> [u32; 3] {
    let mut depth = [0; 3];
    let mut from = 0;
    for (level, depth) in depth.iter_mut().enumerate() {
        let mask = (2 << level) - 1;
        from += chain[from..].partition_point(|hash| blocks.get(&hash.0).is_some_and(|levels| levels & mask != 0));
        *depth = u32::try_from(from).unwrap_or(u32::MAX);
    }
    depth
}

#[cfg(test)]
mod tests;
