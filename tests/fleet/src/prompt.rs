//! Prompts: paths in a tree of blocks, so that they share prefixes; and who is whose parent.

use std::collections::HashMap;

use fovea_kv::{BlockHasher, SequenceHash, chain, root};

use crate::random::Random;

/// Tokens per block.
pub const BLOCK: u32 = 4;

#[derive(Clone, Debug)]
pub struct Block {
    pub tokens: [u32; BLOCK as usize],
    pub hash: SequenceHash,
    pub parent: Option<SequenceHash>,
}

/// All blocks that prompts were ever made of.
#[derive(Debug, Default)]
pub struct Tree {
    pub parents: HashMap<SequenceHash, Option<SequenceHash>>,
}

impl Tree {
    /// One of `conversations`, so far into it.
    pub fn prompt(&mut self, conversations: usize, random: &mut Random) -> Vec<Block> {
        let (conversation, length) = (random.below(conversations), 1 + random.below(12));
        let mut hasher = BlockHasher::default();
        let (mut before, mut parent, mut out) = (root("", ""), None, Vec::with_capacity(length));
        for depth in 0..length {
            // The first blocks are shared by all, the next by half, and so on: branches at depths 2, 4 and 6.
            let branch = conversation % (1 << (depth / 2)).min(1 << 10);
            let tokens = std::array::from_fn(|at| u32::try_from(branch * 1000 + depth * 8 + at).unwrap_or(0));
            hasher.begin();
            hasher.push_tokens(&tokens);
            let hash = chain(before, hasher.finish());
            self.parents.insert(hash, parent);
            out.push(Block { tokens, hash, parent });
            (before, parent) = (hash, Some(hash));
        }
        out
    }
}
