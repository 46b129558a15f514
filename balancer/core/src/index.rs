//! How many leading blocks of a chain each worker of one pool holds.
//!
//! Sequence hash → id of an interned set of workers, in a hash table. Every published set is prefix-closed, so along a chain the holders
//! only shrink, and the few places where they do are found by bisection: O(distinct sets × log blocks) probes for all workers together.
//! `docs/decisions/index-of-sets.md` has the reasons and the figures.
//!
//! One writer ([`Index`]), any number of readers ([`Reader`]) that take no lock. A reader works on memory that the writer changes under it. What makes
//! that sound is one number, the *epoch*: whatever a reader may have seen (a slot, the id of a set, a record, a bank) is given another
//! meaning only after the epoch has moved by two, and a reader whose epoch moved by two starts over. Order of the writer: new view, epoch, then reuse.
//!
//! **Promise to readers:** writes take effect block by block, in the order given. The depth reported for a worker is one that the worker had at some moment
//! during the call; so it lies between what it had before and after the writer's call in progress, and never above both. A snapshot becomes
//! live, and a worker is cleared, for a reader at once or not at all. Different workers may be seen at different moments. A reader that is overtaken
//! too often in a row answers that nobody holds anything.
//!
//! **Invariant:** the (block, worker) pairs held never exceed the limit given to [`Index::new`]. A worker that would exceed it is taken
//! out as a whole (single entries must not go: children would stay without their parents) until its next snapshot.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering, fence};

use arc_swap::ArcSwap;
use fovea_kv::{SequenceHash, Tier};

mod digest;
mod lookup;
mod sets;
mod table;

use lookup::View;
use sets::{Lane, Sets, Step};
use table::{SHARDS, Table};

/// Entries and sets that die before the epoch moves on: many queries long.
const DEATHS_PER_EPOCH: usize = 1024;
/// Hashes whose table lines are brought near together.
const BATCH: usize = 32;
/// A reader that was overtaken this often gives up.
const TRIES: usize = 64;

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

/// Keeps what the writer changes often off the cache lines of what readers read always.
#[repr(align(128))]
struct Apart<T>(T);

struct Shared {
    view: Apart<ArcSwap<View>>,
    epoch: Apart<AtomicU64>,
    entries: Apart<AtomicUsize>,
}

/// Answers lookups, from any thread, without waiting for the writer.
#[derive(Clone)]
pub struct Reader(Arc<Shared>);

impl Reader {
    /// Depth of every worker that holds at least the first block of `chain`, in order of worker. `out` is cleared first. Allocates nothing
    /// but room in `out`, and once for a chain along which the holders change more than 48 times.
    pub fn depths(&self, chain: &[SequenceHash], out: &mut Vec<WorkerDepth>) {
        for _ in 0..TRIES {
            out.clear();
            let epoch = self.0.epoch.0.load(Ordering::Acquire);
            let found = self.0.view.0.load().depths(chain, out);
            fence(Ordering::Acquire);
            if found && self.0.epoch.0.load(Ordering::Relaxed) <= epoch + 1 {
                return;
            }
        }
        out.clear();
    }

    /// Leading blocks of `chain` that one worker holds in its GPU; `guess` = what it held lately. 0 for a worker that is not there.
    pub fn depth_of(&self, worker: WorkerIndex, chain: &[SequenceHash], guess: u32) -> u32 {
        for _ in 0..TRIES {
            let epoch = self.0.epoch.0.load(Ordering::Acquire);
            let found = self.0.view.0.load().depth_of(chain, worker, guess);
            fence(Ordering::Acquire);
            if let Some(depth) = found.filter(|_| self.0.epoch.0.load(Ordering::Relaxed) <= epoch + 1) {
                return depth;
            }
        }
        0
    }

    /// (block, worker) pairs held, snapshots in progress included.
    pub fn entries(&self) -> usize {
        self.0.entries.0.load(Ordering::Relaxed)
    }
}

