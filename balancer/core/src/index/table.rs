//! Sequence hash → id of the set of workers that hold the block. One writer; readers take no lock.
//!
//! Lines of 64 bytes hold five entries each. An entry lies in the first line from its home that had room; every line it passed counts it, so
//! a search ends at a line that no entry has passed. Entries never move: a shard that is full is copied into a larger one, and readers of the old one keep
//! its last state. Beside each line lies a word of *tags*: a byte per entry, and a filter of those that passed. It settles most searches for absent
//! blocks, in an eighth of the memory.
//!
//! **Invariant:** a slot is given to another hash only two epochs after its entry died, so a reader that saw it living notices (see the parent
//! module); one that saw it dead reads the key again after the id.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

const SLOTS: usize = 5;
const SHARD_BITS: u32 = 6;
pub const SHARDS: usize = 1 << SHARD_BITS;
const LINES_MIN: usize = 2;
/// Percent of a shard's slots in use at which room is made, and which may be in use after clearing it out.
const FULL: usize = 84;
const ROOMY: usize = 72;
/// In place of an id: the entry is dead, and died in the epoch whose low 31 bits follow.
const DEAD: u32 = 1 << 31;

#[repr(C, align(64))]
#[derive(Default)]
pub struct Line {
    keys: [AtomicU64; SLOTS],
    ids: [AtomicU32; SLOTS],
    passed: AtomicU32,
}

impl Line {
    #[inline]
    fn find(&self, key: u64) -> Option<usize> {
        let mut hits = 0_u32;
        for (slot, other) in self.keys.iter().enumerate() {
            hits |= u32::from(other.load(Ordering::Relaxed) == key) << slot;
        }
        (hits != 0).then(|| hits.trailing_zeros() as usize)
    }

    /// For readers: the id at `key`, 0 for a dead entry; `None` when it is not in this line.
    #[inline]
    fn get(&self, key: u64) -> Option<u32> {
        let slot = self.find(key)?;
        fence(Ordering::Acquire);
        let id = self.ids[slot].load(Ordering::Acquire);
        // The entry may have been dead for long, and its slot given away since its key was read. The new key was written before
        // the new id, so it is seen by who has seen the id.
        let is_still = self.keys[slot].load(Ordering::Relaxed) == key;
        Some(if is_still && id & DEAD == 0 { id } else { 0 })
    }
}

/// In a line's tags: a filter of the entries that passed the line. Below are its slots' tags, 0 for a free slot.
const PASSED: u64 = 0xFFFF << 48;

/// The key's bit among [`PASSED`]: set in every line that it passed, and in some that it did not.
#[inline]
fn passing(spread: u64) -> u64 {
    1 << (48 + (spread >> 8 & 15))
}

/// One byte of the key that neither its shard nor its home depends on; never 0.
#[inline]
fn tag(spread: u64) -> u64 {
    (spread & 0xFF).max(1)
}

/// A slot may hold the tag: no false negatives.
#[inline]
fn may_hold(tags: u64, tag: u64) -> bool {
    const ONES: u64 = 0x01_0101_0101;
    let zero_where_equal = tags ^ (tag * ONES);
    zero_where_equal.wrapping_sub(ONES) & !zero_where_equal & (ONES << 7) != 0
}

/// One shard's memory.
#[derive(Clone)]
struct Part {
    tags: Arc<[AtomicU64]>,
    lines: Arc<[Line]>,
}

impl Part {
    /// [`Shards::get`] in the lines after `home`, which the key may have passed.
    #[cold]
    fn get_after(&self, home: usize, key: u64) -> u32 {
        let spread = spread(key);
        for at in (home + 1..self.lines.len()).chain(0..home) {
            let tags = self.tags[at].load(Ordering::Acquire);
            if may_hold(tags, tag(spread))
                && let Some(id) = self.lines[at].get(key)
            {
                return id;
            }
            if tags & passing(spread) == 0 {
                return 0;
            }
        }
        0
    }
}

/// Keys are never 0, which marks a free slot. The product spreads keys that are not uniform.
#[inline]
fn spread(key: u64) -> u64 {
    key.wrapping_mul(0x9E37_79B9_7F4A_7C15)
}

#[inline]
fn shard_of(spread: u64) -> usize {
    (spread >> (64 - SHARD_BITS)) as usize
}

