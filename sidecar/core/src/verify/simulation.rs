//! Random requests through a model engine: blocks in an LRU of leaves, stores in pieces, several requests at a time, events that come late.
//! Some predictions are wrong in one token, one identity or one count.

use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};

use fovea_kv::EngineHash;

use super::model::{Prompt, apply, key, value};
use super::*;

const SEEDS: u64 = 270;
const STEPS: usize = 600;
const STEP: Duration = Duration::from_millis(10);
/// Steps after which an event has come: less than the grace.
const LATE_MAX: usize = 20;
const KEYS: u8 = 8;

/// Xorshift64*; names its seed when the test fails.
struct Random {
    seed: u64,
    state: u64,
}

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        self.state ^= self.state >> 12;
        self.state ^= self.state << 25;
        self.state ^= self.state >> 27;
        (self.state.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % bound
    }

    fn token(&mut self, bound: usize) -> u32 {
        u32::try_from(self.below(bound)).unwrap()
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

/// What a run mixes.
#[derive(Clone, Copy, Debug)]
struct Mode {
    shown: Shown,
    sessions: bool,
    /// Several requests have one session, as the turns of a conversation.
    shared: bool,
    /// Predictions without an identity, to be learnt.
    open: bool,
    /// Wrong predictions share their text with others. Without sessions such a request and an open one cannot be told apart.
    mixed: bool,
}

impl Mode {
    fn of(seed: u64) -> Self {
        let shown = if seed.is_multiple_of(2) { Shown::Spans } else { Shown::Pads };
        let (sessions, open, shared) = (seed.is_multiple_of(3), seed % 3 != 1, seed.is_multiple_of(9));
        Self { shown, sessions, shared, open, mixed: (sessions && !shared) || !open }
    }
}

fn identity(key: u8) -> u8 {
    key + 100
}

fn count(key: u8) -> u32 {
    3 + u32::from(key) * 2
}

struct Request {
    id: FlightId,
    session: Option<String>,
    /// Prompt and answer.
    truth: Prompt,
    prompt_tokens: u32,
    chain: Vec<SequenceHash>,
    /// Blocks that are there for it, and pinned.
    done: usize,
    failed: bool,
}

/// What is known of a prediction beforehand.
#[derive(Clone, Copy, Debug)]
struct Predicted {
    /// Its full blocks are the first of the truth.
    right: bool,
    right_length: bool,
    failed: bool,
}

/// A cached block.
struct Cached {
    parent: Option<SequenceHash>,
    children: usize,
    pins: usize,
    used: usize,
}

enum Event {
    Stored(Stored),
    Removed(SequenceHash),
}

struct World {
    random: Random,
    mode: Mode,
    verifier: Verifier,
    start: Instant,
    step: usize,
    running: Vec<Request>,
    cache: HashMap<SequenceHash, Cached>,
    capacity: usize,
    uses: usize,
    /// On their way, by the step at which they come.
    events: VecDeque<(usize, Event)>,
    /// What the events so far say is held.
    held: HashSet<SequenceHash>,
    predicted: BTreeMap<FlightId, Predicted>,
    next_id: u64,
    fresh: u32,
    found: BTreeMap<&'static str, usize>,
}

impl World {
    fn new(seed: u64) -> Self {
        let mut random = Random { seed, state: seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1 };
        let few = random.one_in(4);
        let (flights_max, facts_max) = if few { (4, 3) } else { (64, 64) };
        let config = Config { flights_max, facts_max, divergences_max: 5, ..Config::default() };
        Self {
            mode: Mode::of(seed),
            verifier: Verifier::new(config),
            start: Instant::now(),
            step: 0,
            running: Vec::new(),
            cache: HashMap::new(),
            capacity: 20 + random.below(100),
            uses: 0,
            events: VecDeque::new(),
            held: HashSet::new(),
            predicted: BTreeMap::new(),
            next_id: 0,
            fresh: 10_000,
            found: BTreeMap::new(),
            random,
        }
    }

    fn now(&self) -> Instant {
        self.start + STEP * u32::try_from(self.step).unwrap()
    }

    fn fresh(&mut self) -> u32 {
        self.fresh += 1;
        self.fresh
    }

    /// Prompts share beginnings often: few texts, few images.
    fn prompt(&mut self, alone: bool) -> Prompt {
        let mut prompt = Prompt::default();
        if alone {
            prompt.tokens.push(self.fresh());
        }
        for _ in 0..1 + self.random.below(4) {
            let text = self.random.token(3);
            let length = [1, 2, 3, 6, 8][self.random.below(5)];
            prompt.tokens.extend((0..length).map(|at| text * 10 + at));
            if self.random.one_in(2) {
                let key = u8::try_from(self.random.below(usize::from(KEYS))).unwrap();
                prompt.push(key, Some(identity(key)), count(key));
            }
        }
        prompt
    }

    /// The truth as a balancer may see it, made wrong in one thing when `wrong`.
    fn prediction(&mut self, truth: &Prompt, wrong: bool) -> Prompt {
        let mut seen = truth.clone();
        if self.mode.open {
            for image in &mut seen.images {
                image.id = image.id.filter(|_| self.random.one_in(2));
            }
        }
        if !wrong {
            return seen;
        }
        let image = (!seen.images.is_empty()).then(|| self.random.below(seen.images.len()));
        match (self.random.below(3), image) {
            (1, Some(image)) => {
                let name = u8::try_from(150 + self.random.below(100)).unwrap();
                seen.images[image].id = Some(name);
            }
            (2, Some(index)) => {
                let image = seen.images[index];
                let longer = self.random.one_in(2);
                let at = image.start as usize;
                if longer {
                    seen.tokens.insert(at, seen.tokens[at]);
                } else {
                    seen.tokens.remove(at);
                }
                let moved = |value: u32| if longer { value + 1 } else { value - 1 };
                seen.images[index].len = moved(image.len);
                seen.images[index + 1..].iter_mut().for_each(|image| image.start = moved(image.start));
            }
            _ => {
                let is_text = |&at: &usize| {
                    let at = u32::try_from(at).unwrap();
                    truth.images.iter().all(|image| !(image.start..image.start + image.len).contains(&at))
                };
                let places: Vec<_> = (0..seen.tokens.len()).filter(is_text).collect();
                let place = places[self.random.below(places.len())];
                seen.tokens[place] = self.fresh();
            }
        }
        seen
    }

    fn begin(&mut self) {
        self.next_id += 1;
        let id = FlightId(self.next_id);
        let wrong = self.random.one_in(5);
        let mut truth = self.prompt(wrong && !self.mode.mixed);
        let (prompt_tokens, shown) = (truth.len(), self.mode.shown);
        let seen = self.prediction(&truth, wrong);
        let mut whole = seen.clone();
        whole.images.iter_mut().for_each(|image| image.id = image.id.or(Some(identity(image.key))));
        let failed = self.random.one_in(15);
        let right = truth.chain(shown).starts_with(&whole.chain(shown));
        let name = if self.mode.shared { id.0 % 4 } else { id.0 };
        let mut session = self.mode.sessions.then(|| format!("s{name}"));
        let followed = self.verifier.flights.len() < self.verifier.config.flights_max;
        if self.random.one_in(12) {
            self.verifier.begin_blind(id);
            session = None;
        } else {
            self.verifier.begin(id, seen.expected(shown, session.as_deref()), self.now());
            if followed {
                let right_length = seen.len() == prompt_tokens;
                self.predicted.insert(id, Predicted { right, right_length, failed });
            }
        }
        let prompt_blocks = truth.chain(shown).len();
        (0..self.random.below(9)).for_each(|_| truth.tokens.push(7000 + self.random.token(3)));
        let chain = truth.chain(shown);
        let done = chain[..prompt_blocks].iter().take_while(|hash| self.cache.contains_key(hash)).count();
        self.pin(&chain[..done]);
        self.running.push(Request { id, session, truth, prompt_tokens, chain, done, failed });
    }

    fn pin(&mut self, blocks: &[SequenceHash]) {
        for hash in blocks {
            let block = self.cache.get_mut(hash).unwrap();
            self.uses += 1;
            (block.pins, block.used) = (block.pins + 1, self.uses);
        }
    }

    fn tell(&mut self, event: Event) {
        let due = self.step + self.random.below(LATE_MAX);
        let due = self.events.back().map_or(due, |(before, _)| due.max(*before));
        self.events.push_back((due, event));
    }

    /// One engine step of one request: some blocks more, or its end.
    fn work(&mut self) {
        let index = self.random.below(self.running.len());
        let mut request = self.running.swap_remove(index);
        if request.done == request.chain.len() || (request.failed && self.random.one_in(2)) {
            return self.end(&request);
        }
        let next = (request.done + 1 + self.random.below(3)).min(request.chain.len());
        let new = (request.done..next).find(|&block| !self.cache.contains_key(&request.chain[block])).unwrap_or(next);
        for block in new..next {
            let parent = block.checked_sub(1).map(|parent| request.chain[parent]);
            if let Some(parent) = parent {
                self.cache.get_mut(&parent).unwrap().children += 1;
            }
            self.cache.insert(request.chain[block], Cached { parent, children: 0, pins: 0, used: 0 });
        }
        if new < next {
            let stored = request.truth.stored(self.mode.shown, new..next, request.session.as_deref());
            self.tell(Event::Stored(stored));
        }
        self.pin(&request.chain[request.done..next]);
        request.done = next;
        self.evict();
        self.running.push(request);
    }

    /// Leaves that no request needs go, least recently used first.
    fn evict(&mut self) {
        while self.cache.len() > self.capacity {
            let idle = self.cache.iter().filter(|(_, block)| block.children == 0 && block.pins == 0);
            let Some(hash) = idle.min_by_key(|(_, block)| block.used).map(|(&hash, _)| hash) else { return };
            let parent = self.cache.remove(&hash).and_then(|block| block.parent);
            if let Some(parent) = parent {
                self.cache.get_mut(&parent).unwrap().children -= 1;
            }
            self.tell(Event::Removed(hash));
        }
    }

    fn end(&mut self, request: &Request) {
        for hash in &request.chain[..request.done] {
            self.cache.get_mut(hash).unwrap().pins -= 1;
        }
        let prompt_tokens = self.random.one_in(2).then_some(request.prompt_tokens);
        let outcome = Outcome { prompt_tokens, cached_tokens: None, failed: request.failed };
        self.verifier.finished(request.id, outcome, self.now());
    }

    fn deliver(&mut self) {
        while self.events.front().is_some_and(|(due, _)| *due <= self.step) {
            match self.events.pop_front().unwrap().1 {
                Event::Stored(stored) => {
                    self.held.extend(stored.hashes.iter().map(|hash| match hash {
                        EngineHash::Int(hash) => SequenceHash(*hash),
                        EngineHash::Digest { .. } => panic!("not made here"),
                    }));
                    apply(&mut self.verifier, &stored);
                }
                Event::Removed(hash) => {
                    self.verifier.removed(&[Some(hash)]);
                    self.held.remove(&hash);
                }
            }
        }
    }

    fn check(&mut self) {
        let now = self.now();
        for Verdict { flight, found, .. } in self.verifier.settle(|hash| self.held.contains(&hash), now) {
            let predicted = self.predicted.remove(&flight).unwrap();
            *self.found.entry(found.label()).or_default() += 1;
            match found {
                Found::Exact => assert!(predicted.right, "{flight:?} is wrong"),
                Found::Short { .. } => assert!(!predicted.right, "{flight:?} is right: {found:?}"),
                Found::Diverged { .. } => {
                    assert!(!(predicted.right && predicted.right_length), "{flight:?} is right: {found:?}")
                }
                _ => {}
            }
            assert!(!predicted.failed || found == Found::Unchecked(Reason::Failed), "{flight:?}: {found:?}");
        }
        self.verifier.check_invariants();
        for name in 0..KEYS {
            if let Some((tokens, learnt)) = self.verifier.learnt(&key(name)) {
                assert_eq!(learnt, value(self.mode.shown, identity(name)), "key {name}");
                assert!([0, count(name)].contains(&tokens), "key {name} fills {tokens}");
            }
        }
    }

    fn run(mut self) -> (Mode, BTreeMap<&'static str, usize>, Counters) {
        for step in 0..STEPS + 200 {
            self.step = step;
            if step < STEPS && self.running.len() < 6 && self.random.one_in(3) {
                self.begin();
            }
            for _ in 0..3 {
                if !self.running.is_empty() {
                    self.work();
                }
            }
            self.deliver();
            self.check();
        }
        assert!(self.predicted.is_empty() && !self.verifier.is_interested(), "every request gets its verdict");
        (self.mode, self.found, self.verifier.counters())
    }
}

#[test]
fn verdicts_and_facts_are_true_whatever_happens() {
    let mut found = BTreeMap::<_, BTreeMap<_, usize>>::new();
    for seed in 0..SEEDS {
        let (mode, verdicts, counters) = World::new(seed).run();
        let of_mode = found.entry(format!("{mode:?}")).or_default();
        for (label, count) in verdicts {
            *of_mode.entry(label).or_default() += count;
        }
        *of_mode.entry("learnt").or_default() += usize::try_from(counters.learnt).unwrap();
    }
    for (mode, found) in found {
        let labels = ["exact", "diverged_text", "diverged_media_identity", "diverged_media_count"];
        assert!(labels.iter().all(|label| found.get(label).is_some_and(|&count| count > 0)), "{mode:?}: {found:?}");
        assert!(found["learnt"] > 0, "{mode:?}: {found:?}");
    }
}