#[derive(Clone, Copy, Default)]
struct Slot {
    taken: bool,
    /// The bank that counts.
    bank: usize,
    /// A snapshot is in progress: changes go to the other bank.
    coming: bool,
    /// Taken out because the index was full.
    out: bool,
    /// Blocks per bank.
    held: [usize; 2],
}

/// The blocks of all workers of one pool: the writer's side.
pub struct Index {
    table: Table,
    sets: Sets,
    slots: Vec<Slot>,
    /// Of what each slot's banks hold.
    sums: Vec<[digest::Levels; 2]>,
    entries: usize,
    entries_max: usize,
    epoch: u64,
    deaths: usize,
    /// The shard to sweep or shrink next.
    next_shard: usize,
    reader: Reader,
}

impl Index {
    /// `entries_max`: (block, worker) pairs over all workers. A block costs about 20 bytes however many workers hold it.
    pub fn new(entries_max: usize) -> Self {
        let (table, sets) = (Table::new(), Sets::new());
        let view = View { table: table.shards(), sets: sets.arena(), banks: vec![0] };
        let reader = Reader(Arc::new(Shared {
            view: Apart(ArcSwap::from_pointee(view)),
            epoch: Apart(AtomicU64::new(0)),
            entries: Apart(AtomicUsize::new(0)),
        }));
        let (slots, sums) = (Vec::new(), Vec::new());
        Self { table, sets, slots, sums, entries: 0, entries_max, epoch: 0, deaths: 0, next_shard: 0, reader }
    }

    pub fn reader(&self) -> Reader {
        self.reader.clone()
    }

    /// Takes the lowest free place; it holds nothing.
    pub fn add_worker(&mut self) -> WorkerIndex {
        let free = self.slots.iter().position(|slot| !slot.taken).unwrap_or_else(|| {
            self.slots.push(Slot::default());
            self.sums.push(Default::default());
            self.slots.len() - 1
        });
        self.slots[free].taken = true;
        let words = self.sets.shape().words;
        if free / 64 >= words && self.sets.reshape((free / 64 + 1).max(words * 3 / 2), 1) {
            self.publish();
        }
        WorkerIndex(u32::try_from(free).unwrap_or(u32::MAX))
    }

    /// Forgets the worker; its place may be used again at once.
    pub fn remove_worker(&mut self, worker: WorkerIndex) {
        self.clear(worker);
        if let Some(place) = self.place(worker) {
            self.slots[place].taken = false;
        }
    }

    /// Everything held so far is void: the engine was restarted or dropped its cache.
    pub fn clear(&mut self, worker: WorkerIndex) {
        if let Some(place) = self.place(worker) {
            self.drop_coming(place);
            self.slots[place].out = false;
            self.switch(place);
        }
    }

    /// From here to [`Self::go_live`] changes are collected aside, in any order, while lookups answer from what was held before.
    pub fn begin_snapshot(&mut self, worker: WorkerIndex) {
        if let Some(place) = self.place(worker) {
            self.drop_coming(place);
            self.slots[place].out = false;
            self.slots[place].coming = true;
        }
    }

    /// The collected set replaces the one before, in one step.
    pub fn go_live(&mut self, worker: WorkerIndex) {
        if let Some(place) = self.place(worker).filter(|place| self.slots[*place].coming) {
            self.slots[place].coming = false;
            self.switch(place);
        }
    }

