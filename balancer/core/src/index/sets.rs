//! Sets of workers, each stored once and named by a small id: equal holders, equal integers.
//!
//! A set has a bit per worker, tier and *bank*. Each worker has two banks: one that counts, one in which a snapshot grows; a snapshot goes
//! live when the reader looks at the other bank. A record is not changed while it has an id that readers may hold, with one exception:
//! a bank that no reader looks at any more is wiped from all records in place. That may leave two ids for one set. Ids that differ are
//! never taken as proof that sets differ, so such *strays* cost time and memory alone until they are swept together.

use std::collections::{HashMap, VecDeque};
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// Records per chunk of the arena; chunks never move.
const CHUNK: usize = 1024;
const MEMO: usize = 1 << 13;
const TIERS: usize = 3;

/// Sums are mixed already: they are their own hash.
#[derive(Default)]
struct AsIs(u64);

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

/// Where the bits of one worker's bank lie in a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Words of 64 workers.
    pub words: usize,
    /// 1 as long as nothing but GPU blocks was ever stored, else 3.
    pub tiers: usize,
}

impl Shape {
    /// Words of a record: the bits, and the hint.
    pub fn stride(self) -> usize {
        self.words * self.tiers * 2 + 1
    }

    #[inline]
    pub fn word(self, workers: usize, bank: usize, tier: usize) -> usize {
        (workers * 2 + bank) * self.tiers + tier
    }
}

/// One worker's bank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Lane {
    pub worker: usize,
    pub bank: usize,
}

/// What readers see of the records.
#[derive(Clone)]
pub struct Arena {
    chunks: Vec<Arc<[AtomicU64]>>,
    pub shape: Shape,
}

impl Arena {
    /// The record's words; `None` for an id that is younger than this view.
    #[inline]
    pub fn words(&self, id: u32) -> Option<&[AtomicU64]> {
        let (stride, id) = (self.shape.stride(), id as usize);
        let chunk = self.chunks.get(id / CHUNK)?;
        chunk.get(id % CHUNK * stride..(id % CHUNK + 1) * stride - 1)
    }

    /// Where a run of this set ended lately: a guess, true or not. Shared by all readers.
    #[inline]
    pub fn hint(&self, id: u32) -> u32 {
        self.hint_word(id).map_or(0, |word| word.load(Ordering::Relaxed) as u32)
    }

    #[inline]
    pub fn set_hint(&self, id: u32, end: u32) {
        self.hint_word(id).into_iter().for_each(|word| word.store(u64::from(end), Ordering::Relaxed));
    }

    fn hint_word(&self, id: u32) -> Option<&AtomicU64> {
        let (stride, id) = (self.shape.stride(), id as usize);
        self.chunks.get(id / CHUNK)?.get((id % CHUNK + 1) * stride - 1)
    }

