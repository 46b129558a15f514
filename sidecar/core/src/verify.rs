//! The closed loop of one engine rank: what was predicted of each request, against the blocks that the engine then stores.
//!
//! Out of it come verdicts, facts about media items that only the engine knows (SGLang's pads, TensorRT-LLM's digests, token counts), and
//! whether predictions of media may still be believed.
//!
//! **Invariants:** an event costs O(its blocks + requests that expect its parent); memory is bounded by [`Config`]. A divergence is claimed
//! only when a block that must be the request's own contradicts it *and* the predicted block never came. What is learnt was seen in a
//! block that is sure to be the request's, or of which all requests that may have caused it say the same.

mod facts;
mod flight;
#[cfg(test)]
mod model;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
mod verdict;

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant};

use fovea_gossip::message::{Learnt, LearntValue};
use fovea_gossip::preamble::Slot;
use fovea_kv::event::{Attention, Stored};
use fovea_kv::{BlockHasher, BlockSize, MediaKey, RoutingView, SequenceHash, root};
use serde::Serialize;

pub use facts::Counters;
pub use verdict::{Cause, Divergence, Found, Media, Reason, ShortCause, Verdict};

use facts::Facts;
use flight::{Flight, Proof, Walk};
use verdict::Trust;

/// Media items of one request that is followed: the work on a block grows with their number.
const ITEMS_MAX: usize = 4096;

/// One request on its way through the engine; never used twice by one caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
pub struct FlightId(pub u64);

/// How an engine's events show media.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shown {
    /// Placeholder tokens, and the identity beside them (vLLM, TensorRT-LLM).
    Spans,
    /// Tokens made from the identity in place of placeholders (SGLang).
    Pads,
    /// As pads, but hashed in pairs, of which no identity can be read (SGLang with EAGLE): nothing is learnt.
    Pairs,
}

/// What was predicted of a request.
#[derive(Clone, Debug)]
pub struct Expected {
    /// Canonical tokens; spans where identities are believed. Of pairs where the engine hashes pairs.
    pub view: RoutingView,
    pub slots: Vec<Slot>,
    /// Hash from which the chain starts.
    pub root: SequenceHash,
    pub block_size: BlockSize,
    /// The prediction reaches to the end of the prompt.
    pub exact: bool,
    pub prompt_tokens: u32,
    pub reused_tokens: u32,
    /// Name that the engine is to echo in the request's events.
    pub session: Option<Arc<str>>,
    pub shown: Shown,
}

/// What the engine said of a request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    pub prompt_tokens: Option<u32>,
    pub cached_tokens: Option<u32>,
    /// Anything but an answer that ended as it should.
    pub failed: bool,
}

#[derive(Clone, Copy, Debug)]
pub struct Config {
    /// Requests followed at a time.
    pub flights_max: usize,
    /// Memory of these, in bytes, about.
    pub bytes_max: usize,
    /// Media items remembered, about 200 bytes each.
    pub facts_max: usize,
    /// Divergences kept for people.
    pub divergences_max: usize,
    /// From the end of a request until its missing blocks count as missing.
    pub grace: Duration,
}

impl Default for Config {
    fn default() -> Self {
        let grace = Duration::from_millis(500);
        Self { flights_max: 4096, bytes_max: 64 << 20, facts_max: 64 << 10, divergences_max: 64, grace }
    }
}

/// Flights at one hash: the flight, and which block of it comes next.
type Places = HashMap<SequenceHash, Vec<(FlightId, u32)>>;

#[derive(Debug)]
struct Blind {
    session: Option<Arc<str>>,
    over: Option<Instant>,
}

#[derive(Debug)]
pub struct Verifier {
    config: Config,
    flights: HashMap<FlightId, Flight>,
    bytes: usize,
    places: Places,
    sessions: HashMap<Arc<str>, Vec<FlightId>>,
    /// Requests without a prediction: while there is one, a block without a session may be its.
    blind: HashMap<FlightId, Blind>,
    facts: Facts,
    trust: Trust,
    settled: Vec<Verdict>,
    divergences: VecDeque<Divergence>,
    hasher: BlockHasher,
}

impl Verifier {
    pub fn new(config: Config) -> Self {
        Self {
            config,
            flights: HashMap::new(),
            bytes: 0,
            places: HashMap::new(),
            sessions: HashMap::new(),
            blind: HashMap::new(),
            facts: Facts::new(config.facts_max),
            trust: Trust::default(),
            settled: Vec::new(),
            divergences: VecDeque::new(),
            hasher: BlockHasher::default(),
        }
    }

