//! One shape for all indexes under test: events and queries are made in each one's own form before the clock starts.

use dynamo_kv_router::indexer::concurrent_radix_tree_compressed::ConcurrentRadixTreeCompressed;
use dynamo_kv_router::indexer::positional::PositionalIndexer;
use dynamo_kv_router::indexer::{RadixTree, SyncIndexer, ThreadPoolIndexer};
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, RouterEvent,
};
use fovea_balancer_core::index::{Index, Reader, WorkerDepth, WorkerIndex};
use fovea_kv::{SequenceHash, Tier};
use kv_index::{ChainBlockMap, ChainIndex, ContentHash, StoredBlock};

/// A block by its content, and by all before it too.
#[derive(Clone, Copy)]
pub struct Block {
    pub local: u64,
    pub sequence: u64,
}

pub trait Subject: Sized {
    type Event;
    type Query;
    const NAME: &'static str;

    fn new(workers: u32) -> Self;
    fn stored(worker: u32, parent: Option<&Block>, blocks: &[Block]) -> Self::Event;
    fn removed(worker: u32, blocks: &[Block]) -> Self::Event;

    /// The engine evicted the first `lost` blocks of a chain that it holds.
    fn head_lost(worker: u32, chain: &[Block], lost: usize) -> Self::Event {
        Self::removed(worker, &chain[..lost])
    }

    /// The engine holds them again.
    fn head_back(worker: u32, chain: &[Block], lost: usize) -> Self::Event {
        Self::stored(worker, None, &chain[..lost])
    }

    fn apply(&mut self, event: Self::Event);
    /// Returns when all that was applied counts.
    fn drain(&mut self) {}

    fn query(chain: &[Block]) -> Self::Query;
    /// What is timed: workers that hold something.
    fn ask(&mut self, query: &mut Self::Query) -> usize;
    /// (worker, depth) in order of worker.
    fn answer(&mut self, query: Self::Query) -> Vec<(u32, u32)>;
}

pub struct Ours {
    index: Index,
    reader: Reader,
    out: Vec<WorkerDepth>,
}

pub enum Change {
    Stored(WorkerIndex, Vec<SequenceHash>),
    Removed(WorkerIndex, Vec<SequenceHash>),
}

fn hashes<'a>(blocks: impl IntoIterator<Item = &'a Block>) -> Vec<SequenceHash> {
    blocks.into_iter().map(|block| SequenceHash(block.sequence)).collect()
}

impl Subject for Ours {
    type Event = Change;
    type Query = Vec<SequenceHash>;
    const NAME: &'static str = "fovea";

    fn new(workers: u32) -> Self {
        let mut index = Index::new(1 << 30);
        for _ in 0..workers {
            index.add_worker();
        }
        let reader = index.reader();
        Self { index, reader, out: Vec::new() }
    }

    fn stored(worker: u32, _: Option<&Block>, blocks: &[Block]) -> Change {
        Change::Stored(WorkerIndex(worker), hashes(blocks))
    }

    fn removed(worker: u32, blocks: &[Block]) -> Change {
        Change::Removed(WorkerIndex(worker), hashes(blocks.iter().rev()))
    }

    /// The sidecar withdraws the whole chain, children first: without its head nothing of it can be used.
    fn head_lost(worker: u32, chain: &[Block], _: usize) -> Change {
        Self::removed(worker, chain)
    }

    fn head_back(worker: u32, chain: &[Block], _: usize) -> Change {
        Self::stored(worker, None, chain)
    }

    fn apply(&mut self, event: Change) {
        match event {
            Change::Stored(worker, hashes) => {
                self.index.apply_stored(worker, Tier::Gpu, &hashes).expect("the limit is far away");
            }
            Change::Removed(worker, hashes) => self.index.apply_removed(worker, Tier::Gpu, &hashes),
        }
    }

    fn query(chain: &[Block]) -> Vec<SequenceHash> {
        hashes(chain)
    }

    fn ask(&mut self, query: &mut Vec<SequenceHash>) -> usize {
        self.reader.depths(query, &mut self.out);
        self.out.len()
    }

    fn answer(&mut self, query: Vec<SequenceHash>) -> Vec<(u32, u32)> {
        self.reader.depths(&query, &mut self.out);
        self.out.iter().map(|depth| (depth.worker.0, depth.depth[0])).collect()
    }
}

fn event(worker: u32, data: KvCacheEventData) -> RouterEvent {
    RouterEvent::new(u64::from(worker), KvCacheEvent { event_id: 0, data, dp_rank: 0 })
}

fn dynamo_stored(worker: u32, parent: Option<&Block>, blocks: &[Block]) -> RouterEvent {
    let blocks = blocks.iter().map(|block| KvCacheStoredBlockData {
        block_hash: ExternalSequenceBlockHash(block.sequence),
        tokens_hash: LocalBlockHash(block.local),
        mm_extra_info: None,
    });
    let data = KvCacheStoreData {
        parent_hash: parent.map(|block| ExternalSequenceBlockHash(block.sequence)),
        start_position: None,
        blocks: blocks.collect(),
    };
    event(worker, KvCacheEventData::Stored(data))
}

fn dynamo_removed(worker: u32, blocks: &[Block]) -> RouterEvent {
    let block_hashes = blocks.iter().map(|block| ExternalSequenceBlockHash(block.sequence)).collect();
    event(worker, KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }))
}

fn locals(chain: &[Block]) -> Vec<LocalBlockHash> {
    chain.iter().map(|block| LocalBlockHash(block.local)).collect()
}

fn sorted(scores: impl Iterator<Item = (u32, u32)>) -> Vec<(u32, u32)> {
    let mut scores: Vec<_> = scores.collect();
    scores.sort_unstable();
    scores
}

