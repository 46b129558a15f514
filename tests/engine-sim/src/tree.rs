//! The radix tree of pages: prefix hits, insertion at the ends of chunks and requests, eviction of the oldest leaves.
//!
//! Mirrors SGLang's `RadixCache` with the allocator behind it, and the block tree of TensorRT-LLM's KV cache manager. A
//! node is a run of pages that were stored together; a page is known by its chained digest, so that equal digests under
//! one root are equal prefixes. **Invariant:** pure; `held` counts the pages of all nodes, `reserved` those that requests
//! compute into, and their sum never exceeds `capacity`.

mod dialect;

use crate::blocks::{MediaSpan, Sequence};
use crate::hash::Digest;
pub use dialect::{Dialect, Namespace, Run};
use std::collections::{HashMap, HashSet};

type NodeId = u64;

/// What one sequence holds of the tree; part of [`Sequence`].
#[derive(Clone, Debug, Default)]
pub struct Hold {
    /// Of all full pages known so far, with the tokens they were made from.
    digests: Vec<Digest>,
    keyed: Vec<u64>,
    /// Deepest node of the part that lies in the tree.
    node: Option<NodeId>,
    /// Pages of that part.
    shared: usize,
    /// Pages of the sequence's own behind it.
    own: usize,
}

/// What pages are made of.
struct Prompt<'a> {
    space: &'a Namespace,
    keyed: &'a [u64],
    media: &'a [MediaSpan],
    session: Option<&'a str>,
}

#[derive(Debug, Default)]
struct Node {
    parent: Option<NodeId>,
    /// By the digest of their first page.
    children: HashMap<Digest, NodeId>,
    pages: Vec<Digest>,
    /// Sequences that hold this node or one below it.
    users: usize,
    /// Time of last use.
    used: u64,
    /// Its one page is not full.
    partial: bool,
}

/// The page cache of one rank.
#[derive(Debug)]
pub struct PageTree<D: Dialect> {
    page_size: usize,
    capacity: usize,
    dialect: D,
    nodes: HashMap<NodeId, Node>,
    roots: HashMap<Namespace, NodeId>,
    next: NodeId,
    held: usize,
    reserved: usize,
    clock: u64,
    events: Vec<D::Event>,
}

impl<D: Dialect> PageTree<D> {
    /// An empty tree over `capacity` pages of `page_size` tokens; says so in an event.
    pub fn new(page_size: usize, capacity: usize, dialect: D) -> Self {
        let mut events = Vec::new();
        dialect.created(capacity, &mut events);
        Self {
            page_size: page_size.max(1),
            capacity,
            dialect,
            nodes: HashMap::new(),
            roots: HashMap::new(),
            next: 0,
            held: 0,
            reserved: 0,
            clock: 0,
            events,
        }
    }

    /// Tokens per page.
    pub fn page_size(&self) -> usize {
        self.page_size
    }

    /// Pages that requests can use.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// The family's rules.
    pub fn dialect(&self) -> &D {
        &self.dialect
    }

    /// Pages that cannot be evicted.
    pub fn in_use(&self) -> usize {
        let locked = self.nodes.values().filter(|node| node.users > 0).map(|node| node.pages.len());
        self.reserved + locked.sum::<usize>()
    }

    /// Full pages in the tree, each once, in no order.
    pub fn cached(&self) -> HashSet<Digest> {
        self.nodes.values().filter(|node| !node.partial).flat_map(|node| &node.pages).copied().collect()
    }

    /// Events since the last call.
    pub fn take_events(&mut self) -> Vec<D::Event> {
        std::mem::take(&mut self.events)
    }

    fn digest_pages(&self, space: &Namespace, keyed: &[u64], media: &[MediaSpan], digests: &mut Vec<Digest>) {
        for page in digests.len()..keyed.len() / self.page_size {
            let tokens = page * self.page_size..(page + 1) * self.page_size;
            digests.push(self.dialect.digest(space, digests.last(), &keyed[tokens.clone()], media, tokens.start));
        }
    }

    /// Brings what is known of a sequence's pages up to its tokens.
    fn look_at(&self, sequence: &mut Sequence) -> Namespace {
        let space = self.dialect.namespace(sequence.salt.as_deref(), sequence.extra_key.as_deref());
        let mut hold = std::mem::take(&mut sequence.hold);
        if hold.keyed.len() < sequence.tokens.len() {
            hold.keyed = self.dialect.keyed(&sequence.tokens, &sequence.media);
        }
        self.digest_pages(&space, &hold.keyed, &sequence.media, &mut hold.digests);
        sequence.hold = hold;
        space
    }

    /// Leading pages of `sequence` in the tree. Its last token is always computed, so an aligned prompt never hits its
    /// last page.
    pub fn hit_pages(&mut self, sequence: &mut Sequence) -> usize {
        let space = self.look_at(sequence);
        let most = sequence.tokens.len().saturating_sub(1) / self.page_size;
        self.walk(&space, &sequence.hold.digests[..most]).1
    }

