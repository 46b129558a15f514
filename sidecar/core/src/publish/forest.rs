//! The engine's blocks as a forest: which block follows which, in which tiers each is held, and in which levels it is published.
//!
//! Nodes live in one array and name each other by index. A node without KV stays while it has children, so that its return publishes
//! them again; one that is only known as somebody's parent has no content yet. Chains reach 10⁵ blocks: nothing here recurses.

use std::collections::HashMap;

use fovea_kv::{BlockHash, EngineHash, SequenceHash, Tier, chain};

use super::Gauges;
use super::sets::{Sets, UNPUBLISHED};

const NONE: u32 = u32::MAX;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Key {
    pub(super) hash: EngineHash,
    pub(super) group: u32,
}

/// What a block follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Parent {
    /// The start of a chain.
    Root(SequenceHash),
    Node(u32),
    /// Not told yet.
    Unknown,
}

/// What is known of a block's content.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Content {
    Unknown,
    Opaque,
    Block(BlockHash),
}

#[derive(Debug)]
struct Node {
    key: Key,
    parent: Parent,
    content: Content,
    first_child: u32,
    next_sibling: u32,
    previous_sibling: u32,
    /// Copies that the engine holds, by tier.
    copies: [u32; 3],
    /// Hash and position, once the chain is known up to its start.
    sequence: Option<(SequenceHash, u32)>,
    /// Lowest level that contains the block.
    level: u8,
}

impl Node {
    fn is_held(&self) -> bool {
        self.copies != [0; 3]
    }
}

#[derive(Debug, Default)]
pub(super) struct Forest {
    nodes: Vec<Node>,
    free: Vec<u32>,
    by_key: HashMap<Key, u32>,
    pub(super) sets: Sets,
    gauges: Gauges,
    pub(super) subtree_blocks: u64,
    /// Stack of `settle`, kept so that no event allocates one.
    open: Vec<u32>,
}

