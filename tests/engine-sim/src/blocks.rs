//! The block pool: prefix hits, allocation, eviction and the events they cause.
//!
//! Mirrors `vllm/v1/core/block_pool.py` and `kv_cache_manager.py` of vLLM 0.32 for one full-attention group.
//! **Invariant:** pure; every change of the cache leaves exactly one event, in order.

use crate::events::{KvEvent, Stored};
use crate::hash::{BlockHasher, Digest, ExtraKey};
use crate::tree::Hold;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::ops::Range;

/// A LoRA adapter as loaded at start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lora {
    /// From 1, in the order given.
    pub id: u32,
    /// Name, also the model name in requests.
    pub name: String,
    /// Path as given at start; part of the hash.
    pub path: String,
}

/// The positions that one media item fills.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MediaSpan {
    /// The engine's identity of the item.
    pub id: String,
    /// First position.
    pub start: usize,
    /// Number of positions.
    pub tokens: usize,
}

/// One request's tokens and the blocks that hold their KV.
#[derive(Clone, Debug, Default)]
pub struct Sequence {
    /// Prompt, then what was generated.
    pub tokens: Vec<u32>,
    /// In order of position.
    pub media: Vec<MediaSpan>,
    /// `cache_salt`.
    pub salt: Option<String>,
    /// Adapter.
    pub lora: Option<Lora>,
    /// Shown in events.
    pub session_id: Option<String>,
    /// SGLang's `extra_key`.
    pub extra_key: Option<String>,
    /// Tokens whose KV is there (or is being computed in this step, after `allocate`).
    pub computed: usize,
    blocks: Vec<usize>,
    /// Leading blocks that are in the cache under their hash.
    stored: usize,
    hashes: Vec<Digest>,
    keys: Vec<Vec<ExtraKey>>,
    /// What it holds of a page tree, in place of `blocks` to `keys`.
    pub(crate) hold: Hold,
}

impl Sequence {
    /// A sequence without tokens.
    pub fn new(lora: Option<Lora>, salt: Option<String>, session_id: Option<String>) -> Self {
        Self { lora, salt, session_id, ..Self::default() }
    }

    fn extra_keys(&self, start: usize, end: usize) -> Vec<ExtraKey> {
        let lora = self.lora.iter().map(|lora| ExtraKey::Lora { name: lora.name.clone(), path: lora.path.clone() });
        let touched = self.media.iter().filter(|span| span.start < end && start < span.start + span.tokens);
        let position = |n: usize| i64::try_from(n).expect("a position is below the model's length");
        let media =
            touched.map(|span| ExtraKey::Media { id: span.id.clone(), offset: position(span.start) - position(start) });
        let salt = self.salt.iter().filter(|salt| start == 0 && !salt.is_empty()).cloned().map(ExtraKey::Salt);
        lora.chain(media).chain(salt).collect()
    }

    /// Hashes all full blocks that are not hashed yet.
    fn hash_full_blocks(&mut self, size: usize, hasher: &BlockHasher) {
        while (self.hashes.len() + 1) * size <= self.tokens.len() {
            let start = self.hashes.len() * size;
            let keys = self.extra_keys(start, start + size);
            let hash = hasher.block(self.hashes.last().copied(), &self.tokens[start..start + size], &keys);
            self.hashes.push(hash);
            self.keys.push(keys);
        }
    }

    fn event(&self, from: usize, to: usize, block_size: usize, parent: Option<Digest>) -> KvEvent {
        KvEvent::Stored(Stored {
            hashes: self.hashes[from..to].to_vec(),
            parent,
            tokens: self.tokens[from * block_size..to * block_size].to_vec(),
            block_size,
            lora: self.lora.as_ref().map(|lora| (lora.id, lora.name.clone())),
            extra_keys: self.keys[from..to].to_vec(),
            session_id: self.session_id.clone(),
        })
    }
}

#[derive(Clone, Debug, Default)]
struct Block {
    hash: Option<Digest>,
    users: u32,
    /// Key in the free queue while `users` is 0.
    ticket: i64,
}

