//! Depth of all workers at once: where along a chain the set of holders changes.
//!
//! Visible sets shrink along a chain, so two equal ids have only equal sets between them. Intervals with different ends are cut, all of them in
//! one round whose probes overlap in memory, until neighbours differ: O(distinct sets × log blocks) probes. A chain with more than [`MANY`] changes is walked.

use std::sync::atomic::{AtomicU64, Ordering};

use fovea_kv::SequenceHash;

use super::sets::Arena;
use super::table::Shards;
use super::{WorkerDepth, WorkerIndex, key};

/// What readers see, replaced as a whole whenever its shape changes; table and records change under it.
pub struct View {
    pub table: Shards,
    pub sets: Arena,
    /// Per word of workers: which bank counts.
    pub banks: Vec<u64>,
}

/// Open intervals that are cut side by side: first with little room, then with more; beyond, the chain is walked.
const FEW: usize = 8;
const MANY: usize = 48;
/// Logarithm of the parts into which a search for the last held block cuts what is left.
const EDGE: u32 = 3;
/// In place of an id: not probed yet.
const UNKNOWN: u32 = u32::MAX;
/// Blocks asked for ahead of a walk.
const AHEAD: usize = 16;

/// Ids `a` at `low` and `b` at `high` differ.
#[derive(Clone, Copy, Default)]
struct Span {
    low: u32,
    a: u32,
    high: u32,
    b: u32,
}

impl Span {
    /// Parts that a cut into 2^`log` gives: no more than it has blocks.
    #[inline]
    fn parts(&self, log: u32) -> u32 {
        (self.high - self.low).min(1 << log)
    }

    /// Where part number `part` ends.
    #[inline]
    fn point(&self, part: u32, log: u32) -> u32 {
        let length = self.high - self.low;
        let offset = if length <= 1 << log { part } else { ((u64::from(length) * u64::from(part)) >> log) as u32 };
        self.low + offset
    }
}

/// `count` spans in order.
#[derive(Clone, Copy)]
struct Spans<const ROOM: usize> {
    list: [Span; ROOM],
    count: usize,
}

impl<const ROOM: usize> Spans<ROOM> {
    const NONE: Self = Self { list: [Span { low: 0, a: 0, high: 0, b: 0 }; ROOM], count: 0 };

    fn get(&self) -> &[Span] {
        &self.list[..self.count]
    }

    /// `None` when there is no room.
    #[inline]
    fn push(&mut self, span: Span) -> Option<()> {
        *self.list.get_mut(self.count)? = span;
        self.count += 1;
        Some(())
    }
}

/// Blocks before `end` are held by set `id`, from the run before on.
#[derive(Clone, Copy, Default)]
struct Run {
    end: u32,
    id: u32,
}

impl View {
    #[inline]
    fn get(&self, chain: &[SequenceHash], at: u32) -> u32 {
        self.table.get(key(chain[at as usize]))
    }

    /// Appends depths in order of worker. False: the view is older than what it led to.
    #[must_use]
    pub fn depths(&self, chain: &[SequenceHash], out: &mut Vec<WorkerDepth>) -> bool {
        let Ok(last) = u32::try_from(chain.len().saturating_sub(1)) else { return true };
        let first = if chain.is_empty() { 0 } else { self.get(chain, 0) };
        if first == 0 {
            return true;
        }
        let whole = Span { low: 0, a: first, high: last, b: UNKNOWN };
        self.bisect::<FEW>(chain, whole, out)
            .or_else(|| self.bisect::<MANY>(chain, whole, out))
            .unwrap_or_else(|| self.emit(&self.walk(chain), out))
    }

    /// Leading blocks of `chain` in one worker's GPU, the search begun at `guess`: two probes when it is right. `None`: the view is older
    /// than what it led to.
    pub fn depth_of(&self, chain: &[SequenceHash], worker: WorkerIndex, guess: u32) -> Option<u32> {
        let length = u32::try_from(chain.len()).unwrap_or(u32::MAX);
        let guess = guess.min(length);
        // Held: all before `low`; not held: `high`, or the chain ends there.
        let (mut low, mut high) = (0, length);
        if guess > 0 && !self.is_held(chain, guess - 1, worker)? {
            high = guess - 1;
        } else {
            low = guess;
            let mut stride = 1;
            while low < length && high == length {
                let next = low.saturating_add(stride).min(length);
                match self.is_held(chain, next - 1, worker)? {
                    true => low = next,
                    false => high = next - 1,
                }
                stride *= 2;
            }
        }
        while low < high {
            let middle = low.midpoint(high);
            match self.is_held(chain, middle, worker)? {
                true => low = middle + 1,
                false => high = middle,
            }
        }
        Some(low)
    }