    fn grow(&mut self) {
        self.chunks.push((0..CHUNK * self.shape.stride()).map(|_| AtomicU64::new(0)).collect());
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Kind {
    Free,
    /// The one that is found by its content.
    Canonical,
    Stray,
}

struct Meta {
    /// Sum of a mixed number for each bit: equal for equal sets.
    sum: u64,
    /// Entries with this id.
    count: u32,
    /// Raised whenever the content changes, so that memos of before are not believed.
    version: u32,
    /// Epoch in which `count` fell to 0 last.
    died: u64,
    kind: Kind,
}

#[derive(Clone, Copy, Default)]
struct Memo {
    from: u32,
    from_version: u32,
    /// Bit and direction, never 0.
    change: u32,
    step: Step,
    to_version: u32,
}

/// The set after one bit was added or taken away.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step {
    pub to: u32,
    /// The lane came, or went, with this bit.
    pub counted: bool,
}

/// The writer's side. Id 0 is the empty set; it has no record and is not counted.
pub struct Sets {
    arena: Arena,
    meta: Vec<Meta>,
    free: Vec<u32>,
    /// Ids whose count fell to 0, with the epoch, oldest first.
    ageing: VecDeque<(u64, u32)>,
    by_sum: HashMap<u64, u32, BuildHasherDefault<AsIs>>,
    memo: Vec<Memo>,
    scratch: Vec<u64>,
    strays: usize,
    /// Entries with the id of a stray.
    astray: usize,
}

fn mix(bit: u64) -> u64 {
    let mut z = (bit + 1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

fn sum_of(lane: Lane, tier: usize) -> u64 {
    mix(((lane.worker * 2 + lane.bank) * TIERS + tier) as u64)
}

impl Sets {
    pub fn new() -> Self {
        let mut sets = Self {
            arena: Arena { chunks: Vec::new(), shape: Shape { words: 1, tiers: 1 } },
            meta: Vec::new(),
            free: Vec::new(),
            ageing: VecDeque::new(),
            by_sum: HashMap::default(),
            memo: vec![Memo::default(); MEMO],
            scratch: Vec::new(),
            strays: 0,
            astray: 0,
        };
        sets.arena.grow();
        sets.meta.push(Meta { sum: 0, count: 0, version: 0, died: 0, kind: Kind::Stray });
        sets
    }

    pub fn arena(&self) -> Arena {
        self.arena.clone()
    }

    pub fn shape(&self) -> Shape {
        self.arena.shape
    }

    /// Room for `more` new sets. True: the arena grew, so readers need a new [`Self::arena`].
    #[must_use]
    pub fn reserve(&mut self, more: usize) -> bool {
        let grown = self.free.len() + self.arena.chunks.len() * CHUNK < self.meta.len() + more;
        if grown {
            self.arena.grow();
        }
        grown
    }

    /// Room for more workers or tiers: all records move. True: readers need a new [`Self::arena`].
    #[must_use]
    pub fn reshape(&mut self, words: usize, tiers: usize) -> bool {
        let old = self.shape();
        let shape = Shape { words: old.words.max(words), tiers: old.tiers.max(tiers) };
        if shape == old {
            return false;
        }
        let mut arena = Arena { chunks: Vec::new(), shape };
        self.arena.chunks.iter().for_each(|_| arena.grow());
        for id in 0..self.meta.len() as u32 {
            let (Some(from), Some(to)) = (self.arena.words(id), arena.words(id)) else { continue };
            for workers in 0..old.words {
                for (bank, tier) in (0..2).flat_map(|bank| (0..old.tiers).map(move |tier| (bank, tier))) {
                    let word = from[old.word(workers, bank, tier)].load(Ordering::Relaxed);
                    to[shape.word(workers, bank, tier)].store(word, Ordering::Relaxed);
                }
            }
        }
        self.arena = arena;
        true
    }

    fn words(&self, id: u32) -> &[AtomicU64] {
        self.arena.words(id).unwrap_or_default()
    }

    /// The set that `from` becomes with the bit added or taken away; `from` itself when it has it, or has it not.
    #[inline]
    pub fn step(&mut self, from: u32, lane: Lane, tier: usize, add: bool) -> Step {
        let change = 1 + ((lane.worker * 2 + lane.bank) * TIERS + tier) as u32 * 2 + u32::from(add);
        let place = (mix(u64::from(from) << 32 | u64::from(change)) >> 32) as usize % MEMO;
        let memo = self.memo[place];
        let (from_version, to_version) =
            (self.meta[from as usize].version, self.meta.get(memo.step.to as usize).map_or(0, |to| to.version));
        if (memo.from, memo.change, memo.from_version, memo.to_version) == (from, change, from_version, to_version) {
            return memo.step;
        }
        let step = self.compute(from, lane, tier, add);
        let to_version = self.meta[step.to as usize].version;
        self.memo[place] = Memo { from, from_version, change, step, to_version };
        step
    }

    fn compute(&mut self, from: u32, lane: Lane, tier: usize, add: bool) -> Step {
        let shape = self.shape();
        let mut content = std::mem::take(&mut self.scratch);
        content.clear();
        content.extend(self.words(from).iter().map(|word| word.load(Ordering::Relaxed)));
        let (word, bit) = (lane.worker / 64, 1 << (lane.worker % 64));
        let tiers = shape.word(word, lane.bank, 0)..shape.word(word, lane.bank, 0) + shape.tiers;
        let holds = |content: &[u64]| content[tiers.clone()].iter().any(|word| word & bit != 0);
        let before = holds(&content);
        let changed = &mut content[tiers.start + tier];
        let step = if (*changed & bit != 0) == add {
            Step { to: from, counted: false }
        } else {
            *changed ^= bit;
            let sum = self.meta[from as usize].sum;
            let bit_sum = sum_of(lane, tier);
            let sum = if add { sum.wrapping_add(bit_sum) } else { sum.wrapping_sub(bit_sum) };
            Step { to: self.intern(&content, sum), counted: before != holds(&content) }
        };
        self.scratch = content;
        step
    }

    fn is(&self, id: u32, content: &[u64]) -> bool {
        self.words(id).iter().zip(content).all(|(word, other)| word.load(Ordering::Relaxed) == *other)
    }

    /// The id of this content, made where there is none.
    fn intern(&mut self, content: &[u64], sum: u64) -> u32 {
        if content.iter().all(|word| *word == 0) {
            return 0;
        }
        let known = self.by_sum.get(&sum).copied();
        if let Some(id) = known.filter(|&id| self.is(id, content)) {
            return id;
        }
        let id = self.free.pop().unwrap_or_else(|| {
            self.meta.push(Meta { sum: 0, count: 0, version: 0, died: 0, kind: Kind::Free });
            (self.meta.len() - 1) as u32
        });
        debug_assert!(self.arena.words(id).is_some(), "room was reserved");
        self.words(id).iter().zip(content).for_each(|(word, new)| word.store(*new, Ordering::Relaxed));
        let meta = &mut self.meta[id as usize];
        (meta.sum, meta.count) = (sum, 0);
        // Two contents of one sum: the second is never found by content, which costs memory alone.
        meta.kind = if known.is_some() { Kind::Stray } else { Kind::Canonical };
        if known.is_none() {
            self.by_sum.insert(sum, id);
        } else {
            self.strays += 1;
        }
        id
    }

    /// `entries` entries go from one set to another. Returns whether a set died.
    #[inline]
    pub fn moved(&mut self, from: u32, to: u32, entries: u32, epoch: u64) -> bool {
        if from == to || entries == 0 {
            return false;
        }
        if to != 0 {
            self.meta[to as usize].count += entries;
            if self.meta[to as usize].kind == Kind::Stray {
                self.astray += entries as usize;
            }
        }
        if from == 0 {
            return false;
        }
        let meta = &mut self.meta[from as usize];
        meta.count -= entries;
        if meta.kind == Kind::Stray {
            self.astray -= entries as usize;
        }
        if meta.count == 0 {
            meta.died = epoch;
            self.ageing.push_back((epoch, from));
        }
        meta.count == 0
    }

    /// Frees the ids that nothing has named for two epochs.
    pub fn recycle(&mut self, epoch: u64) {
        while self.ageing.front().is_some_and(|(died, _)| died + 2 <= epoch) {
            let Some((died, id)) = self.ageing.pop_front() else { return };
            let meta = &mut self.meta[id as usize];
            if meta.count > 0 || meta.died != died || meta.kind == Kind::Free {
                continue;
            }
            match meta.kind {
                Kind::Canonical => drop(self.by_sum.remove(&meta.sum)),
                _ => self.strays -= 1,
            }
            meta.kind = Kind::Free;
            meta.version = meta.version.wrapping_add(1);
            self.free.push(id);
        }
    }

    /// Takes a lane out of all sets, in place: no reader may look at its bank. O(sets).
    pub fn wipe(&mut self, lane: Lane) {
        let shape = self.shape();
        let (first, bit) = (shape.word(lane.worker / 64, lane.bank, 0), 1 << (lane.worker % 64));
        for id in 1..self.meta.len() {
            let Some(record) = self.arena.words(id as u32) else { continue };
            let words = &record[first..first + shape.tiers];
            if self.meta[id].kind == Kind::Free || words.iter().all(|word| word.load(Ordering::Relaxed) & bit == 0) {
                continue;
            }
            let mut taken = 0_u64;
            for (tier, word) in words.iter().enumerate() {
                let old = word.load(Ordering::Relaxed);
                if old & bit != 0 {
                    taken = taken.wrapping_add(sum_of(lane, tier));
                    word.store(old & !bit, Ordering::Relaxed);
                }
            }
            let empty = record.iter().all(|word| word.load(Ordering::Relaxed) == 0);
            let meta = &mut self.meta[id];
            if meta.kind == Kind::Canonical {
                self.by_sum.remove(&meta.sum);
                meta.kind = Kind::Stray;
                self.strays += 1;
                self.astray += meta.count as usize;
            }
            meta.sum = meta.sum.wrapping_sub(taken);
            meta.version = meta.version.wrapping_add(1);
            if !empty && meta.count > 0 && !self.by_sum.contains_key(&meta.sum) {
                self.adopt(id as u32);
            }
        }
    }

    /// A stray whose content has no other id becomes the one that is found.
    fn adopt(&mut self, id: u32) {
        let meta = &mut self.meta[id as usize];
        self.by_sum.insert(meta.sum, id);
        meta.kind = Kind::Canonical;
        self.strays -= 1;
        self.astray -= meta.count as usize;
    }

    /// The id that stands for a stray's content; 0 when it has none left.
    pub fn home_of(&mut self, id: u32) -> u32 {
        if self.meta[id as usize].kind != Kind::Stray {
            return id;
        }
        let content: Vec<_> = self.words(id).iter().map(|word| word.load(Ordering::Relaxed)).collect();
        if content.iter().all(|word| *word == 0) {
            return 0;
        }
        match self.by_sum.get(&self.meta[id as usize].sum).copied() {
            None => {
                self.adopt(id);
                id
            }
            Some(other) if self.is(other, &content) => other,
            Some(_) => id,
        }
    }

    /// Sets and entries that a sweep would bring together: more than what is in order.
    pub fn is_littered(&self, entries: usize) -> bool {
        self.astray * 2 > entries + CHUNK || (self.astray > 0 && self.strays > self.by_sum.len() + CHUNK)
    }

    #[cfg(test)]
    pub fn check(&self, counts: &HashMap<u32, u32>) {
        let (mut astray, mut strays) = (0, 0);
        for (id, meta) in self.meta.iter().enumerate().skip(1) {
            assert_eq!(meta.count, counts.get(&(id as u32)).copied().unwrap_or(0), "count of set {id}");
            match meta.kind {
                Kind::Canonical => assert_eq!(self.by_sum.get(&meta.sum), Some(&(id as u32))),
                Kind::Stray => (astray, strays) = (astray + meta.count as usize, strays + 1),
                Kind::Free => assert_eq!(meta.count, 0),
            }
        }
        assert_eq!((astray, strays), (self.astray, self.strays));
    }
}