/// The pool of one engine. Block 0 is vLLM's null block and never used.
#[derive(Debug)]
pub struct BlockPool {
    block_size: usize,
    hasher: BlockHasher,
    blocks: Vec<Block>,
    /// Free blocks, the next to be taken first.
    free: BTreeMap<i64, usize>,
    tickets: Range<i64>,
    /// Blocks by hash, oldest copy first; an entry is never empty.
    cached: HashMap<Digest, Vec<usize>>,
    offload: Offload,
    events: Vec<KvEvent>,
}

/// The CPU tier: what the pool evicts goes there, and a prefix continues from there.
#[derive(Debug, Default)]
struct Offload {
    capacity: usize,
    held: HashSet<Digest>,
    /// In order of arrival, the next to go first.
    order: VecDeque<Digest>,
}

impl BlockPool {
    /// A pool of `capacity` blocks, one of them the null block.
    pub fn new(block_size: usize, capacity: usize, hasher: BlockHasher) -> Self {
        let blocks = vec![Block::default(); capacity.max(2)];
        let mut pool = Self {
            block_size: block_size.max(1),
            hasher,
            blocks,
            free: BTreeMap::new(),
            tickets: 0..0,
            cached: HashMap::new(),
            offload: Offload::default(),
            events: Vec::new(),
        };
        (1..pool.blocks.len()).rev().for_each(|id| pool.put_back(id));
        pool
    }

    /// The same with a CPU tier of `capacity` blocks.
    #[must_use]
    pub fn with_offload(mut self, capacity: usize) -> Self {
        self.offload.capacity = capacity;
        self
    }

    /// Hashes in the CPU tier, in no order.
    pub fn offloaded(&self) -> impl Iterator<Item = &Digest> {
        self.offload.held.iter()
    }

    /// Tokens per block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Blocks that requests can use.
    pub fn usable(&self) -> usize {
        self.blocks.len() - 1
    }

    /// Blocks held by requests.
    pub fn in_use(&self) -> usize {
        self.usable() - self.free.len()
    }

    /// Hashes in the cache, each once, in no order.
    pub fn cached(&self) -> impl Iterator<Item = &Digest> {
        self.cached.keys()
    }

    /// Events since the last call.
    pub fn take_events(&mut self) -> Vec<KvEvent> {
        std::mem::take(&mut self.events)
    }

    /// Leading blocks of `sequence` in the cache, those that follow in the CPU tier included. Its last token is always computed, so an aligned prompt never hits
    /// its last block.
    pub fn hit_blocks(&self, sequence: &mut Sequence) -> usize {
        sequence.hash_full_blocks(self.block_size, &self.hasher);
        let most = sequence.tokens.len().saturating_sub(1) / self.block_size;
        let gpu = self.gpu_hits(sequence, most);
        let rest = sequence.hashes[gpu..most.min(sequence.hashes.len())].iter();
        gpu + rest.take_while(|hash| self.cached.contains_key(hash) || self.offload.held.contains(hash)).count()
    }

    fn gpu_hits(&self, sequence: &Sequence, most: usize) -> usize {
        sequence.hashes.iter().take(most).take_while(|hash| self.cached.contains_key(hash)).count()
    }

    /// Gives a sequence without blocks its cached prefix (if `hit_blocks` > 0) and room for `new_tokens` more, and puts
    /// the blocks that this fills into the cache. False, and nothing changed, when the pool has no room.
    pub fn admit(&mut self, sequence: &mut Sequence, hit_blocks: usize, new_tokens: usize, report_hits: bool) -> bool {
        debug_assert!(sequence.blocks.is_empty(), "only a sequence without blocks is admitted");
        // What follows the GPU's part is loaded from the CPU tier into new blocks.
        let gpu_hits = self.gpu_hits(sequence, hit_blocks);
        let hits: Vec<usize> = sequence.hashes[..gpu_hits].iter().map(|hash| self.cached[hash][0]).collect();
        let idle_hits = hits.iter().filter(|id| self.blocks[**id].users == 0).count();
        let needed = (hit_blocks * self.block_size + new_tokens).div_ceil(self.block_size) - gpu_hits;
        if needed + idle_hits > self.free.len() {
            return false;
        }
        for id in &hits {
            self.take(*id);
        }
        sequence.blocks = hits;
        sequence.stored = gpu_hits;
        sequence.computed = hit_blocks * self.block_size;
        if report_hits && gpu_hits > 0 {
            self.events.push(sequence.event(0, gpu_hits, self.block_size, None));
        }
        self.grow(sequence, new_tokens)
    }