    fn is_held(&self, chain: &[SequenceHash], at: u32, worker: WorkerIndex) -> Option<bool> {
        let (word, bit) = (worker.0 as usize / 64, worker.0 % 64);
        let id = self.get(chain, at);
        let Some(banks) = self.banks.get(word).filter(|_| id != 0) else { return Some(false) };
        let (record, shape) = (self.sets.words(id)?, self.sets.shape);
        let bank = (banks >> bit & 1) as usize;
        Some(record[shape.word(word, bank, 0)].load(Ordering::Relaxed) >> bit & 1 == 1)
    }

    /// `None`: the sets change more often than there is room for.
    fn bisect<const ROOM: usize>(
        &self,
        chain: &[SequenceHash],
        whole: Span,
        out: &mut Vec<WorkerDepth>,
    ) -> Option<bool> {
        let (mut open, mut next) = (Spans::<ROOM>::NONE, Spans::<ROOM>::NONE);
        let tail = self.begin(chain, whole, &mut open)?;
        while open.get().iter().any(|span| span.high - span.low > 1) {
            let log = match open.count {
                0..=2 => 3,
                3..=8 => 2,
                _ => 1,
            };
            self.ask(chain, open.get(), log);
            next.count = 0;
            for span in open.get() {
                self.cut(chain, *span, log, &mut next)?;
            }
            std::mem::swap(&mut open, &mut next);
        }
        let mut runs = [Run::default(); MANY + 1];
        for (run, span) in runs.iter_mut().zip(open.get()) {
            *run = Run { end: span.low + 1, id: span.a };
        }
        runs[open.count] = Run { end: whole.high + 1, id: tail };
        let runs = &runs[..open.count + usize::from(tail != 0)];
        self.learn(runs);
        Some(self.emit(runs, out))
    }

    /// First round: where the first set ended last time, and the chain's end. Returns the id at the end, or 0 after an absent block.
    fn begin<const ROOM: usize>(&self, chain: &[SequenceHash], whole: Span, open: &mut Spans<ROOM>) -> Option<u32> {
        let Span { low, a, high, .. } = whole;
        if high == low {
            return Some(a);
        }
        let guess = self.sets.hint(a).clamp(1, high);
        let near = [guess - 1, guess, high].map(|at| self.table.touch(key(chain[at as usize])));
        std::hint::black_box(near);
        let (before, after) = (self.get(chain, guess - 1), self.get(chain, guess));
        let end = self.get(chain, high);
        let mut from = (low, a);
        for (at, id) in [(guess - 1, before), (guess, after), (high, end)] {
            if id == 0 {
                let (edge, id) = self.edge(chain, from, at);
                if id != from.1 {
                    open.push(Span { low: from.0, a: from.1, high: edge, b: id })?;
                }
                open.push(Span { low: edge, a: id, high: edge + 1, b: 0 })?;
                return Some(0);
            }
            if id != from.1 {
                open.push(Span { low: from.0, a: from.1, high: at, b: id })?;
            }
            from = (at, id);
        }
        Some(end)
    }

    /// The last held block and its set, from a held block and an absent one: by tags alone, which may be wrong about absent blocks, until the
    /// block found is held indeed.
    fn edge(&self, chain: &[SequenceHash], held: (u32, u32), absent: u32) -> (u32, u32) {
        let mut end = absent;
        loop {
            let mut span = Span { low: held.0, high: end, ..Span::default() };
            while span.high - span.low > 1 {
                // All of a round are asked without a branch in between, so that they overlap in memory.
                let maybe = |part: u32| u32::from(self.table.maybe(key(chain[span.point(part, EDGE) as usize])));
                let held = (1..span.parts(EDGE)).fold(0, |held, part| held | maybe(part) << part);
                let part = (held >> 1).trailing_ones();
                (span.low, span.high) = (span.point(part, EDGE), span.point(part + 1, EDGE));
            }
            if span.low == held.0 {
                return held;
            }
            match self.get(chain, span.low) {
                0 => end = span.low,
                id => return (span.low, id),
            }
        }
    }

    /// Remembers where the first set's run ended: chains that begin alike often part at the same place.
    #[inline]
    fn learn(&self, runs: &[Run]) {
        if let [first, ..] = runs
            && self.sets.hint(first.id) != first.end
        {
            self.sets.set_hint(first.id, first.end);
        }
    }