#[inline]
fn home(spread: u64, lines: &[Line]) -> usize {
    ((u128::from(spread << SHARD_BITS) * lines.len() as u128) >> 64) as usize
}

/// What readers see of the table.
#[derive(Clone)]
pub struct Shards(Vec<Part>);

impl Shards {
    /// Id of the set at `key`; 0 when nobody holds it.
    #[inline]
    pub fn get(&self, key: u64) -> u32 {
        let spread = spread(key);
        let part = &self.0[shard_of(spread)];
        let at = home(spread, &part.lines);
        let tags = part.tags[at].load(Ordering::Acquire);
        if may_hold(tags, tag(spread))
            && let Some(id) = part.lines[at].get(key)
        {
            return id;
        }
        if tags & passing(spread) == 0 { 0 } else { part.get_after(at, key) }
    }

    /// Key and id of every slot; id 0 for a free one or a dead entry.
    #[cfg(test)]
    pub fn slots(&self) -> impl Iterator<Item = (u64, u32)> {
        let lines = self.0.iter().flat_map(|part| part.lines.iter());
        lines.flat_map(|line| line.keys.iter().zip(&line.ids)).map(|(key, id)| {
            let id = id.load(Ordering::Relaxed);
            (key.load(Ordering::Relaxed), if id & DEAD == 0 { id } else { 0 })
        })
    }

    /// False: nobody holds `key`. Reads one word of tags, without a branch on it, so that independent calls overlap; true for a few of a hundred
    /// absent keys too.
    #[inline]
    pub fn maybe(&self, key: u64) -> bool {
        let spread = spread(key);
        let Part { tags, lines } = &self.0[shard_of(spread)];
        let tags = tags[home(spread, lines)].load(Ordering::Acquire);
        may_hold(tags, tag(spread)) | (tags & passing(spread) != 0)
    }

    /// Asks for what [`Self::get`] will read at the key's home; independent calls overlap in memory. The value means nothing.
    #[inline]
    pub fn touch(&self, key: u64) -> u64 {
        let spread = spread(key);
        let Part { tags, lines } = &self.0[shard_of(spread)];
        let at = home(spread, lines);
        if may_hold(tags[at].load(Ordering::Relaxed), tag(spread)) {
            lines[at].keys[0].load(Ordering::Relaxed)
        } else {
            0
        }
    }
}

/// Where an entry lies, valid until the table changes its shape.
#[derive(Clone, Copy)]
pub struct At {
    shard: usize,
    line: usize,
    slot: usize,
}

struct Shard {
    part: Part,
    live: usize,
    /// Live and dead entries.
    used: usize,
}

impl Shard {
    fn new(lines: usize) -> Self {
        let tags = (0..lines).map(|_| AtomicU64::new(0)).collect();
        let part = Part { tags, lines: (0..lines).map(|_| Line::default()).collect() };
        Self { part, live: 0, used: 0 }
    }

    fn lines(&self) -> &[Line] {
        &self.part.lines
    }

