//! From an engine's small pages to routing blocks of several pages: events in, events out.
//!
//! SGLang's default page is one token; indexing each would cost a hash and a set entry per token. Here `pages_per_block` consecutive pages
//! of a chain become one block, counted from the chain's start and named by the engine hash of its last page. A block is held in a tier
//! exactly while all its pages are; a page that several branches share within a block counts in each of them.
//!
//! What is not known is not claimed: pages whose chain does not reach its start, pages of another size, pages beyond the limit.
//! Copies of a page are counted, as one hash may stand for the pages of several namespaces; a block has one copy or none.
//!
//! **Invariant:** no order of events panics or claims a block of which a page is missing. Memory is bounded by `max_pages`.

mod pages;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use crate::Tier;
use crate::event::{Attention, BlockExtra, KvEvent, Removed, Stored};
use pages::{Key, NONE, Pages};

/// Pages remembered unless told otherwise: a page takes about 100 bytes and its tokens.
const MAX_PAGES: usize = 1 << 23;

/// The state: every page that is held or has a place in the chain of one that is.
#[derive(Debug)]
pub struct Regroup {
    pages_per_block: u32,
    max_pages: usize,
    /// Tokens per page, as the first event says.
    page_size: Option<u32>,
    pages: Pages,
    over_limit: u64,
    /// Reused: pages to look at, pages whose chain became known, and the pages of one block.
    pending: Vec<u32>,
    located: Vec<u32>,
    block: Vec<u32>,
}

/// What the event that is being applied says of all its pages.
struct Context<'a> {
    tier: Tier,
    group: u32,
    lora: Option<&'a Arc<str>>,
    session: Option<&'a Arc<str>>,
    /// Events from here on were made by it.
    from: usize,
}

impl Regroup {
    /// `pages_per_block` of 1 (or 0) hands every event on as it is.
    pub fn new(pages_per_block: u32) -> Self {
        Self {
            pages_per_block: pages_per_block.max(1),
            max_pages: MAX_PAGES,
            page_size: None,
            pages: Pages::default(),
            over_limit: 0,
            pending: Vec::new(),
            located: Vec::new(),
            block: Vec::new(),
        }
    }

    /// With another limit: beyond it new pages are not taken.
    pub fn with_max_pages(self, max_pages: usize) -> Self {
        Self { max_pages: max_pages.min(NONE as usize - 1), ..self }
    }

    /// Takes one event and appends to `out` what it means for blocks; often nothing.
    /// O(pages in it), plus the pages of shared blocks that come or go with one of them.
    pub fn apply(&mut self, event: KvEvent, out: &mut Vec<KvEvent>) {
        if self.pages_per_block == 1 {
            return out.push(event);
        }
        match event {
            // Such a group is not indexed: all that counts is that it is there.
            KvEvent::Stored(stored) if stored.attention != Attention::Full => out.push(KvEvent::Stored(stored)),
            KvEvent::Stored(stored) => self.store(&stored, out),
            KvEvent::Removed(removed) => self.remove(&removed, out),
            KvEvent::Cleared => {
                self.pages.clear();
                out.push(KvEvent::Cleared);
            }
        }
        #[cfg(test)]
        self.check_invariants();
    }

    /// A new epoch: everything is forgotten, the page size too.
    pub fn reset(&mut self) {
        *self = Self::new(self.pages_per_block).with_max_pages(self.max_pages);
    }

    /// Pages remembered.
    pub fn known_pages(&self) -> usize {
        self.pages.len()
    }

    /// Pages not taken since the last reset because `max_pages` were remembered.
    pub fn over_limit(&self) -> u64 {
        self.over_limit
    }

    /// Recomputes what is kept up to date by steps, and panics when it differs. For tests.
    pub fn check_invariants(&self) {
        self.pages.check_invariants(self.pages_per_block);
    }