    /// Gives a sequence without pages its cached prefix of `hits` pages and room for `new_tokens` more. False when there
    /// is no room even after all that could be evicted has been.
    pub fn admit(&mut self, sequence: &mut Sequence, hits: usize, new_tokens: usize) -> bool {
        debug_assert!(sequence.hold.node.is_none(), "only a sequence without pages is admitted");
        let space = self.look_at(sequence);
        let (node, hits) = self.walk(&space, &sequence.hold.digests[..hits]);
        self.lock(node);
        let needed = (hits * self.page_size + new_tokens).div_ceil(self.page_size) - hits;
        if !self.reserve(needed) {
            self.unlock(node);
            return false;
        }
        let hold = &mut sequence.hold;
        (hold.node, hold.shared, hold.own) = (Some(node), hits, needed);
        sequence.computed = hits * self.page_size;
        true
    }

    /// Makes room for `new_tokens` more. False, likewise.
    pub fn grow(&mut self, sequence: &mut Sequence, new_tokens: usize) -> bool {
        let pages = (sequence.computed + new_tokens).div_ceil(self.page_size);
        let needed = pages.saturating_sub(sequence.hold.shared + sequence.hold.own);
        if !self.reserve(needed) {
            return false;
        }
        sequence.hold.own += needed;
        true
    }

    /// Puts the computed full pages of a sequence into the tree. Pages that another request put there meanwhile are
    /// given back.
    pub fn commit(&mut self, sequence: &mut Sequence) {
        let full = sequence.computed / self.page_size;
        if full <= sequence.hold.shared {
            return;
        }
        let space = self.look_at(sequence);
        let hold = &sequence.hold;
        let prompt = Prompt {
            space: &space,
            keyed: &hold.keyed,
            media: &sequence.media,
            session: sequence.session_id.as_deref(),
        };
        let node = self.store(&prompt, &hold.digests[..full]);
        self.lock(node);
        if let Some(old) = sequence.hold.node.replace(node) {
            self.unlock(old);
        }
        let hold = &mut sequence.hold;
        let moved = full - hold.shared;
        self.reserved -= moved;
        hold.own -= moved;
        hold.shared = full;
    }

    /// Ends the sequence's use of pages. What it computed stays in the tree if `keep`.
    pub fn release(&mut self, sequence: &mut Sequence, keep: bool) {
        if sequence.hold.node.is_some() && keep {
            self.commit(sequence);
            if D::KEEPS_PARTIAL {
                self.keep_partial(sequence);
            }
        }
        let hold = &mut sequence.hold;
        self.reserved -= std::mem::take(&mut hold.own);
        hold.shared = 0;
        let node = hold.node.take();
        sequence.computed = 0;
        if let Some(node) = node {
            self.unlock(node);
        }
        debug_assert!(self.held + self.reserved <= self.capacity, "more pages in use than there are");
    }

    /// Puts the last page, which is not full, into the tree as a leaf. Nothing hits it: its digest is of fewer tokens
    /// than a full page's.
    fn keep_partial(&mut self, sequence: &mut Sequence) {
        let full = sequence.computed / self.page_size;
        let space = self.look_at(sequence);
        let hold = &sequence.hold;
        let rest = full * self.page_size..sequence.computed;
        if rest.is_empty() || full != hold.shared || hold.own == 0 {
            return;
        }
        let keyed = &hold.keyed[..rest.end];
        let mut digests = hold.digests[..full].to_vec();
        digests.push(self.dialect.digest(&space, digests.last(), &keyed[rest.clone()], &sequence.media, rest.start));
        let session = sequence.session_id.as_deref();
        let prompt = Prompt { space: &space, keyed, media: &sequence.media, session };
        let before = self.held;
        let leaf = self.store(&prompt, &digests);
        if let Some(node) = self.nodes.get_mut(&leaf) {
            node.partial = true;
        }
        // The page itself goes over; where the tree had it, the sequence's copy is freed below.
        let moved = self.held - before;
        self.reserved -= moved;
        sequence.hold.own -= moved;
    }

    /// Inserts a whole prompt that nobody holds, as a finished request does.
    pub fn insert(&mut self, keyed: &[u64], salt: Option<&str>, extra: Option<&str>, session: Option<&str>) {
        let space = self.dialect.namespace(salt, extra);
        let mut digests = Vec::new();
        self.digest_pages(&space, keyed, &[], &mut digests);
        self.store(&Prompt { space: &space, keyed, media: &[], session }, &digests);
    }