    /// Makes room for `new_tokens` more and caches the blocks that they fill. False, and nothing changed, when the pool
    /// has no room.
    pub fn grow(&mut self, sequence: &mut Sequence, new_tokens: usize) -> bool {
        let end = sequence.computed + new_tokens;
        let needed = end.div_ceil(self.block_size).saturating_sub(sequence.blocks.len());
        if needed > self.free.len() {
            return false;
        }
        for _ in 0..needed {
            let id = self.evict_oldest();
            sequence.blocks.push(id);
        }
        self.store_full(sequence, end.min(sequence.tokens.len()) / self.block_size);
        true
    }

    /// Ends the sequence's use of its blocks, the last block first, so that a prefix outlives its continuation.
    pub fn release(&mut self, sequence: &mut Sequence) {
        for id in std::mem::take(&mut sequence.blocks).into_iter().rev() {
            self.blocks[id].users -= 1;
            if self.blocks[id].users == 0 {
                self.put_back(id);
            }
        }
        sequence.stored = 0;
        sequence.computed = 0;
    }

    /// Forgets all cached blocks. False, and nothing changed, while requests hold blocks.
    pub fn reset(&mut self) -> bool {
        if self.in_use() > 0 {
            return false;
        }
        self.cached.clear();
        self.offload = Offload { capacity: self.offload.capacity, ..Offload::default() };
        self.blocks.iter_mut().for_each(|block| block.hash = None);
        self.events.push(KvEvent::Cleared);
        true
    }

    fn store_full(&mut self, sequence: &mut Sequence, full: usize) {
        let from = sequence.stored;
        if full <= from {
            return;
        }
        sequence.hash_full_blocks(self.block_size, &self.hasher);
        for index in from..full {
            let (id, hash) = (sequence.blocks[index], sequence.hashes[index]);
            self.blocks[id].hash = Some(hash);
            self.cached.entry(hash).or_default().push(id);
        }
        let parent = from.checked_sub(1).map(|last| sequence.hashes[last]);
        self.events.push(sequence.event(from, full, self.block_size, parent));
        sequence.stored = full;
    }

    /// Blocks that hold nothing worth keeping are taken again first.
    fn put_back(&mut self, id: usize) {
        let ticket = if self.blocks[id].hash.is_some() {
            self.tickets.end += 1;
            self.tickets.end
        } else {
            self.tickets.start -= 1;
            self.tickets.start
        };
        self.blocks[id].ticket = ticket;
        self.free.insert(ticket, id);
    }

    fn take(&mut self, id: usize) {
        if self.blocks[id].users == 0 {
            self.free.remove(&self.blocks[id].ticket);
        }
        self.blocks[id].users += 1;
    }

    /// Copies a block that leaves the pool for good into the CPU tier.
    fn offload(&mut self, hash: Digest) {
        let offload = &mut self.offload;
        if offload.capacity == 0 || !offload.held.insert(hash) {
            return;
        }
        offload.order.push_back(hash);
        self.events.push(KvEvent::Offloaded(hash));
        if offload.held.len() > offload.capacity
            && let Some(oldest) = offload.order.pop_front()
        {
            offload.held.remove(&oldest);
            self.events.push(KvEvent::OffloadRemoved(oldest));
        }
    }

    fn evict_oldest(&mut self) -> usize {
        let (_, id) = self.free.pop_first().expect("the caller counted the free blocks");
        self.blocks[id].users = 1;
        if let Some(hash) = self.blocks[id].hash.take() {
            let copies = self.cached.get_mut(&hash).expect("a hashed block is in the cache");
            copies.retain(|copy| *copy != id);
            if copies.is_empty() {
                self.cached.remove(&hash);
                self.offload(hash);
            }
            self.events.push(KvEvent::Removed(hash));
        }
        id
    }
}