    /// A predicted request goes to the engine. One that is over a limit counts as [`Self::begin_blind`].
    pub fn begin(&mut self, id: FlightId, expected: Expected, _now: Instant) {
        debug_assert!(!self.flights.contains_key(&id), "an id is used once");
        let bytes = Flight::bytes(&expected);
        let full = self.flights.len() >= self.config.flights_max || self.bytes + bytes > self.config.bytes_max;
        let too_many = expected.slots.len() + expected.view.spans().len() > ITEMS_MAX;
        if full || too_many || self.flights.contains_key(&id) {
            self.facts.counters.over_limit += 1;
            self.blind.insert(id, Blind { session: expected.session, over: None });
            return;
        }
        let mut flight = Flight::new(id, expected);
        let was_open = flight.is_open();
        flight.resolve(&mut self.facts);
        flight.watched = flight.extend(&mut self.hasher);
        // A view that is not exact because of media alone is, once they are known.
        flight.predicted = !flight.is_open() && (flight.exact || was_open);
        self.bytes += flight.bytes;
        self.places.entry(flight.root).or_default().push((id, 0));
        place(&mut self.places, &flight, 0);
        if let Some(session) = &flight.session {
            self.sessions.entry(Arc::clone(session)).or_default().push(id);
        }
        self.flights.insert(id, flight);
    }

    /// A request of which nothing is predicted goes to the engine: until it is [`Self::finished`], blocks without a session teach nothing.
    /// Its blocks must not carry the session of a predicted request. As many are remembered as the caller has on their way.
    pub fn begin_blind(&mut self, id: FlightId) {
        self.blind.insert(id, Blind { session: None, over: None });
    }

    /// The answer is over. An unknown id is ignored.
    pub fn finished(&mut self, id: FlightId, outcome: Outcome, now: Instant) {
        if let Some(flight) = self.flights.get_mut(&id) {
            flight.over.get_or_insert((now, outcome));
        } else if let Some(blind) = self.blind.get_mut(&id) {
            blind.over = Some(now);
        }
    }

    /// Whether events make any difference at this moment.
    pub fn is_interested(&self) -> bool {
        !self.flights.is_empty()
    }

    /// Blocks were stored. `parent` and `hashes` are our names for the engine's: `None` where there is none, or for a root store.
    pub fn stored(&mut self, stored: &Stored, parent: Option<SequenceHash>, hashes: &[Option<SequenceHash>]) {
        hashes.iter().flatten().for_each(|&hash| self.came(hash));
        if self.flights.is_empty() || stored.tokens.is_empty() || stored.attention != Attention::Full {
            return;
        }
        let parent = match (stored.parent, parent) {
            (None, _) => {
                let salt = stored.extra.first().and_then(|extra| extra.salt.as_deref());
                root(stored.lora.as_deref().unwrap_or(""), salt.unwrap_or(""))
            }
            (Some(_), Some(parent)) => parent,
            (Some(_), None) => return self.facts.counters.unknown_parent += 1,
        };
        let (candidates, sure) = self.candidates(parent, stored);
        let mut walks = Vec::with_capacity(candidates.len());
        for (id, first) in candidates {
            let flight = &self.flights[&id];
            if u64::from(stored.block_size) * hashes.len() as u64 == stored.tokens.len() as u64
                && stored.block_size == flight.size
            {
                walks.push((id, first, flight.walk(first, stored, hashes)));
            }
        }
        let fitting: Vec<_> = walks.iter().filter(|(_, _, walk)| walk.fits).copied().collect();
        if fitting.is_empty() {
            self.contradict(&walks, stored, sure);
        } else if sure || self.blind.is_empty() {
            self.learn(&fitting, stored, hashes);
        }
    }

    /// A block was stored or is removed: it was held while those flights were on their way that expect it.
    fn came(&mut self, hash: SequenceHash) {
        for (id, next) in self.places.get(&hash).into_iter().flatten() {
            if let Some(flight) = self.flights.get_mut(id)
                && let Some(came) = next.checked_sub(1).and_then(|block| flight.came.get_mut(block as usize))
            {
                *came = true;
            }
        }
    }

    /// Blocks are removed; their names are asked for *before* the removal is applied.
    pub fn removed(&mut self, hashes: &[Option<SequenceHash>]) {
        hashes.iter().flatten().for_each(|&hash| self.came(hash));
    }

    /// The engine's cache is empty.
    pub fn cleared(&mut self) {
        self.flights.values_mut().for_each(|flight| flight.cleared = true);
    }

