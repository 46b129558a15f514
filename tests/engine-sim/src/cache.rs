//! The prefix cache of one rank, whichever the engine family: what the scheduler asks of it, and what comes out.

use crate::blocks::{BlockPool, Sequence};
use crate::config::{EngineKind, SimConfig};
use crate::events::{self, HashForm, KvEvent};
use crate::hash::BlockHasher;
use crate::sglang::digest::on_wire;
use crate::sglang::{self, PageTree, Rules};
use crate::trtllm::{self, BlockTree};
use serde_json::Value;
use std::collections::HashSet;

/// A prefix cache with its memory.
#[derive(Debug)]
pub enum Cache {
    /// vLLM's block pool.
    Blocks { pool: BlockPool, form: HashForm },
    /// SGLang's radix tree.
    Pages(PageTree),
    /// TensorRT-LLM's block tree.
    Polled(BlockTree),
}

/// One step's events.
#[derive(Clone, Debug)]
pub enum Batch {
    /// vLLM's.
    Blocks { events: Vec<KvEvent>, form: HashForm },
    /// SGLang's.
    Pages { events: Vec<sglang::Event>, rules: Rules },
    /// TensorRT-LLM's, which wait for a poll.
    Polled(Vec<trtllm::Event>),
}

impl Batch {
    /// Nothing happened.
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Blocks { events, .. } => events.is_empty(),
            Self::Pages { events, .. } => events.is_empty(),
            Self::Polled(events) => events.is_empty(),
        }
    }

    /// As msgpack; `ts` is Unix time in seconds. Empty for events that are polled.
    pub fn encode(&self, ts: f64, rank: u32) -> Vec<u8> {
        match self {
            Self::Blocks { events, form } => events::encode_batch(ts, events, *form, rank),
            Self::Pages { events, rules } => sglang::event::encode_batch(ts, events, rules, rank),
            Self::Polled(_) => Vec::new(),
        }
    }
}

impl Cache {
    /// An empty one.
    pub fn new(config: &SimConfig) -> Self {
        match config.engine_kind {
            EngineKind::Vllm => {
                let pool = BlockPool::new(config.block_size, config.blocks, BlockHasher::new(config.hash_algo));
                Self::Blocks { pool: pool.with_offload(config.cpu_blocks), form: config.hash_form }
            }
            // SGLang's first page takes what padded slots write, as vLLM's null block.
            EngineKind::Sglang => Self::Pages(PageTree::new(config.block_size, config.blocks - 1, config.rules())),
            EngineKind::Trtllm => Self::Polled(BlockTree::new(config.block_size, config.blocks - 1, trtllm::Rules)),
        }
    }

    /// Tokens per block.
    pub fn block_size(&self) -> usize {
        match self {
            Self::Blocks { pool, .. } => pool.block_size(),
            Self::Pages(tree) => tree.page_size(),
            Self::Polled(tree) => tree.page_size(),
        }
    }

    /// Blocks that requests can use.
    pub fn usable(&self) -> usize {
        match self {
            Self::Blocks { pool, .. } => pool.usable(),
            Self::Pages(tree) => tree.capacity(),
            Self::Polled(tree) => tree.capacity(),
        }
    }

    /// Blocks held by requests.
    pub fn in_use(&self) -> usize {
        match self {
            Self::Blocks { pool, .. } => pool.in_use(),
            Self::Pages(tree) => tree.in_use(),
            Self::Polled(tree) => tree.in_use(),
        }
    }

    /// Hashes in the cache as events carry them, each once, in no order.
    pub fn cached(&self) -> Vec<Value> {
        match self {
            Self::Blocks { pool, form } => pool.cached().map(|hash| hash.published(*form)).collect(),
            Self::Pages(tree) => {
                let hashes: HashSet<_> = tree.cached().iter().map(on_wire).collect();
                hashes.into_iter().map(Value::from).collect()
            }
            Self::Polled(tree) => tree.cached().iter().map(|digest| trtllm::key_of(digest).into()).collect(),
        }
    }

    /// Hashes in the CPU tier, likewise.
    pub fn offloaded(&self) -> Vec<Value> {
        match self {
            Self::Blocks { pool, form } => pool.offloaded().map(|hash| hash.published(*form)).collect(),
            Self::Pages(_) | Self::Polled(_) => Vec::new(),
        }
    }

    /// Events since the last call.
    pub fn take_events(&mut self) -> Batch {
        match self {
            Self::Blocks { pool, form } => Batch::Blocks { events: pool.take_events(), form: *form },
            Self::Pages(tree) => Batch::Pages { events: tree.take_events(), rules: *tree.dialect() },
            Self::Polled(tree) => Batch::Polled(tree.take_events()),
        }
    }

    /// Events that go out though no step ends: vLLM keeps a clear for the next step.
    pub fn take_idle_events(&mut self) -> Option<Batch> {
        let batch = if let Self::Blocks { .. } = self { return None } else { self.take_events() };
        (!batch.is_empty()).then_some(batch)
    }

    /// Leading blocks of a sequence that need not be computed.
    pub fn hit_blocks(&mut self, sequence: &mut Sequence) -> usize {
        match self {
            Self::Blocks { pool, .. } => pool.hit_blocks(sequence),
            Self::Pages(tree) => tree.hit_pages(sequence),
            Self::Polled(tree) => tree.hit_pages(sequence),
        }
    }

    /// Gives a sequence its cached prefix and room for `new_tokens` more; false when there is no room.
    pub fn admit(&mut self, sequence: &mut Sequence, hits: usize, new_tokens: usize, report_hits: bool) -> bool {
        match self {
            Self::Blocks { pool, .. } => pool.admit(sequence, hits, new_tokens, report_hits),
            Self::Pages(tree) => tree.admit(sequence, hits, new_tokens),
            Self::Polled(tree) => tree.admit(sequence, hits, new_tokens),
        }
    }

    /// Makes room for `new_tokens` more; false when there is none.
    pub fn grow(&mut self, sequence: &mut Sequence, new_tokens: usize) -> bool {
        match self {
            Self::Blocks { pool, .. } => pool.grow(sequence, new_tokens),
            Self::Pages(tree) => tree.grow(sequence, new_tokens),
            Self::Polled(tree) => tree.grow(sequence, new_tokens),
        }
    }

    /// A chunk of the prompt has been computed, maybe the last. vLLM has cached it when the step began; TensorRT-LLM
    /// caches a prompt when it is whole.
    pub fn chunk_done(&mut self, sequence: &mut Sequence) {
        match self {
            Self::Blocks { .. } => {}
            Self::Pages(tree) => tree.commit(sequence),
            Self::Polled(tree) if sequence.computed >= sequence.tokens.len() => tree.commit(sequence),
            Self::Polled(_) => {}
        }
    }

    /// Ends the sequence's use of its blocks; for good, or (`retracted`) until it is admitted again.
    pub fn release(&mut self, sequence: &mut Sequence, retracted: bool) {
        match self {
            Self::Blocks { pool, .. } => pool.release(sequence),
            Self::Pages(tree) => tree.release(sequence, !retracted),
            Self::Polled(tree) => tree.release(sequence, !retracted),
        }
    }

    /// Forgets all; false, and nothing changed, while requests hold blocks.
    pub fn reset(&mut self) -> bool {
        match self {
            Self::Blocks { pool, .. } => pool.reset(),
            Self::Pages(tree) => tree.reset(),
            Self::Polled(tree) => tree.reset(),
        }
    }
}
