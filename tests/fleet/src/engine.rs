//! A model of a vLLM-like engine: a block cache of GPU and CPU copies, an event publisher with numbered batches, a bounded replay buffer.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use fovea_kv::{SequenceHash, Tier};

use crate::prompt::{BLOCK, Block};
use crate::random::Random;

/// A batch on its way: number, payload.
pub type Frame = (u64, Vec<u8>);

#[derive(Clone, Debug)]
struct Held {
    block: Block,
    /// Copies per tier: the engine announces the store and the removal of each.
    copies: [u32; 2],
    used: u64,
}

pub struct Engine {
    pub up: bool,
    blocks: BTreeMap<SequenceHash, Held>,
    gpu_max: usize,
    cpu_max: usize,
    pub log: VecDeque<Frame>,
    pub next: u64,
    kept: usize,
    clock: u64,
    events: Vec<Vec<u8>>,
    /// Life of the process.
    pub life: u64,
}

impl Engine {
    pub fn new(random: &mut Random) -> Self {
        Self {
            up: true,
            blocks: BTreeMap::new(),
            gpu_max: 12 + random.below(40),
            cpu_max: [0, 0, 16][random.below(3)],
            log: VecDeque::new(),
            next: 0,
            kept: [4, 40, 10_000][random.below(3)],
            clock: 0,
            events: Vec::new(),
            life: 0,
        }
    }

    /// A new process: nothing held, numbers from 0.
    pub fn restart(&mut self) {
        self.blocks.clear();
        self.log.clear();
        self.events.clear();
        self.next = 0;
        self.up = true;
        self.life += 1;
    }

    /// Computes a prompt: what is not a hit is stored.
    pub fn compute(&mut self, prompt: &[Block], random: &mut Random) {
        self.clock += 1;
        let clock = self.clock;
        let is_hit = |block: &&Block| self.blocks.get(&block.hash).is_some_and(|held| held.copies[0] > 0);
        let hits = prompt.iter().take_while(is_hit).count();
        for block in &prompt[..hits] {
            self.blocks.entry(block.hash).and_modify(|held| held.used = clock);
        }
        for block in &prompt[hits..] {
            while self.count(0) >= self.gpu_max && self.evict(random) {}
            let held = self.blocks.entry(block.hash);
            let held = held.or_insert_with(|| Held { block: block.clone(), copies: [0; 2], used: clock });
            held.used = clock;
            // Behind a gap a block is computed again though it is held: a second copy, announced like the first.
            held.copies[0] += 1;
        }
        if hits < prompt.len() {
            self.events.push(stored(&prompt[hits..]));
        }
    }

    fn count(&self, tier: usize) -> usize {
        self.blocks.values().map(|held| held.copies[tier] as usize).sum()
    }

    /// Gives up one GPU copy: the one unused for longest, deepest first; now and then any.
    fn evict(&mut self, random: &mut Random) -> bool {
        let free = |held: &&Held| held.copies[0] > 0 && held.used < self.clock;
        let candidates: Vec<_> = self.blocks.values().filter(free).map(|held| (held.used, held.block.hash)).collect();
        let oldest = candidates.iter().map(|(used, _)| *used).min();
        let children: BTreeSet<_> = self.blocks.values().filter_map(|held| held.block.parent).collect();
        let leaf = candidates.iter().find(|(used, hash)| Some(*used) == oldest && !children.contains(hash));
        let any = candidates.get(random.below(candidates.len()));
        let Some((_, hash)) = (if random.one_in(8) { any } else { leaf.or(any) }).copied() else { return false };
        if random.one_in(2) && self.count(1) < self.cpu_max {
            self.events.push(by_hash("BlockStored", hash, "CPU"));
            self.blocks.entry(hash).and_modify(|held| held.copies[1] += 1);
        }
        self.drop_copy(hash, 0);
        if self.cpu_max > 0 && random.one_in(4) {
            let held = self.blocks.values().find(|held| held.copies[1] > 0).map(|held| held.block.hash);
            held.into_iter().for_each(|hash| self.drop_copy(hash, 1));
        }
        true
    }

    fn drop_copy(&mut self, hash: SequenceHash, tier: usize) {
        self.events.push(by_hash("BlockRemoved", hash, ["GPU", "CPU"][tier]));
        if let Some(held) = self.blocks.get_mut(&hash) {
            held.copies[tier] -= 1;
            if held.copies == [0; 2] {
                self.blocks.remove(&hash);
            }
        }
    }

