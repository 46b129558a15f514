//! Random stores, removals and clears in any order against a brute-force model that knows only the definition of a block.

use std::collections::HashMap;

use super::*;
use crate::EngineHash;

const PAGES: usize = 20;
const STEPS: usize = 300;
const SEEDS: u64 = 600;
const PAGE_SIZE: u32 = 2;

/// Xorshift64*; names its seed when the test fails.
struct Random {
    seed: u64,
    state: u64,
}

impl Random {
    fn new(seed: u64) -> Self {
        Self { seed, state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1 }
    }

    fn below(&mut self, bound: usize) -> usize {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        (self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % bound
    }

    fn one_in(&mut self, bound: usize) -> bool {
        self.below(bound) == 0
    }
}

impl Drop for Random {
    fn drop(&mut self) {
        if std::thread::panicking() {
            eprintln!("simulation seed: {}", self.seed);
        }
    }
}

/// What a block is, as an event shows it: tokens, block before it, salt, adapter, media.
type Content = (Vec<u32>, Option<EngineHash>, BlockExtra, Option<Arc<str>>);

/// The pages that an engine might have. Parents are arbitrary in some seeds: chains that bite their tail.
struct Model {
    parents: Vec<Option<usize>>,
    lora: Vec<Option<Arc<str>>>,
    extra: Vec<BlockExtra>,
    copies: Vec<[u32; 3]>,
    identified: Vec<bool>,
    pages_per_block: usize,
}

impl Model {
    fn new(random: &mut Random) -> Self {
        let loops = random.one_in(5);
        let parent = |index: usize, random: &mut Random| match random.below(if loops { PAGES } else { index + 1 }) {
            0 => None,
            parent if loops => Some(parent),
            // Mostly long chains.
            _ if !random.one_in(3) => Some(index - 1),
            parent => Some(parent - 1),
        };
        let parents: Vec<_> = (0..PAGES).map(|index| parent(index, random)).collect();
        let lora = |parent: &Option<usize>| parent.is_none().then(|| random.one_in(3).then(|| "l".into())).flatten();
        let lora = parents.iter().map(lora).collect();
        let extra = |parent: &Option<usize>| BlockExtra {
            salt: (parent.is_none() && random.one_in(3)).then(|| "s".into()),
            opaque: random.one_in(8),
            ..BlockExtra::default()
        };
        let extra = parents.iter().map(extra).collect();
        let pages_per_block = 2 + random.below(3);
        Self { lora, extra, copies: vec![[0; 3]; PAGES], identified: vec![false; PAGES], parents, pages_per_block }
    }

    fn hash(page: usize) -> EngineHash {
        if page % 5 == 4 {
            EngineHash::Digest { bytes: [page as u8; 32], len: 32 }
        } else {
            EngineHash::Int(page as u64)
        }
    }

    fn tokens(page: usize) -> [u32; PAGE_SIZE as usize] {
        [2 * page as u32, 2 * page as u32 + 1]
    }

    /// From the start of its chain to `page`; `None` when that is not known.
    fn chain(&self, page: usize) -> Option<Vec<usize>> {
        let (mut chain, mut at) = (vec![page], page);
        while let (true, Some(parent)) = (self.identified[at], self.parents[at]) {
            if chain.len() > PAGES {
                return None;
            }
            chain.push(parent);
            at = parent;
        }
        chain.reverse();
        self.identified[at].then_some(chain)
    }

    /// Remembered: held, or before one that is remembered.
    fn exists(&self) -> Vec<bool> {
        let mut exists: Vec<_> = self.copies.iter().map(|copies| *copies != [0; 3]).collect();
        for _ in 0..PAGES {
            for page in 0..PAGES {
                if let (true, true, Some(parent)) = (exists[page], self.identified[page], self.parents[page]) {
                    exists[parent] = true;
                }
            }
        }
        exists
    }

    fn forget(&mut self) {
        let exists = self.exists();
        self.identified.iter_mut().zip(exists).for_each(|(identified, exists)| *identified &= exists);
    }

    fn claims(&self) -> HashMap<(Tier, EngineHash), Content> {
        let mut claims = HashMap::new();
        for (page, tier) in (0..PAGES).flat_map(|page| Tier::ALL.map(|tier| (page, tier))) {
            let Some(chain) = self.chain(page) else { continue };
            let pages = &chain[chain.len().saturating_sub(self.pages_per_block)..];
            let held = |&page: &usize| self.copies[page][usize::from(tier.index())] > 0;
            if chain.len().is_multiple_of(self.pages_per_block) && pages.iter().all(held) {
                let parent = chain.len().checked_sub(self.pages_per_block + 1).map(|before| Self::hash(chain[before]));
                let mut extra = BlockExtra { salt: self.extra[pages[0]].salt.clone(), ..BlockExtra::default() };
                extra.opaque = pages.iter().any(|&page| self.extra[page].opaque);
                let lora = if parent.is_none() { self.lora[pages[0]].clone() } else { None };
                let tokens = pages.iter().flat_map(|&page| Self::tokens(page)).collect();
                claims.insert((tier, Self::hash(page)), (tokens, parent, extra, lora));
            }
        }
        claims
    }