pub struct Radix(RadixTree);

impl Subject for Radix {
    type Event = RouterEvent;
    type Query = Vec<LocalBlockHash>;
    const NAME: &'static str = "dynamo radix tree";

    fn new(_: u32) -> Self {
        Self(RadixTree::new())
    }

    fn stored(worker: u32, parent: Option<&Block>, blocks: &[Block]) -> RouterEvent {
        dynamo_stored(worker, parent, blocks)
    }

    fn removed(worker: u32, blocks: &[Block]) -> RouterEvent {
        dynamo_removed(worker, blocks)
    }

    fn apply(&mut self, event: RouterEvent) {
        let _ = self.0.apply_event(event);
    }

    fn query(chain: &[Block]) -> Vec<LocalBlockHash> {
        locals(chain)
    }

    fn ask(&mut self, query: &mut Vec<LocalBlockHash>) -> usize {
        self.0.find_matches(std::mem::take(query), false).scores.len()
    }

    fn answer(&mut self, query: Vec<LocalBlockHash>) -> Vec<(u32, u32)> {
        sorted(self.0.find_matches(query, false).scores.iter().map(|(w, d)| (w.worker_id as u32, *d)))
    }
}

/// Dynamo's indexes that share one structure between one event thread and readers on their own threads.
pub struct Pooled<T: SyncIndexer>(ThreadPoolIndexer<T>);

impl<T: SyncIndexer + Made> Subject for Pooled<T> {
    type Event = RouterEvent;
    type Query = Vec<LocalBlockHash>;
    const NAME: &'static str = T::NAME;

    fn new(_: u32) -> Self {
        Self(ThreadPoolIndexer::new(T::made(), 1, 16))
    }

    fn stored(worker: u32, parent: Option<&Block>, blocks: &[Block]) -> RouterEvent {
        dynamo_stored(worker, parent, blocks)
    }

    fn removed(worker: u32, blocks: &[Block]) -> RouterEvent {
        dynamo_removed(worker, blocks)
    }

    fn apply(&mut self, event: RouterEvent) {
        self.0.enqueue_event(event).expect("the event thread lives");
    }

    fn drain(&mut self) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
        runtime.block_on(self.0.flush());
    }

    fn query(chain: &[Block]) -> Vec<LocalBlockHash> {
        locals(chain)
    }

    fn ask(&mut self, query: &mut Vec<LocalBlockHash>) -> usize {
        self.0.backend().find_matches(query, false).scores.len()
    }

    fn answer(&mut self, query: Vec<LocalBlockHash>) -> Vec<(u32, u32)> {
        sorted(self.0.backend().find_matches(&query, false).scores.iter().map(|(w, d)| (w.worker_id as u32, *d)))
    }
}

pub trait Made {
    const NAME: &'static str;
    fn made() -> Self;
}

impl Made for ConcurrentRadixTreeCompressed {
    const NAME: &'static str = "dynamo concurrent radix tree (default)";
    fn made() -> Self {
        Self::new()
    }
}

impl Made for PositionalIndexer {
    const NAME: &'static str = "dynamo positional, jump 32";
    fn made() -> Self {
        Self::new(32)
    }
}

/// kv-index's structure, written by the caller's thread.
pub struct Chain {
    index: ChainIndex,
    maps: Vec<ChainBlockMap>,
    out: Vec<(u32, u32)>,
}

pub enum ChainEvent {
    Stored(u32, Option<kv_index::SequenceHash>, Vec<StoredBlock>),
    Removed(u32, Vec<kv_index::SequenceHash>),
}

impl Subject for Chain {
    type Event = ChainEvent;
    type Query = Vec<ContentHash>;
    const NAME: &'static str = "kv-index chain index";

    fn new(workers: u32) -> Self {
        let index = ChainIndex::with_max_workers(workers as usize);
        for worker in 0..workers {
            assert_eq!(index.intern_worker(&worker.to_string()).expect("room"), worker);
        }
        Self { index, maps: (0..workers).map(|_| ChainBlockMap::new()).collect(), out: Vec::new() }
    }

    fn stored(worker: u32, parent: Option<&Block>, blocks: &[Block]) -> ChainEvent {
        let stored = |block: &Block| StoredBlock {
            seq_hash: kv_index::SequenceHash(block.sequence),
            content_hash: ContentHash(block.local),
        };
        ChainEvent::Stored(
            worker,
            parent.map(|block| kv_index::SequenceHash(block.sequence)),
            blocks.iter().map(stored).collect(),
        )
    }

    fn removed(worker: u32, blocks: &[Block]) -> ChainEvent {
        ChainEvent::Removed(worker, blocks.iter().map(|block| kv_index::SequenceHash(block.sequence)).collect())
    }

    fn apply(&mut self, event: ChainEvent) {
        match event {
            ChainEvent::Stored(worker, parent, blocks) => {
                let _ = self.index.apply_stored(worker, &blocks, parent, &mut self.maps[worker as usize]);
            }
            ChainEvent::Removed(worker, hashes) => {
                self.index.apply_removed(worker, &hashes, &mut self.maps[worker as usize]);
            }
        }
    }

    fn query(chain: &[Block]) -> Vec<ContentHash> {
        chain.iter().map(|block| ContentHash(block.local)).collect()
    }

    fn ask(&mut self, query: &mut Vec<ContentHash>) -> usize {
        self.out.clear();
        let out = &mut self.out;
        self.index.score_into(query, |hash| hash.0, false, |worker, score| out.push((worker, score)));
        self.out.len()
    }

    fn answer(&mut self, query: Vec<ContentHash>) -> Vec<(u32, u32)> {
        sorted(self.index.find_matches(&query, false).scores.into_iter())
    }
}