    /// Withdraws blocks, children before parents. Unknown hashes are ignored.
    pub fn apply_removed(&mut self, worker: WorkerIndex, level: Tier, hashes: &[SequenceHash]) {
        let target = self.target(worker, level).filter(|(_, tier)| *tier < self.sets.shape().tiers);
        let Some((lane, tier)) = target else { return };
        let mut gone = 0;
        let mut sums = self.sums[lane.worker][lane.bank][tier].take().unwrap_or_default();
        for batch in hashes.chunks(BATCH) {
            self.make_ready(batch);
            let mut stretch = Stretch::default();
            for hash in batch {
                let Some((at, from)) = self.table.find(key(*hash)) else { continue };
                if from == 0 {
                    continue;
                }
                let step = self.step(&mut stretch, from, lane, tier, false);
                gone += usize::from(step.counted);
                if step.to != from {
                    sums.remove(SequenceHash(key(*hash)));
                }
                if step.to == 0 {
                    self.table.kill(at, self.epoch);
                    self.deaths += 1;
                } else if step.to != from {
                    self.table.set(at, step.to);
                }
            }
            self.settle(stretch);
        }
        self.sums[lane.worker][lane.bank][tier] = Some(sums);
        self.slots[lane.worker].held[lane.bank] -= gone;
        self.count(self.entries - gone);
        self.tidy();
    }

    /// Adds blocks, parents before children. Blocks held already are ignored.
    ///
    /// # Errors
    /// When the limit would be exceeded; the worker then holds nothing until its next snapshot.
    pub fn apply_stored(&mut self, worker: WorkerIndex, level: Tier, hashes: &[SequenceHash]) -> Result<(), IndexFull> {
        let Some((lane, tier)) = self.target(worker, level) else { return Ok(()) };
        if tier >= self.sets.shape().tiers && self.sets.reshape(1, Tier::ALL.len()) {
            self.publish();
        }
        let room = self.entries_max - self.entries;
        let mut added = 0;
        let mut sums = self.sums[lane.worker][lane.bank][tier].take().unwrap_or_default();
        for batch in hashes.chunks(BATCH) {
            self.make_ready(batch);
            let mut stretch = Stretch::default();
            for hash in batch {
                let found = self.table.find(key(*hash));
                let from = found.map_or(0, |(_, id)| id);
                let step = self.step(&mut stretch, from, lane, tier, true);
                added += usize::from(step.counted);
                if step.to != from {
                    sums.add(SequenceHash(key(*hash)));
                }
                match found {
                    Some((at, 0)) => self.table.revive(at, step.to),
                    Some((at, from)) if from != step.to => self.table.set(at, step.to),
                    Some(_) => {}
                    None => {
                        if self.table.insert(key(*hash), step.to, self.epoch) {
                            // Before the epoch moves: a set that is named but not yet counted would be recycled.
                            self.settle(std::mem::take(&mut stretch));
                            self.publish();
                        }
                    }
                }
                if added > room {
                    break;
                }
            }
            self.settle(stretch);
            if added > room {
                break;
            }
        }
        self.sums[lane.worker][lane.bank][tier] = Some(sums);
        self.slots[lane.worker].held[lane.bank] += added;
        if added > room {
            self.entries += added;
            self.clear(worker);
            self.slots[lane.worker].out = true;
            return Err(IndexFull(worker));
        }
        self.count(self.entries + added);
        self.tidy();
        Ok(())
    }

    /// See [`Reader::depths`].
    pub fn depths(&self, chain: &[SequenceHash], out: &mut Vec<WorkerDepth>) {
        self.reader.depths(chain, out);
    }

    /// (block, worker) pairs held, snapshots in progress included.
    pub fn entries(&self) -> usize {
        self.entries
    }

    fn place(&self, worker: WorkerIndex) -> Option<usize> {
        let place = worker.0 as usize;
        self.slots.get(place).filter(|slot| slot.taken).map(|_| place)
    }

    /// Where changes of the worker go.
    fn target(&self, worker: WorkerIndex, level: Tier) -> Option<(Lane, usize)> {
        let place = self.place(worker).filter(|place| !self.slots[*place].out)?;
        let slot = &self.slots[place];
        Some((Lane { worker: place, bank: slot.bank ^ usize::from(slot.coming) }, usize::from(level.index())))
    }

    /// Readers look at the worker's other bank from here; the one they left is wiped.
    fn switch(&mut self, place: usize) {
        let slot = &mut self.slots[place];
        let left = slot.bank;
        if slot.held == [0, 0] {
            return;
        }
        slot.bank ^= 1;
        self.publish();
        self.wipe(place, left);
    }