    /// One more entry passes the line: the one with this bit among [`PASSED`].
    fn pass(&self, at: usize, bit: u64) {
        let passed = &self.lines()[at].passed;
        passed.store(passed.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
        self.mark(at, bit, bit);
    }

    /// One entry less passes the line. Its bit may be another's too, so bits go only with the last.
    fn unpass_line(&self, at: usize) {
        let passed = &self.lines()[at].passed;
        let count = passed.load(Ordering::Relaxed) - 1;
        passed.store(count, Ordering::Relaxed);
        if count == 0 {
            self.mark(at, PASSED, 0);
        }
    }

    /// Replaces some bits of a line's tags.
    fn mark(&self, at: usize, bits: u64, value: u64) {
        let tags = &self.part.tags[at];
        tags.store(tags.load(Ordering::Relaxed) & !bits | value, Ordering::Release);
    }

    fn mark_slot(&self, at: usize, slot: usize, tag: u64) {
        self.mark(at, 0xFF << (8 * slot), tag << (8 * slot));
    }

    fn slots(&self) -> usize {
        self.lines().len() * SLOTS
    }

    fn over(&self, percent: usize) -> bool {
        self.used * 100 >= self.slots() * percent
    }

    fn next(&self, line: usize) -> usize {
        if line + 1 == self.lines().len() { 0 } else { line + 1 }
    }

    /// The lines that `key` passed on its way to `until` count it no more.
    fn unpass(&self, key: u64, until: usize) {
        let mut line = home(spread(key), self.lines());
        while line != until {
            self.unpass_line(line);
            line = self.next(line);
        }
    }

    /// Puts an absent key into the first line from home with a slot that is free or died long enough ago. There is one: see [`FULL`].
    fn place(&mut self, key: u64, id: u32, epoch: u64) {
        let home = home(spread(key), self.lines());
        let mut at = home;
        let slot = loop {
            let line = &self.lines()[at];
            let old = |slot: &usize| {
                let id = line.ids[*slot].load(Ordering::Relaxed);
                id & DEAD != 0 && is_old(id, epoch)
            };
            if let Some(slot) = (0..SLOTS).find(old) {
                self.unpass(line.keys[slot].load(Ordering::Relaxed), at);
                break slot;
            }
            if let Some(slot) = line.find(0) {
                self.used += 1;
                break slot;
            }
            at = self.next(at);
        };
        let line = &self.lines()[at];
        line.keys[slot].store(key, Ordering::Release);
        line.ids[slot].store(id, Ordering::Release);
        self.mark_slot(at, slot, tag(spread(key)));
        self.live += 1;
        let mut passed = home;
        while passed != at {
            self.pass(passed, passing(spread(key)));
            passed = self.next(passed);
        }
    }

    /// Frees the slots of entries that died long enough ago.
    fn clear_out(&mut self, epoch: u64) {
        let mut freed = 0;
        for (at, line) in self.lines().iter().enumerate() {
            for (slot, (key, id)) in line.keys.iter().zip(&line.ids).enumerate() {
                let dead = id.load(Ordering::Relaxed);
                if dead & DEAD != 0 && is_old(dead, epoch) {
                    self.unpass(key.load(Ordering::Relaxed), at);
                    self.mark_slot(at, slot, 0);
                    id.store(0, Ordering::Relaxed);
                    key.store(0, Ordering::Release);
                    freed += 1;
                }
            }
        }
        self.used -= freed;
    }

    /// A copy with the living entries alone. Homes keep their order, so both are walked from front to back.
    fn copied(&self, lines: usize) -> Self {
        let mut copy = Self::new(lines);
        for line in self.lines().iter() {
            for (key, id) in line.keys.iter().zip(&line.ids) {
                let id = id.load(Ordering::Relaxed);
                if id != 0 && id & DEAD == 0 {
                    copy.place(key.load(Ordering::Relaxed), id, 0);
                }
            }
        }
        copy
    }
}

fn is_old(dead: u32, epoch: u64) -> bool {
    (epoch as u32).wrapping_sub(dead) & (DEAD - 1) >= 2
}

/// The writer's side.
pub struct Table {
    shards: Vec<Shard>,
    live: usize,
    slots: usize,
}

impl Table {
    pub fn new() -> Self {
        let shards = (0..SHARDS).map(|_| Shard::new(LINES_MIN)).collect();
        Self { shards, live: 0, slots: SHARDS * LINES_MIN * SLOTS }
    }

    pub fn shards(&self) -> Shards {
        Shards(self.shards.iter().map(|shard| shard.part.clone()).collect())
    }

    /// Blocks held by somebody, or not yet swept.
    pub fn len(&self) -> usize {
        self.live
    }

    /// Brings the keys' home lines near, all at once. Of their tags only a lone key's: tags are written by what adds a key, and in a batch
    /// nothing waits for that.
    #[inline]
    pub fn touch(&self, keys: impl ExactSizeIterator<Item = u64>) {
        let lone = keys.len() == 1;
        let sum = keys.fold(0, |sum, key| {
            let spread = spread(key);
            let Part { tags, lines } = &self.shards[shard_of(spread)].part;
            let at = home(spread, lines);
            let tags = if lone { tags[at].load(Ordering::Relaxed) } else { 0 };
            sum ^ lines[at].keys[0].load(Ordering::Relaxed) ^ tags
        });
        std::hint::black_box(sum);
    }