    fn store(&mut self, stored: &Stored, out: &mut Vec<KvEvent>) {
        let context = Context {
            tier: stored.tier,
            group: stored.group,
            lora: stored.lora.as_ref(),
            session: stored.session.as_ref(),
            from: out.len(),
        };
        let size = stored.block_size as usize;
        let fits = !stored.tokens.is_empty() && Some(stored.tokens.len()) == stored.hashes.len().checked_mul(size);
        if !fits || *self.page_size.get_or_insert(stored.block_size) != stored.block_size {
            // Known by hash alone, or of another size.
            for &hash in &stored.hashes {
                if let Some(page) = self.pages.find(&Key::of(hash, stored.group)) {
                    self.hold(page, &context, out);
                }
            }
            return;
        }
        let parent = match stored.parent {
            None => None,
            Some(hash) => match self.place(Key::of(hash, stored.group), size) {
                Some(page) => Some(page),
                None => return self.over_limit += stored.hashes.len() as u64,
            },
        };
        let mut before = parent;
        for (index, (&hash, tokens)) in stored.hashes.iter().zip(stored.tokens.chunks_exact(size)).enumerate() {
            let Some(page) = self.place(Key::of(hash, stored.group), size) else {
                self.over_limit += (stored.hashes.len() - index) as u64;
                break;
            };
            if !self.pages[page].identified {
                self.pages.identify(page, before, tokens);
                match stored.extra.get(index) {
                    Some(extra) if *extra != BlockExtra::default() => _ = self.pages.extra.insert(page, extra.clone()),
                    _ => {}
                }
                if let (None, Some(lora)) = (before, context.lora) {
                    self.pages.lora.insert(page, Arc::clone(lora));
                }
                self.locate(page);
            }
            self.hold(page, &context, out);
            for index in 0..self.located.len() {
                self.settle_in_all_tiers(self.located[index], &context, out);
            }
            self.located.clear();
            before = Some(page);
        }
        if let Some(page) = parent {
            // Made for a page that was not taken.
            self.pages.forget_if_idle(page);
        }
    }

    /// The page of a hash; a new one when there is room.
    fn place(&mut self, key: Key, page_size: usize) -> Option<u32> {
        let known = self.pages.find(&key);
        if known.is_none() && self.pages.len() >= self.max_pages {
            return None;
        }
        Some(known.unwrap_or_else(|| self.pages.insert(key, page_size)))
    }

    /// A page learnt what comes before it: so do all that wait behind it. Notes them in `located`, parents first.
    fn locate(&mut self, page: u32) {
        debug_assert!(self.pending.is_empty(), "left empty by whoever used it");
        self.pending.push(page);
        while let Some(page) = self.pending.pop() {
            let offset = match self.pages[page].parent {
                NONE => Some(0),
                parent => self.pages[parent].offset.map(|offset| (offset + 1) % self.pages_per_block),
            };
            if offset.is_some() && self.pages[page].identified && self.pages[page].offset.is_none() {
                self.pages[page].offset = offset;
                self.located.push(page);
                self.pages.children(page, &mut self.pending);
            }
        }
    }

    fn hold(&mut self, page: u32, context: &Context<'_>, out: &mut Vec<KvEvent>) {
        let copies = &mut self.pages[page].copies[usize::from(context.tier.index())];
        *copies = copies.saturating_add(1);
        self.settle(page, context, out);
    }

    /// Pages of which the chain was not known may be held anywhere.
    fn settle_in_all_tiers(&mut self, page: u32, context: &Context<'_>, out: &mut Vec<KvEvent>) {
        for tier in Tier::ALL {
            self.settle(page, &Context { tier, ..*context }, out);
        }
    }

    fn remove(&mut self, removed: &Removed, out: &mut Vec<KvEvent>) {
        let context = Context { tier: removed.tier, group: removed.group, lora: None, session: None, from: out.len() };
        for &hash in &removed.hashes {
            let Some(page) = self.pages.find(&Key::of(hash, removed.group)) else { continue };
            let copies = &mut self.pages[page].copies[usize::from(removed.tier.index())];
            *copies = copies.saturating_sub(1);
            self.settle(page, &context, out);
            self.pages.forget_if_idle(page);
        }
    }