    /// A store of `last` and some pages before it.
    fn event(&self, last: usize, tier: Tier, random: &mut Random) -> (Vec<usize>, Stored) {
        let mut chain = vec![last];
        let mut parent = self.parents[last];
        while let Some(above) = parent.filter(|_| chain.len() < PAGES && !random.one_in(3)) {
            chain.push(above);
            parent = self.parents[above];
        }
        chain.reverse();
        let stored = Stored {
            hashes: chain.iter().map(|&page| Self::hash(page)).collect(),
            parent: parent.map(Self::hash),
            tokens: chain.iter().flat_map(|&page| Self::tokens(page)).collect(),
            block_size: PAGE_SIZE,
            tier,
            lora: self.lora[chain[0]].clone(),
            extra: chain.iter().map(|&page| self.extra[page].clone()).collect(),
            group: 0,
            attention: Attention::Full,
            session: random.one_in(2).then(|| random.below(9).to_string().into()),
        };
        (chain, stored)
    }
}

/// One random event, applied to both. What the regrouped events add up to goes on in `held`.
fn step(
    model: &mut Model,
    regroup: &mut Regroup,
    held: &mut HashMap<(Tier, EngineHash), Content>,
    random: &mut Random,
) {
    let page = random.below(PAGES);
    let tier = Tier::ALL[[0, 0, 0, 1, 1, 2][random.below(6)]];
    let event = match random.below(20) {
        0..9 => {
            let (chain, stored) = model.event(page, tier, random);
            for page in chain {
                model.identified[page] = true;
                model.copies[page][usize::from(tier.index())] += 1;
            }
            KvEvent::Stored(stored)
        }
        9..11 => {
            let (_, stored) = model.event(page, tier, random);
            if model.exists()[page] {
                model.copies[page][usize::from(tier.index())] += 1;
            }
            KvEvent::Stored(Stored { hashes: vec![Model::hash(page)], tokens: Vec::new(), ..stored })
        }
        19 if random.one_in(8) => {
            model.copies.fill([0; 3]);
            KvEvent::Cleared
        }
        _ => {
            let pages: Vec<_> = (0..1 + random.below(3)).map(|_| random.below(PAGES)).collect();
            for &page in &pages {
                let copies = &mut model.copies[page][usize::from(tier.index())];
                *copies = copies.saturating_sub(1);
            }
            KvEvent::Removed(Removed { hashes: pages.into_iter().map(Model::hash).collect(), tier, group: 0 })
        }
    };
    model.forget();
    let session = if let KvEvent::Stored(stored) = &event { stored.session.clone() } else { None };
    let mut out = Vec::new();
    regroup.apply(event, &mut out);
    out.into_iter().for_each(|event| take(event, session.as_ref(), held));
}

/// Applies a regrouped event; a block comes only when it is not there and goes only when it is.
fn take(event: KvEvent, session: Option<&Arc<str>>, held: &mut HashMap<(Tier, EngineHash), Content>) {
    match event {
        KvEvent::Stored(stored) => {
            assert_eq!(stored.session.as_ref(), session);
            assert!(stored.extra.is_empty() || stored.extra.len() == stored.hashes.len());
            let mut parent = stored.parent;
            let blocks = stored.hashes.iter().zip(stored.tokens.chunks_exact(stored.block_size as usize));
            for (index, (&hash, tokens)) in blocks.enumerate() {
                let lora = if parent.is_none() { stored.lora.clone() } else { None };
                let extra = stored.extra.get(index).cloned().unwrap_or_default();
                let before = held.insert((stored.tier, hash), (tokens.to_vec(), parent, extra, lora));
                assert_eq!(before, None, "stored twice");
                parent = Some(hash);
            }
        }
        KvEvent::Removed(removed) => {
            for hash in removed.hashes {
                assert!(held.remove(&(removed.tier, hash)).is_some(), "removed without being there");
            }
        }
        KvEvent::Cleared => held.clear(),
    }
}

#[test]
fn blocks_are_claimed_exactly_while_all_their_pages_are_held() {
    let mut most = 0;
    for seed in 0..SEEDS {
        let mut random = Random::new(seed);
        let mut model = Model::new(&mut random);
        let mut regroup = Regroup::new(model.pages_per_block as u32);
        let mut held = HashMap::new();
        for _ in 0..STEPS {
            step(&mut model, &mut regroup, &mut held, &mut random);
            assert_eq!(held, model.claims());
            most = most.max(held.len());
        }
    }
    assert!(most > 10, "no more than {most} blocks at a time");
}

#[test]
fn at_the_limit_less_is_claimed_and_never_more() {
    let mut over = 0;
    for seed in 0..SEEDS {
        let mut random = Random::new(seed);
        let mut model = Model::new(&mut random);
        let mut regroup = Regroup::new(model.pages_per_block as u32).with_max_pages(8);
        let mut held = HashMap::new();
        for _ in 0..STEPS {
            step(&mut model, &mut regroup, &mut held, &mut random);
            let claims = model.claims();
            assert!(held.iter().all(|(block, content)| claims.get(block) == Some(content)));
            assert!(regroup.known_pages() <= 8);
        }
        over += regroup.over_limit();
    }
    assert!(over > 0);
}