    /// Brings the lines of all cuts of one round near.
    #[inline]
    fn ask(&self, chain: &[SequenceHash], open: &[Span], log: u32) {
        let mut sum = 0;
        for span in open {
            for part in 1..span.parts(log) {
                sum ^= self.table.touch(key(chain[span.point(part, log) as usize]));
            }
        }
        std::hint::black_box(sum);
    }

    /// Probes inside `span` and keeps the parts whose ends differ, up to the first absent block. `None` when there are too many.
    #[inline]
    fn cut<const ROOM: usize>(
        &self,
        chain: &[SequenceHash],
        span: Span,
        log: u32,
        kept: &mut Spans<ROOM>,
    ) -> Option<()> {
        let (mut low, mut a) = (span.low, span.a);
        let last = span.parts(log);
        for part in 1..=last {
            let high = span.point(part, log);
            let b = if part == last { span.b } else { self.get(chain, high) };
            if a != b {
                kept.push(Span { low, a, high, b })?;
            }
            if b == 0 {
                break;
            }
            (low, a) = (high, b);
        }
        Some(())
    }

    /// All runs, block by block.
    fn walk(&self, chain: &[SequenceHash]) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::with_capacity(chain.len());
        let mut sum = 0;
        for (end, hash) in (1..).zip(chain) {
            if let Some(ahead) = chain.get(end as usize + AHEAD) {
                sum ^= self.table.touch(key(*ahead));
            }
            match (self.table.get(key(*hash)), runs.last_mut()) {
                (0, _) => break,
                (id, Some(run)) if run.id == id => run.end = end,
                (id, _) => runs.push(Run { end, id }),
            }
        }
        std::hint::black_box(sum);
        runs
    }

    fn emit(&self, runs: &[Run], out: &mut Vec<WorkerDepth>) -> bool {
        match self.sets.shape.tiers {
            1 => self.emit_tiers::<1>(runs, out),
            _ => self.emit_tiers::<3>(runs, out),
        }
    }

    /// The last run that has a worker tells its depth. False: see [`Self::depths`].
    fn emit_tiers<const TIERS: usize>(&self, runs: &[Run], out: &mut Vec<WorkerDepth>) -> bool {
        let Some((first, later)) = runs.split_first() else { return true };
        let Some(record) = self.sets.words(first.id) else { return false };
        for word in 0..self.banks.len() {
            let held = self.held::<TIERS>(record, word);
            let all = held[TIERS - 1];
            if all == 0 {
                continue;
            }
            // What only the first run has needs no writing.
            let mut depths = [[first.end; 64]; TIERS];
            let mut seen = [0_u64; TIERS];
            for run in later.iter().rev() {
                let Some(record) = self.sets.words(run.id) else { return false };
                for (tier, held) in self.held::<TIERS>(record, word).into_iter().enumerate() {
                    Bits(held & !seen[tier]).for_each(|bit| depths[tier][bit] = run.end);
                    seen[tier] |= held;
                }
            }
            let worker = |bit: usize| WorkerIndex((word * 64 + bit) as u32);
            if TIERS == 1 {
                let depth = |bit: usize| WorkerDepth { worker: worker(bit), depth: [depths[0][bit]; 3] };
                if all == u64::MAX { out.extend((0..64).map(depth)) } else { out.extend(Bits(all).map(depth)) }
            } else {
                let of = |tier: usize, bit: usize| match (held[tier] | seen[tier]) >> bit & 1 {
                    0 => 0,
                    _ => depths[tier][bit],
                };
                let depth =
                    |bit: usize| WorkerDepth { worker: worker(bit), depth: [0, 1, 2].map(|tier| of(tier, bit)) };
                out.extend(Bits(all).map(depth));
            }
        }
        true
    }

    /// Workers of one word that hold what the record stands for, in each tier or a faster one.
    #[inline]
    fn held<const TIERS: usize>(&self, record: &[AtomicU64], word: usize) -> [u64; TIERS] {
        let (shape, banks) = (self.sets.shape, self.banks[word]);
        let mut faster = 0;
        std::array::from_fn(|tier| {
            let a = record[shape.word(word, 0, tier)].load(Ordering::Relaxed);
            let b = record[shape.word(word, 1, tier)].load(Ordering::Relaxed);
            faster |= (a & !banks) | (b & banks);
            faster
        })
    }
}

/// Places of the bits that are set, in order.
struct Bits(u64);

impl Iterator for Bits {
    type Item = usize;

    #[inline]
    fn next(&mut self) -> Option<usize> {
        let bit = (self.0 != 0).then(|| self.0.trailing_zeros() as usize);
        self.0 &= self.0.wrapping_sub(1);
        bit
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        let left = self.0.count_ones() as usize;
        (left, Some(left))
    }
}