    fn drop_coming(&mut self, place: usize) {
        if std::mem::take(&mut self.slots[place].coming) {
            self.wipe(place, self.slots[place].bank ^ 1);
        }
    }

    fn wipe(&mut self, place: usize, bank: usize) {
        self.sums[place][bank] = Default::default();
        let held = std::mem::take(&mut self.slots[place].held[bank]);
        if held > 0 {
            self.sets.wipe(Lane { worker: place, bank });
            self.count(self.entries - held);
            self.tidy();
        }
    }

    fn count(&mut self, entries: usize) {
        self.entries = entries;
        self.reader.0.entries.0.store(entries, Ordering::Relaxed);
    }

    /// What an entry with `from` gets; takes the step once for a stretch of equal sets.
    #[inline]
    fn step(&mut self, stretch: &mut Stretch, from: u32, lane: Lane, tier: usize, add: bool) -> Step {
        if stretch.entries == 0 || stretch.from != from {
            let next = Stretch { from, step: self.sets.step(from, lane, tier, add), entries: 0 };
            self.settle(std::mem::replace(stretch, next));
        }
        stretch.entries += 1;
        stretch.step
    }

    #[inline]
    fn settle(&mut self, stretch: Stretch) {
        let died = self.sets.moved(stretch.from, stretch.step.to, stretch.entries, self.epoch);
        self.deaths += usize::from(died);
    }

    /// Before each batch: nothing of it may need a new view half-way, and what died may be used again.
    #[inline]
    fn make_ready(&mut self, batch: &[SequenceHash]) {
        self.table.touch(batch.iter().map(|hash| key(*hash)));
        if self.deaths >= DEATHS_PER_EPOCH {
            self.deaths = 0;
            self.advance(1);
        }
        if self.sets.reserve(batch.len() + 1) {
            self.publish();
        }
    }

    /// Does a shard's worth of sweeping or shrinking where it is due.
    #[inline]
    fn tidy(&mut self) {
        if self.sets.is_littered(self.table.len()) {
            self.sweep();
        } else if self.table.is_sparse() {
            self.next_shard = (self.next_shard + 1) % SHARDS;
            if self.table.shrink(self.next_shard) {
                self.publish();
            }
        }
    }

    fn sweep(&mut self) {
        self.next_shard = (self.next_shard + 1) % SHARDS;
        let (sets, epoch, mut last, mut deaths) = (&mut self.sets, self.epoch, (0, 0), 0);
        self.table.sweep(self.next_shard, epoch, |from| {
            if last.0 != from {
                last = (from, sets.home_of(from));
            }
            deaths += usize::from(sets.moved(from, last.1, 1, epoch)) + usize::from(last.1 == 0);
            last.1
        });
        self.deaths += deaths;
    }

    fn publish(&mut self) {
        let mut banks = vec![0; self.sets.shape().words];
        for (place, slot) in self.slots.iter().enumerate() {
            banks[place / 64] |= (slot.bank as u64) << (place % 64);
        }
        let view = View { table: self.table.shards(), sets: self.sets.arena(), banks };
        self.reader.0.view.0.store(Arc::new(view));
        self.advance(2);
    }

    fn advance(&mut self, by: u64) {
        self.epoch += by;
        self.reader.0.epoch.0.store(self.epoch, Ordering::Release);
        fence(Ordering::Release);
        self.sets.recycle(self.epoch);
    }
}

/// Entries in a row with one set, counted but not yet settled.
#[derive(Clone, Copy, Default)]
struct Stretch {
    from: u32,
    step: Step,
    entries: u32,
}

/// Table keys are never 0; neither are the hashes of honest sidecars.
#[inline]
fn key(hash: SequenceHash) -> u64 {
    hash.0.max(1)
}

#[cfg(test)]
mod tests;
