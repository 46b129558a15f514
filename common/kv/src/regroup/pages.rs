//! The pages: a forest in one vector, with the tokens beside it.

use std::collections::HashMap;
use std::ops::{Index, IndexMut};
use std::sync::Arc;

use xxhash_rust::xxh3::xxh3_64;

use crate::event::BlockExtra;
use crate::{EngineHash, Tier};

/// No page.
pub(super) const NONE: u32 = u32::MAX;

/// What a page is found by. A digest, or a hash in another group than 0, is folded into 64 bits: equality is all that counts, and
/// engines that have small pages send 64 bits themselves.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key {
    folded: u64,
    hash: EngineHash,
}

impl Key {
    pub(super) fn of(hash: EngineHash, group: u32) -> Self {
        let folded = match hash {
            EngineHash::Int(hash) if group == 0 => hash,
            EngineHash::Int(hash) => fold(&hash.to_le_bytes(), group),
            EngineHash::Digest { bytes, len } => fold(&bytes[..usize::from(len).min(32)], group),
        };
        Self { folded, hash }
    }
}

fn fold(hash: &[u8], group: u32) -> u64 {
    let mut bytes = [0; 36];
    bytes[..hash.len()].copy_from_slice(hash);
    bytes[32..].copy_from_slice(&group.to_le_bytes());
    xxh3_64(&bytes)
}

#[derive(Debug)]
pub(super) struct Page {
    key: u64,
    /// Page before it, also when that is only a place in a chain; [`NONE`] at the start of a chain, or when nothing is known yet.
    pub(super) parent: u32,
    first_child: u32,
    next: u32,
    previous: u32,
    /// Place in its block; `None` while the chain is not known up to its start.
    pub(super) offset: Option<u32>,
    /// Copies by tier. At the highest value copies are lost count of, which can only claim less.
    pub(super) copies: [u16; 3],
    /// Bit per tier: held there, and so are all pages before it in its block.
    pub(super) through: u8,
    /// Parent and tokens are known; otherwise it only holds a place.
    pub(super) identified: bool,
}

impl Page {
    fn new(key: u64) -> Self {
        Self {
            key,
            parent: NONE,
            first_child: NONE,
            next: NONE,
            previous: NONE,
            offset: None,
            copies: [0; 3],
            through: 0,
            identified: false,
        }
    }
}

#[derive(Debug, Default)]
pub(super) struct Pages {
    slots: Vec<Page>,
    /// `page_size` ids per slot.
    tokens: Vec<u32>,
    page_size: usize,
    free: Vec<u32>,
    by_key: HashMap<u64, u32>,
    /// Only where the hash is not the key itself.
    names: HashMap<u32, EngineHash>,
    /// Only of pages that have some.
    pub(super) extra: HashMap<u32, BlockExtra>,
    /// Only of pages that start a chain.
    pub(super) lora: HashMap<u32, Arc<str>>,
}

impl Index<u32> for Pages {
    type Output = Page;
    fn index(&self, page: u32) -> &Page {
        &self.slots[page as usize]
    }
}

impl IndexMut<u32> for Pages {
    fn index_mut(&mut self, page: u32) -> &mut Page {
        &mut self.slots[page as usize]
    }
}

impl Pages {
    pub(super) fn len(&self) -> usize {
        self.by_key.len()
    }

    pub(super) fn clear(&mut self) {
        *self = Self::default();
    }

    pub(super) fn find(&self, key: &Key) -> Option<u32> {
        self.by_key.get(&key.folded).copied()
    }

    /// A page of which nothing is known. All pages have one size.
    pub(super) fn insert(&mut self, key: Key, page_size: usize) -> u32 {
        self.page_size = page_size;
        let page = match self.free.pop() {
            Some(page) => page,
            None => {
                self.slots.push(Page::new(0));
                self.tokens.resize(self.slots.len() * page_size, 0);
                self.slots.len() as u32 - 1
            }
        };
        self[page] = Page::new(key.folded);
        self.by_key.insert(key.folded, page);
        if key.hash != EngineHash::Int(key.folded) {
            self.names.insert(page, key.hash);
        }
        page
    }

    pub(super) fn name(&self, page: u32) -> EngineHash {
        self.names.get(&page).copied().unwrap_or(EngineHash::Int(self[page].key))
    }

    pub(super) fn tokens(&self, page: u32) -> &[u32] {
        &self.tokens[page as usize * self.page_size..][..self.page_size]
    }

    pub(super) fn identify(&mut self, page: u32, parent: Option<u32>, tokens: &[u32]) {
        self.tokens[page as usize * self.page_size..][..self.page_size].copy_from_slice(tokens);
        self[page].identified = true;
        let Some(parent) = parent else { return };
        let first = self[parent].first_child;
        self[page].parent = parent;
        self[page].next = first;
        self[parent].first_child = page;
        if first != NONE {
            self[first].previous = page;
        }
    }

    /// Appends the pages right after `page`.
    pub(super) fn children(&self, page: u32, out: &mut Vec<u32>) {
        let mut child = self[page].first_child;
        while child != NONE {
            out.push(child);
            child = self[child].next;
        }
    }

    /// Whether the page and all before it in its block are held in `tier`, given that this is right for the page before it.
    pub(super) fn is_through(&self, page: u32, tier: Tier) -> bool {
        let state = &self[page];
        state.copies[usize::from(tier.index())] > 0
            && state.offset.is_some_and(|offset| offset == 0 || self[state.parent].through & (1 << tier.index()) != 0)
    }

    /// Drops a page that is not held and has none after it, and then those before it of which the same is true.
    pub(super) fn forget_if_idle(&mut self, page: u32) {
        let mut page = page;
        while page != NONE && self[page].copies == [0; 3] && self[page].first_child == NONE {
            let Page { key, parent, next, previous, .. } = self[page];
            match previous {
                NONE if parent != NONE => self[parent].first_child = next,
                NONE => {}
                previous => self[previous].next = next,
            }
            if next != NONE {
                self[next].previous = previous;
            }
            self.by_key.remove(&key);
            self.names.remove(&page);
            self.extra.remove(&page);
            self.lora.remove(&page);
            self.free.push(page);
            page = parent;
        }
    }

    pub(super) fn check_invariants(&self, pages_per_block: u32) {
        assert_eq!(self.by_key.len() + self.free.len(), self.slots.len());
        let mut children = 0;
        for (&key, &page) in &self.by_key {
            let state = &self[page];
            assert_eq!(state.key, key);
            assert!(state.identified || state.parent == NONE && state.offset.is_none(), "a place knows nothing");
            assert!(state.copies != [0; 3] || state.first_child != NONE, "idle page kept");
            let expect = match state.parent {
                NONE => state.identified.then_some(0),
                parent => self[parent].offset.map(|offset| (offset + 1) % pages_per_block),
            };
            assert_eq!(state.offset, expect);
            for tier in Tier::ALL {
                assert_eq!(state.through & (1 << tier.index()) != 0, self.is_through(page, tier));
            }
            let mut below = Vec::new();
            self.children(page, &mut below);
            assert!(below.iter().all(|&child| self[child].parent == page));
            children += below.len();
        }
        assert_eq!(children, self.by_key.values().filter(|&&page| self[page].parent != NONE).count());
    }
}