    /// Brings `through` of a page and of those after it in its block up to date, and says which blocks came or went.
    fn settle(&mut self, page: u32, context: &Context<'_>, out: &mut Vec<KvEvent>) {
        debug_assert!(self.pending.is_empty(), "left empty by whoever used it");
        let bit = 1 << context.tier.index();
        self.pending.push(page);
        while let Some(page) = self.pending.pop() {
            let through = self.pages.is_through(page, context.tier);
            let state = &mut self.pages[page];
            if (state.through & bit != 0) == through {
                continue;
            }
            state.through ^= bit;
            if state.offset.is_some_and(|offset| offset + 1 < self.pages_per_block) {
                self.pages.children(page, &mut self.pending);
            } else if through {
                self.announce(page, context, out);
            } else {
                withdraw(self.pages.name(page), context, out);
            }
        }
    }

    /// Appends the block that ends with `last` to the event before it when it goes on there, else as an event of its own.
    fn announce(&mut self, last: u32, context: &Context<'_>, out: &mut Vec<KvEvent>) {
        self.block.clear();
        let mut page = last;
        for _ in 1..self.pages_per_block {
            self.block.push(page);
            page = self.pages[page].parent;
        }
        self.block.push(page);
        let parent = match self.pages[page].parent {
            NONE => None,
            parent => Some(self.pages.name(parent)),
        };
        let lora = if parent.is_none() { self.pages.lora.get(&page) } else { context.lora };
        let made = out.len() > context.from;
        let goes_on = |event: &&mut KvEvent| match event {
            KvEvent::Stored(stored) => {
                made && parent.is_some()
                    && stored.hashes.last().copied() == parent
                    && stored.tier == context.tier
                    && stored.lora.as_ref() == lora
            }
            _ => false,
        };
        if out.last_mut().filter(goes_on).is_none() {
            out.push(KvEvent::Stored(Stored {
                hashes: Vec::new(),
                parent,
                tokens: Vec::new(),
                block_size: self.page_size.unwrap_or(0).saturating_mul(self.pages_per_block),
                tier: context.tier,
                lora: lora.cloned(),
                extra: Vec::new(),
                group: context.group,
                attention: Attention::Full,
                session: context.session.cloned(),
            }));
        }
        let Some(KvEvent::Stored(stored)) = out.last_mut() else { return };
        stored.hashes.push(self.pages.name(last));
        let mut extra = BlockExtra::default();
        for (index, &page) in self.block.iter().rev().enumerate() {
            stored.tokens.extend_from_slice(self.pages.tokens(page));
            if let Some(own) = self.pages.extra.get(&page) {
                merge(&mut extra, own, (index as u32).saturating_mul(self.page_size.unwrap_or(0)));
            }
        }
        if extra != BlockExtra::default() || !stored.extra.is_empty() {
            stored.extra.resize(stored.hashes.len() - 1, BlockExtra::default());
            stored.extra.push(extra);
        }
    }
}

/// Adds what a page `start` tokens into the block is keyed by.
fn merge(block: &mut BlockExtra, page: &BlockExtra, start: u32) {
    block.opaque |= page.opaque;
    if block.salt.is_none() {
        block.salt.clone_from(&page.salt);
    }
    for &(id, offset) in &page.media {
        // The same span shows in every page that it lies over.
        let media = (id, offset.saturating_add_unsigned(start));
        if !block.media.contains(&media) {
            block.media.push(media);
        }
    }
}

fn withdraw(hash: crate::EngineHash, context: &Context<'_>, out: &mut Vec<KvEvent>) {
    if out.len() > context.from
        && let Some(KvEvent::Removed(removed)) = out.last_mut()
    {
        return removed.hashes.push(hash);
    }
    out.push(KvEvent::Removed(Removed { hashes: vec![hash], tier: context.tier, group: context.group }));
}