    /// Evicts the oldest unused leaves, whole ones, until `pages` pages have gone or none is left.
    pub fn evict(&mut self, pages: usize) {
        let mut gone = 0;
        while gone < pages {
            let leaves = self.nodes.iter().filter(|(_, node)| node.children.is_empty() && node.users == 0);
            let leaves = leaves.filter(|(_, node)| node.parent.is_some());
            let Some((&oldest, _)) = leaves.min_by_key(|(_, node)| node.used) else { return };
            let Some(node) = self.nodes.remove(&oldest) else { return };
            if let Some(parent) = node.parent.and_then(|parent| self.nodes.get_mut(&parent)) {
                parent.children.retain(|_, child| *child != oldest);
            }
            gone += node.pages.len();
            self.held -= node.pages.len();
            self.dialect.removed(&node.pages, &mut self.events);
        }
        self.drop_empty_roots();
    }

    /// Forgets all pages. False, and nothing changed, while requests hold some.
    pub fn reset(&mut self) -> bool {
        if self.reserved > 0 || self.nodes.values().any(|node| node.users > 0) {
            return false;
        }
        self.nodes.clear();
        self.roots.clear();
        self.held = 0;
        self.dialect.cleared(&mut self.events);
        true
    }

    fn reserve(&mut self, pages: usize) -> bool {
        let free = self.capacity - self.held - self.reserved;
        self.evict(pages.saturating_sub(free));
        let room = self.held + self.reserved + pages <= self.capacity;
        if room {
            self.reserved += pages;
        }
        room
    }

    fn store(&mut self, prompt: &Prompt<'_>, digests: &[Digest]) -> NodeId {
        let (mut at, known) = self.walk(prompt.space, digests);
        let fresh = &digests[known..];
        if fresh.is_empty() {
            return at;
        }
        for pages in fresh.chunks(D::NODE_PAGES_MAX) {
            let id = self.add(Node { parent: Some(at), pages: pages.to_vec(), ..Node::default() });
            self.touch(id);
            if let Some(parent) = self.nodes.get_mut(&at) {
                parent.children.insert(pages[0], id);
            }
            at = id;
        }
        self.held += fresh.len();
        let start = known * self.page_size;
        let end = prompt.keyed.len().min(digests.len() * self.page_size);
        let run = Run {
            digests: fresh,
            parent: known.checked_sub(1).map(|last| &digests[last]),
            tokens: &prompt.keyed[start..end],
            start,
            page_size: self.page_size,
            space: prompt.space,
            media: prompt.media,
            session: prompt.session,
        };
        self.dialect.stored(&run, &mut self.events);
        at
    }

    /// The deepest node along `digests`, and how many of them lie in the tree. A node that is left half-way is split.
    fn walk(&mut self, space: &Namespace, digests: &[Digest]) -> (NodeId, usize) {
        let mut at = match self.roots.get(space) {
            Some(root) => *root,
            None => {
                let root = self.add(Node::default());
                self.roots.insert(space.clone(), root);
                root
            }
        };
        let mut known = 0;
        while let Some(&child) = digests.get(known).and_then(|next| self.nodes[&at].children.get(next)) {
            let pages = &self.nodes[&child].pages;
            let equal = pages.iter().zip(&digests[known..]).take_while(|(a, b)| a == b).count();
            at = if equal < pages.len() { self.split(child, equal) } else { child };
            self.touch(at);
            known += equal;
        }
        (at, known)
    }

    /// Gives the first `pages` pages of a node to a new parent of it.
    fn split(&mut self, id: NodeId, pages: usize) -> NodeId {
        let upper = self.next;
        let Some(lower) = self.nodes.get_mut(&id) else { return id };
        let rest = lower.pages.split_off(pages);
        let (first, then) = (lower.pages[0], rest[0]);
        let (users, used) = (lower.users, lower.used);
        let pages = std::mem::replace(&mut lower.pages, rest);
        let parent = lower.parent.replace(upper);
        self.add(Node { parent, children: HashMap::from([(then, id)]), pages, users, used, partial: false });
        if let Some(parent) = parent.and_then(|parent| self.nodes.get_mut(&parent)) {
            parent.children.insert(first, upper);
        }
        upper
    }

    fn add(&mut self, node: Node) -> NodeId {
        let id = self.next;
        self.next += 1;
        self.nodes.insert(id, node);
        id
    }

    fn touch(&mut self, id: NodeId) {
        self.clock += 1;
        if let Some(node) = self.nodes.get_mut(&id) {
            node.used = self.clock;
        }
    }

    fn lock(&mut self, id: NodeId) {
        self.each_above(id, |node| node.users += 1);
    }

    fn unlock(&mut self, id: NodeId) {
        self.each_above(id, |node| node.users -= 1);
    }

    fn each_above(&mut self, id: NodeId, act: impl Fn(&mut Node)) {
        let mut next = Some(id);
        while let Some(node) = next.and_then(|id| self.nodes.get_mut(&id)) {
            act(node);
            next = node.parent;
        }
    }

    fn drop_empty_roots(&mut self) {
        let nodes = &mut self.nodes;
        self.roots.retain(|_, root| {
            let empty = nodes.get(root).is_none_or(|node| node.children.is_empty() && node.users == 0);
            if empty {
                nodes.remove(root);
            }
            !empty
        });
    }
}

#[cfg(test)]
mod tests;