    /// The entry of `key` and its id: 0 when it is dead.
    #[inline]
    pub fn find(&self, key: u64) -> Option<(At, u32)> {
        let spread = spread(key);
        let shard = shard_of(spread);
        let lines = self.shards[shard].lines();
        let mut line = home(spread, lines);
        for _ in 0..lines.len() {
            if let Some(slot) = lines[line].find(key) {
                let id = lines[line].ids[slot].load(Ordering::Relaxed);
                return Some((At { shard, line, slot }, if id & DEAD == 0 { id } else { 0 }));
            }
            if lines[line].passed.load(Ordering::Relaxed) == 0 {
                return None;
            }
            line = if line + 1 == lines.len() { 0 } else { line + 1 };
        }
        None
    }

    /// Gives a living entry another set.
    #[inline]
    pub fn set(&mut self, at: At, id: u32) {
        self.id(at).store(id, Ordering::Release);
    }

    /// Brings a dead entry back.
    #[inline]
    pub fn revive(&mut self, at: At, id: u32) {
        self.set(at, id);
        self.shards[at.shard].live += 1;
        self.live += 1;
    }

    #[inline]
    pub fn kill(&mut self, at: At, epoch: u64) {
        self.id(at).store(DEAD | epoch as u32, Ordering::Release);
        self.shards[at.shard].live -= 1;
        self.live -= 1;
    }

    fn id(&self, at: At) -> &AtomicU32 {
        &self.shards[at.shard].lines()[at.line].ids[at.slot]
    }

    /// Adds an absent key. True: a shard was replaced, so readers need a new [`Self::shards`].
    #[must_use]
    pub fn insert(&mut self, key: u64, id: u32, epoch: u64) -> bool {
        let at = shard_of(spread(key));
        let replaced = self.shards[at].over(FULL) && self.make_room(at, epoch);
        self.shards[at].place(key, id, epoch);
        self.live += 1;
        replaced
    }

    fn make_room(&mut self, at: usize, epoch: u64) -> bool {
        let shard = &mut self.shards[at];
        shard.clear_out(epoch);
        if !shard.over(ROOMY) {
            return false;
        }
        let lines = shard.lines().len();
        let roomy = shard.live * 100 < shard.slots() * 60;
        self.resize(at, if roomy { lines } else { lines * 7 / 5 + 1 });
        true
    }

    fn resize(&mut self, at: usize, lines: usize) {
        let shard = &mut self.shards[at];
        self.slots -= shard.slots();
        *shard = shard.copied(lines);
        self.slots += shard.slots();
    }

    /// Most slots are free.
    pub fn is_sparse(&self) -> bool {
        self.live * 4 < self.slots && self.slots > SHARDS * LINES_MIN * SLOTS
    }

    /// Copies a mostly free shard into a smaller one. True: readers need a new [`Self::shards`].
    #[must_use]
    pub fn shrink(&mut self, at: usize) -> bool {
        let shard = &self.shards[at];
        let lines = (shard.live / 3 + 1).max(LINES_MIN);
        let sparse = shard.live * 3 < shard.slots() && lines < shard.lines().len();
        if sparse {
            self.resize(at, lines);
        }
        sparse
    }

    /// Replaces ids throughout one shard by what `to` says; 0 kills the entry.
    pub fn sweep(&mut self, at: usize, epoch: u64, mut to: impl FnMut(u32) -> u32) {
        let mut killed = 0;
        for id in self.shards[at].lines().iter().flat_map(|line| &line.ids) {
            let from = id.load(Ordering::Relaxed);
            if from == 0 || from & DEAD != 0 {
                continue;
            }
            match to(from) {
                0 => {
                    id.store(DEAD | epoch as u32, Ordering::Release);
                    killed += 1;
                }
                other if other != from => id.store(other, Ordering::Release),
                _ => {}
            }
        }
        self.shards[at].live -= killed;
        self.live -= killed;
    }

    /// Key and id of every living entry of one shard.
    pub fn scan(&self, at: usize, mut look: impl FnMut(u64, u32)) {
        for line in self.shards[at].lines().iter() {
            for (key, id) in line.keys.iter().zip(&line.ids) {
                let (key, id) = (key.load(Ordering::Relaxed), id.load(Ordering::Relaxed));
                if key != 0 && id != 0 && id & DEAD == 0 {
                    look(key, id);
                }
            }
        }
    }
}

#[cfg(test)]
mod check;