    /// Flights that may have caused an event, and whether there is no other.
    fn candidates(&mut self, parent: SequenceHash, stored: &Stored) -> (Vec<(FlightId, u32)>, bool) {
        let at_parent = self.places.get(&parent).map_or(&[][..], Vec::as_slice);
        let named = stored.session.as_ref().and_then(|session| self.sessions.get(session));
        let Some(named) = named else {
            // A named event is of no flight with another name.
            let may = |(id, _): &&(FlightId, u32)| stored.session.is_none() || self.flights[id].session.is_none();
            return (at_parent.iter().filter(may).copied().collect(), false);
        };
        let sure = named.len() == 1 && self.blind.values().all(|blind| blind.session != stored.session);
        let here: Vec<_> = at_parent.iter().filter(|(id, _)| named.contains(id)).copied().collect();
        if let ([id], true) = (named.as_slice(), sure && here.is_empty())
            && let Some(flight) = self.flights.get_mut(id)
        {
            flight.strayed = true;
        }
        (here, sure)
    }

    /// Learns from an event that fits these flights.
    fn learn(&mut self, fitting: &[(FlightId, u32, Walk)], stored: &Stored, hashes: &[Option<SequenceHash>]) {
        let (id, first, walk) = fitting[0];
        let one = &self.flights[&id];
        let alike = |&(other, begins, ref its): &(FlightId, u32, Walk)| {
            let other = &self.flights[&other];
            let end = begins + its.agreed.max(walk.agreed);
            begins == first && other.shape(end).eq(one.shape(end))
        };
        if !fitting[1..].iter().all(alike) {
            let open = fitting.iter().any(|(id, ..)| self.flights[id].is_open());
            self.facts.counters.ambiguous += u64::from(open);
            return;
        }
        let sights = one.sights(first, walk.agreed as usize, u32::MAX, stored, &mut self.facts);
        let regular = sights.iter().all(|sight| sight.seen.is_some());
        let mut news = false;
        for sight in &sights {
            news |= self.facts.learn(sight);
        }
        if regular {
            for &(id, first, ref walk) in fitting {
                let Some(flight) = self.flights.get_mut(&id) else { continue };
                let from = flight.chain.len();
                flight.take(first, walk.agreed, stored, hashes);
                place(&mut self.places, flight, from);
            }
        }
        if news {
            self.resolve();
        }
    }

    /// Something new is known: flights that wait for it know more of their chains.
    fn resolve(&mut self) {
        for flight in self.flights.values_mut().filter(|flight| flight.is_open()) {
            let from = flight.chain.len();
            if flight.resolve(&mut self.facts) && flight.extend(&mut self.hasher) > 0 {
                place(&mut self.places, flight, from);
            }
        }
    }

    /// Nobody's prediction has this event: it speaks against those that wait for another block there.
    fn contradict(&mut self, walks: &[(FlightId, u32, Walk)], stored: &Stored, sure: bool) {
        if !sure && !self.blind.is_empty() {
            return;
        }
        let waits = |(id, first, walk): &&(FlightId, u32, Walk)| {
            walk.differs.is_some() && self.flights[id].came.get((first + walk.agreed) as usize) != Some(&true)
        };
        let waiting: Vec<_> = walks.iter().filter(waits).collect();
        let proof = match (sure || self.flights.len() == 1, waiting.len()) {
            (true, _) => Proof::Own,
            (false, 1) => Proof::Only,
            (false, _) => Proof::None,
        };
        for &&(id, first, ref walk) in &waiting {
            let Some(flight) = self.flights.get_mut(&id) else { continue };
            if let Some(against) = flight.contradict(first, walk, stored, proof)
                && proof == Proof::Own
            {
                flight.lessons = flight.sights(first, usize::MAX, against, stored, &mut self.facts);
            }
        }
    }

    /// Verdicts on flights that are over, whose grace has passed or whose whole chain is there. `held` says whether the engine holds
    /// a block at this moment.
    pub fn settle(&mut self, held: impl Fn(SequenceHash) -> bool, now: Instant) -> Vec<Verdict> {
        let grace = self.config.grace;
        let is_past = |over: Instant| now.saturating_duration_since(over) >= grace;
        self.blind.retain(|_, blind| !blind.over.is_some_and(is_past));
        let (mut found, mut past) = (Vec::new(), Vec::new());
        for flight in self.flights.values() {
            let Some((over, outcome)) = flight.over else { continue };
            let is_past = is_past(over);
            if !flight.reported {
                let judged = flight.judge(&held, &outcome);
                found.extend((is_past || judged == Found::Exact).then_some((flight.id, judged)));
            }
            // Its last events may still come, and are not to be taken for another one's.
            past.extend(is_past.then_some(flight.id));
        }
        found.sort_unstable_by_key(|(id, _)| *id);
        found.into_iter().for_each(|(id, found)| self.report(id, found));
        past.into_iter().for_each(|id| self.remove(id));
        std::mem::take(&mut self.settled)
    }