    /// The cache is emptied by a call; the event goes out with the next batch.
    pub fn clear(&mut self) {
        self.blocks.clear();
        self.events.push(Pack::default().array(1).text("AllBlocksCleared").0);
    }

    /// What happened since the last batch, as the publisher sends it. `odd`: with an event that cannot be read, and one of no known type.
    pub fn batch(&mut self, odd: bool) -> Option<Frame> {
        let mut events = std::mem::take(&mut self.events);
        if odd {
            events.push(Pack::default().array(3).text("BlockStored").text("x").nil().0);
            events.insert(0, Pack::default().array(2).text("BlockMoved").number(7).0);
        }
        if events.is_empty() {
            return None;
        }
        self.clock += 1;
        let mut batch = Pack::default().array(3).float(self.life * 1_000_000 + self.clock).array(events.len());
        events.iter().for_each(|event| batch.0.extend_from_slice(event));
        let frame = (self.next, batch.number(0).0);
        self.next += 1;
        self.log.push_back(frame.clone());
        if self.log.len() > self.kept {
            self.log.pop_front();
        }
        Some(frame)
    }

    /// What a perfect sidecar publishes of it: the closure of the GPU blocks, and the closure that goes on from there in the CPU tier.
    pub fn truth(&self) -> [BTreeSet<SequenceHash>; 2] {
        let mut levels = [BTreeSet::new(), BTreeSet::new()];
        for (tier, level) in [Tier::Gpu, Tier::Cpu].into_iter().zip(0..) {
            if level > 0 {
                levels[1] = levels[0].clone();
            }
            loop {
                let tier = usize::from(tier.index());
                let joins = |held: &&Held| {
                    held.copies[tier] > 0
                        && !levels[level].contains(&held.block.hash)
                        && held.block.parent.is_none_or(|parent| levels[level].contains(&parent))
                };
                let new: Vec<_> = self.blocks.values().filter(joins).map(|held| held.block.hash).collect();
                if new.is_empty() {
                    break;
                }
                levels[level].extend(new);
            }
        }
        levels
    }
}

/// The engine's name for a block: nothing like ours.
fn name(hash: SequenceHash) -> u64 {
    hash.0.rotate_left(17) ^ 0x0f0f_1234_5678_9abc
}

fn stored(run: &[Block]) -> Vec<u8> {
    let mut out = Pack::default().array(8).text("BlockStored").array(run.len());
    for block in run {
        out = out.number(name(block.hash));
    }
    out = match run[0].parent {
        Some(parent) => out.number(name(parent)),
        None => out.nil(),
    };
    out = out.array(run.len() * BLOCK as usize);
    for token in run.iter().flat_map(|block| block.tokens) {
        out = out.number(u64::from(token));
    }
    out.number(u64::from(BLOCK)).nil().text("GPU").nil().0
}

fn by_hash(kind: &str, hash: SequenceHash, medium: &str) -> Vec<u8> {
    let out = |fields| Pack::default().array(fields).text(kind).array(1).number(name(hash));
    if kind == "BlockRemoved" {
        return out(3).text(medium).0;
    }
    out(8).nil().array(0).number(0).nil().text(medium).nil().0
}

/// As much of msgpack as is needed.
#[derive(Default)]
struct Pack(Vec<u8>);

impl Pack {
    fn array(mut self, len: usize) -> Self {
        self.0.push(0xdc);
        self.0.extend(u16::try_from(len).unwrap_or(u16::MAX).to_be_bytes());
        self
    }

    fn number(mut self, number: u64) -> Self {
        self.0.push(0xcf);
        self.0.extend(number.to_be_bytes());
        self
    }

    /// Exact below 2⁵³.
    #[expect(clippy::cast_precision_loss, reason = "clocks are small")]
    fn float(mut self, number: u64) -> Self {
        self.0.push(0xcb);
        self.0.extend((number as f64).to_be_bytes());
        self
    }

    fn text(mut self, text: &str) -> Self {
        self.0.push(0xd9);
        self.0.push(u8::try_from(text.len()).unwrap_or(u8::MAX));
        self.0.extend(text.as_bytes());
        self
    }

    fn nil(mut self) -> Self {
        self.0.push(0xc0);
        self
    }
}