impl Forest {
    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }

    pub(super) fn find(&self, key: &Key) -> Option<u32> {
        self.by_key.get(key).copied()
    }

    pub(super) fn sequence(&self, key: &Key) -> Option<SequenceHash> {
        self.find(key).and_then(|index| self.node(index).sequence).map(|(hash, _)| hash)
    }

    pub(super) fn is_identified(&self, index: u32) -> bool {
        self.node(index).parent != Parent::Unknown
    }

    pub(super) fn gauges(&self) -> Gauges {
        Gauges { known: self.len(), published: self.sets.published(), ..self.gauges }
    }

    fn node(&self, index: u32) -> &Node {
        &self.nodes[index as usize]
    }

    fn node_mut(&mut self, index: u32) -> &mut Node {
        &mut self.nodes[index as usize]
    }

    pub(super) fn clear(&mut self) {
        self.nodes.clear();
        self.free.clear();
        self.by_key.clear();
        self.sets.clear();
        self.gauges = Gauges::default();
    }

    pub(super) fn insert(&mut self, key: Key) -> u32 {
        let node = Node {
            key,
            parent: Parent::Unknown,
            content: Content::Unknown,
            first_child: NONE,
            next_sibling: NONE,
            previous_sibling: NONE,
            copies: [0; 3],
            sequence: None,
            level: UNPUBLISHED,
        };
        let index = match self.free.pop() {
            Some(index) => {
                *self.node_mut(index) = node;
                index
            }
            None => {
                self.nodes.push(node);
                u32::try_from(self.nodes.len() - 1).expect("the publisher keeps the number of nodes below 2^32 - 1")
            }
        };
        self.by_key.insert(key, index);
        index
    }

    /// Says what a block contains and follows; `None` = its content cannot be predicted. A parent that follows the block itself is refused.
    pub(super) fn identify(&mut self, index: u32, parent: Parent, block: Option<BlockHash>) {
        if let Parent::Node(parent) = parent {
            if self.is_below(parent, index) {
                return;
            }
            let first = std::mem::replace(&mut self.node_mut(parent).first_child, index);
            self.node_mut(index).next_sibling = first;
            if first != NONE {
                self.node_mut(first).previous_sibling = index;
            }
        }
        self.tally(index, false);
        let node = self.node_mut(index);
        node.parent = parent;
        node.content = block.map_or(Content::Opaque, Content::Block);
        self.tally(index, true);
        self.settle(index);
    }

    /// Whether `index` is `ancestor` or follows it. A new node without children is nobody's ancestor: O(1) but for placeholders.
    fn is_below(&self, mut index: u32, ancestor: u32) -> bool {
        if index == ancestor {
            return true;
        }
        if self.node(ancestor).first_child == NONE {
            return false;
        }
        while let Parent::Node(parent) = self.node(index).parent {
            if parent == ancestor {
                return true;
            }
            index = parent;
        }
        false
    }

    /// One more copy. False when the tier held the block already.
    pub(super) fn hold(&mut self, index: u32, tier: Tier) -> bool {
        self.sets.use_tier(tier);
        let tier = usize::from(tier.index());
        self.tally(index, false);
        let copies = &mut self.node_mut(index).copies[tier];
        *copies = copies.saturating_add(1);
        let first = *copies == 1;
        self.tally(index, true);
        if first {
            self.settle(index);
        }
        first
    }

    /// One copy less. False when the tier is not known to hold the block.
    pub(super) fn release(&mut self, index: u32, tier: Tier) -> bool {
        let tier = usize::from(tier.index());
        if self.node(index).copies[tier] == 0 {
            return false;
        }
        self.tally(index, false);
        self.node_mut(index).copies[tier] -= 1;
        self.tally(index, true);
        if self.node(index).copies[tier] == 0 {
            self.settle(index);
            self.forget_if_idle(index);
        }
        true
    }

    /// Drops a node that holds nothing and has no children, then its ancestors for which the same has come true.
    pub(super) fn forget_if_idle(&mut self, mut index: u32) {
        while self.node(index).first_child == NONE && !self.node(index).is_held() {
            let Node { key, parent, next_sibling, previous_sibling, .. } = *self.node(index);
            self.by_key.remove(&key);
            self.free.push(index);
            let Parent::Node(parent) = parent else { return };
            if next_sibling != NONE {
                self.node_mut(next_sibling).previous_sibling = previous_sibling;
            }
            if previous_sibling == NONE {
                self.node_mut(parent).first_child = next_sibling;
            } else {
                self.node_mut(previous_sibling).next_sibling = next_sibling;
            }
            index = parent;
        }
    }

    /// Brings a node and what depends on it up to date: hashes, levels, published sets.
    fn settle(&mut self, start: u32) {
        let mut open = std::mem::take(&mut self.open);
        open.push(start);
        while let Some(index) = open.pop() {
            let (sequence, level) = self.derive(index);
            let node = self.node(index);
            let before = (node.sequence, node.level);
            if before == (sequence, level) {
                continue;
            }
            self.subtree_blocks += u64::from(index != start);
            self.tally(index, false);
            let node = self.node_mut(index);
            (node.sequence, node.level) = (sequence, level);
            self.tally(index, true);
            // A hash once known stays: only the level of a published node changes.
            if let (Some((hash, depth)), true) = (sequence, before.1 != level) {
                self.sets.shift(hash, depth, before.1, level);
            }
            let mut child = self.node(index).first_child;
            while child != NONE {
                open.push(child);
                child = self.node(child).next_sibling;
            }
        }
        self.open = open;
    }

    /// Hash, position and level as they follow from the parent's.
    fn derive(&self, index: u32) -> (Option<(SequenceHash, u32)>, u8) {
        let node = self.node(index);
        let (above, above_level) = match node.parent {
            Parent::Root(root) => (Some((root, 0)), 0),
            Parent::Node(parent) => {
                let parent = self.node(parent);
                (parent.sequence.map(|(hash, depth)| (hash, depth.saturating_add(1))), parent.level)
            }
            Parent::Unknown => (None, UNPUBLISHED),
        };
        let (Some((previous, depth)), Content::Block(block)) = (above, node.content) else {
            return (None, UNPUBLISHED);
        };
        let level = (above_level..UNPUBLISHED).find(|&tier| node.copies[usize::from(tier)] > 0).unwrap_or(UNPUBLISHED);
        (Some((chain(previous, block), depth)), level)
    }

    /// Takes a node out of the gauges before it changes, and back in after.
    fn tally(&mut self, index: u32, add: bool) {
        let node = &self.nodes[index as usize];
        let orphan = node.is_held() && node.sequence.is_none() && node.content != Content::Opaque;
        let opaque = node.is_held() && node.content == Content::Opaque;
        let changes = [(orphan, &mut self.gauges.orphans), (opaque, &mut self.gauges.opaque)];
        let held = node.copies.iter().map(|&copies| copies > 0).zip(&mut self.gauges.held);
        for (counts, gauge) in changes.into_iter().chain(held) {
            if counts {
                *gauge = if add { *gauge + 1 } else { *gauge - 1 };
            }
        }
    }

    pub(super) fn check_invariants(&self) {
        let mut blocks = HashMap::<SequenceHash, [u32; 3]>::new();
        let mut held = [0; 3];
        for (key, &index) in &self.by_key {
            let node = self.node(index);
            assert_eq!(node.key, *key);
            assert_eq!((node.sequence, node.level), self.derive(index), "hash and level follow from the parent");
            assert!(node.is_held() || node.first_child != NONE, "a node without KV has children");
            if let Parent::Node(parent) = node.parent {
                assert!(self.node(parent).level <= node.level, "a parent is in every level of its child");
                assert!(self.by_key.get(&self.node(parent).key) == Some(&parent), "a parent is remembered");
            }
            for (held, copies) in held.iter_mut().zip(node.copies) {
                *held += usize::from(copies > 0);
            }
            for level in usize::from(node.level)..3 {
                let Some((hash, _)) = node.sequence else { panic!("published without a hash") };
                blocks.entry(hash).or_default()[level] += 1;
            }
        }
        assert_eq!(blocks, self.sets.blocks());
        assert_eq!(held, self.gauges.held);
        let published = [0, 1, 2].map(|tier| blocks.values().filter(|blocks| blocks[tier] > 0).count());
        assert_eq!(published, self.sets.published());
        assert_eq!(self.nodes.len(), self.by_key.len() + self.free.len());
    }
}