    fn report(&mut self, id: FlightId, found: Found) {
        let Some(flight) = self.flights.get_mut(&id) else { return };
        flight.reported = true;
        let outcome = flight.over.map(|(_, outcome)| outcome).unwrap_or_default();
        let cached = outcome.cached_tokens.map(|actual| (flight.reused_tokens, actual));
        self.settled.push(Verdict { flight: id, found, cached });
        match found {
            Found::Exact if flight.has_media() => self.trust.add(false),
            Found::Diverged { cause, .. } if cause.is_media() => self.trust.add(true),
            _ => {}
        }
        if let Found::Diverged { block, cause } = found {
            let lessons = std::mem::take(&mut flight.lessons);
            let divergence = flight.divergence(block, cause, outcome.prompt_tokens);
            if self.divergences.len() >= self.config.divergences_max {
                self.divergences.pop_front();
            }
            self.divergences.push_back(divergence);
            let mut news = false;
            for lesson in &lessons {
                news |= self.facts.learn(lesson);
            }
            if news {
                self.resolve();
            }
        }
    }

    fn remove(&mut self, id: FlightId) {
        let Some(flight) = self.flights.remove(&id) else { return };
        self.bytes -= flight.bytes;
        for hash in flight.chain.iter().chain([&flight.root]) {
            unlist(&mut self.places, hash, |(other, _)| *other != id);
        }
        if let Some(session) = &flight.session {
            unlist(&mut self.sessions, session, |other| *other != id);
        }
    }

    /// False after 5 media divergences among the last 20 media verdicts; true again after 20 exact ones in a row. A verdict counts when
    /// the prompt has media in its full blocks and it says [`Found::Exact`], or a divergence of media.
    pub fn media_trusted(&self) -> bool {
        self.trust.is_kept()
    }

    /// Facts that are new since the last call.
    pub fn drain_learnt(&mut self) -> Vec<Learnt> {
        self.facts.drain()
    }

    /// All facts, for a peer that knows none.
    pub fn all_learnt(&self) -> Vec<Learnt> {
        self.facts.all()
    }

    /// Positions (0 = not seen) and value of an item, once known whole. An item of fewer positions than its engine's cycle of pads never is.
    pub fn learnt(&self, key: &MediaKey) -> Option<(u32, LearntValue)> {
        self.facts.value(key)
    }

    /// The last divergences, oldest first.
    pub fn divergences(&self) -> impl Iterator<Item = &Divergence> {
        self.divergences.iter()
    }

    pub fn counters(&self) -> Counters {
        self.facts.counters
    }

    /// The epoch ended: flights are given up, facts stay. An engine of another version wants a new verifier.
    pub fn reset(&mut self) {
        let ids: Vec<_> = self.flights.values().map(|flight| (flight.id, flight.reported)).collect();
        for (id, reported) in ids {
            if !reported {
                self.report(id, Found::Unchecked(Reason::Reset));
            }
            self.remove(id);
        }
        self.blind.clear();
    }

    /// Panics when something is kept that should have gone, or over its limit. For tests.
    pub fn check_invariants(&self) {
        assert!(self.flights.len() <= self.config.flights_max && self.bytes <= self.config.bytes_max);
        assert_eq!(self.bytes, self.flights.values().map(|flight| flight.bytes).sum::<usize>());
        assert!(self.facts.len() <= self.config.facts_max && self.divergences.len() <= self.config.divergences_max);
        let listed: usize = self.places.values().map(Vec::len).sum();
        assert_eq!(listed, self.flights.values().map(|flight| 1 + flight.chain.len()).sum::<usize>());
        assert!(
            self.places.values().all(|list| !list.is_empty()) && self.sessions.values().all(|list| !list.is_empty())
        );
    }
}

/// Lists the hashes of a flight's chain from block `from` on.
fn place(places: &mut Places, flight: &Flight, from: usize) {
    for (next, &hash) in (1..).zip(&flight.chain).skip(from) {
        places.entry(hash).or_default().push((flight.id, next));
    }
}

fn unlist<K: std::hash::Hash + Eq, V>(lists: &mut HashMap<K, Vec<V>>, key: &K, keep: impl Fn(&V) -> bool) {
    if let Some(list) = lists.get_mut(key) {
        list.retain(keep);
        if list.is_empty() {
            lists.remove(key);
        }
    }
}
