//! Who gets a request, by each of the compared policies. All but the oracle see load as the balancer does: own bookings and reports.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fovea_balancer_core::choose::{Candidate, Mode, Query, Settings, choose};
use fovea_balancer_core::fleet::{Description, Fleet, Freshness, WorkerKey};
use fovea_balancer_core::history::Recall;
use fovea_balancer_core::index::{Index, WorkerDepth, WorkerIndex};
use fovea_balancer_core::load::{BookingId, Charge, Report};
use fovea_kv::Tier;
use fovea_sidecar_core::publish::Delta;
use serde::Serialize;

use super::Micros;
use super::engine::Engine;
use super::random::mix;
use super::workload::Request;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Policy {
    RoundRobin,
    /// By rendezvous hash of the session.
    Session,
    /// By load alone.
    LeastLoaded,
    /// By the router's own history of what it sent where.
    Approximate,
    /// By the engines' events: mode precise.
    Fovea,
    /// As Fovea, but with the engines' true queues: what better knowledge of load would bring.
    TrueLoad,
    /// As Fovea, but with what is true at this instant in caches and queues.
    Oracle,
}

impl Policy {
    pub const ALL: [Self; 6] =
        [Self::RoundRobin, Self::Session, Self::LeastLoaded, Self::Approximate, Self::Fovea, Self::Oracle];

    pub fn name(self) -> &'static str {
        match self {
            Self::RoundRobin => "round_robin",
            Self::Session => "session",
            Self::LeastLoaded => "least_loaded",
            Self::Approximate => "approximate",
            Self::Fovea => "fovea",
            Self::Oracle => "oracle",
            Self::TrueLoad => "fovea_true_load",
        }
    }

    fn mode(self) -> Mode {
        match self {
            Self::RoundRobin => Mode::RoundRobin,
            Self::Session => Mode::Session,
            Self::LeastLoaded => Mode::Load,
            Self::Approximate => Mode::Approximate,
            _ => Mode::Precise,
        }
    }
}

/// Blocks over all workers that the index takes: more than any case holds.
const INDEX_ENTRIES_MAX: usize = 1 << 26;
const MODEL: &str = "m";

/// Where a request went.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    pub worker: usize,
    pub booking: BookingId,
    pub charge: Charge,
}

/// The balancer.
pub struct Router {
    policy: Policy,
    settings: Settings,
    block_tokens: u32,
    fleet: Fleet<u8>,
    keys: Vec<WorkerKey>,
    index: Index,
    places: Vec<WorkerIndex>,
    /// Prompt tokens to compute of each request, as foreseen when it was sent.
    expected: Vec<u32>,
    start: Instant,
    turn: u64,
}

impl Router {
    pub fn new(policy: Policy, settings: Settings, engines: &[Engine], block_tokens: u32, requests: usize) -> Self {
        let start = Instant::now();
        let recall = Recall { blocks_max: INDEX_ENTRIES_MAX, ..Recall::default() };
        let (mut fleet, mut index) = (Fleet::with_recall(Freshness::default(), recall), Index::new(INDEX_ENTRIES_MAX));
        let places: Vec<_> = engines.iter().map(|_| index.add_worker()).collect();
        let about = |(number, index): (usize, &WorkerIndex)| Description {
            pool: 0,
            index: *index,
            name: Arc::from(format!("w{number}")),
            url: Arc::from(""),
            dp_rank: 0,
            served_names: Arc::from([MODEL.to_owned()]),
            lora_names: Arc::from([]),
            events: policy != Policy::Approximate,
            draining: false,
            by_load: false,
            capacity_tokens: u64::from(engines[number].pool.capacity()) * u64::from(block_tokens),
            media_trusted: true,
        };
        let keys = places.iter().enumerate().map(about).map(|about| fleet.add(about, start)).collect();
        let settings = Settings { mode: policy.mode(), ..settings };
        let expected = vec![0; requests];
        Self { policy, settings, block_tokens, fleet, keys, index, places, expected, start, turn: 0 }
    }

    /// Whether anybody reads the engines' events.
    pub fn reads_events(&self) -> bool {
        matches!(self.policy, Policy::Fovea | Policy::TrueLoad)
    }

    /// Chooses a worker and books the request on it.
    ///
    /// # Panics
    /// Never: there is always a worker.
    pub fn route(&mut self, number: usize, requests: &[Request], engines: &[Engine], now: Micros) -> Route {
        let request = &requests[number];
        let at = self.at(now);
        self.keys.iter().for_each(|key| self.fleet.heard(*key, at));
        let candidates = match self.policy {
            Policy::Oracle => self.see_all(request, requests, engines),
            Policy::TrueLoad => {
                let (mut seen, truth) = (self.see(request, now), self.see_all(request, requests, engines));
                for (seen, truth) in seen.iter_mut().zip(truth) {
                    *seen = Candidate { overlap_blocks: seen.overlap_blocks, ..truth };
                }
                seen
            }
            _ => self.see(request, now),
        };
        let images: Vec<_> = request.images.iter().map(|image| (image.start, image.len)).collect();
        let query = Query {
            prompt_tokens: request.prompt_tokens(),
            block_tokens: self.block_tokens,
            images: &images,
            media: request.images.first().map(|image| mix(image.id)),
            session: Some(mix(request.session)),
            turn: self.turn,
        };
        self.turn += 1;
        let mut explained = Vec::new();
        let chosen = choose(&candidates, &query, &self.settings, &mut explained).expect("a case has workers");
        let worker = self.keys.iter().position(|key| *key == chosen.key).expect("the chosen worker is a candidate");
        let fresh = query.prompt_tokens - chosen.reused_tokens;
        self.expected[number] = fresh;
        let charge = Charge {
            prefill_tokens: u64::from(fresh),
            prompt_tokens: u64::from(query.prompt_tokens),
            encode_tokens: chosen.encode_tokens,
            block_tokens: self.block_tokens,
        };
        let chain = if self.reads_events() || self.policy == Policy::Approximate {
            Arc::clone(&request.chain)
        } else {
            Arc::from([])
        };
        let booking = self.fleet.book(chosen.key, charge, chain, at).expect("workers stay");
        Route { worker, booking, charge }
    }

    fn see(&self, request: &Request, now: Micros) -> Vec<Candidate> {
        let (at, mut depths) = (self.at(now), Vec::new());
        if self.reads_events() {
            self.index.depths(&request.chain, &mut depths);
        }
        let workers = self.fleet.candidates(&0, MODEL, at);
        let depth = |place: usize, worker: &fovea_balancer_core::fleet::Worker<u8>| match self.policy {
            Policy::Fovea | Policy::TrueLoad => confirmed(&depths, self.places[place]),
            Policy::Approximate => worker.history.depth(&request.chain, self.fleet.recall(), at),
            _ => 0,
        };
        let candidate = |(place, worker): (usize, &fovea_balancer_core::fleet::Worker<u8>)| {
            let depth = depth(place, worker);
            let depth = depth.max(worker.speculation.depth(&request.chain, depth, at));
            Candidate {
                key: worker.key,
                affinity: mix(place as u64),
                overlap_blocks: [depth; 3],
                embedded: 0,
                waiting_tokens: worker.load.waiting_tokens(),
                decode_tokens: worker.load.decode_tokens(),
            }
        };
        workers.enumerate().map(candidate).collect()
    }

    fn see_all(&self, request: &Request, requests: &[Request], engines: &[Engine]) -> Vec<Candidate> {
        let candidate = |(place, engine): (usize, &Engine)| Candidate {
            key: self.keys[place],
            affinity: mix(place as u64),
            overlap_blocks: [engine.depth(requests, &request.chain); 3],
            embedded: 0,
            waiting_tokens: engine.waiting_tokens(&self.expected, requests),
            decode_tokens: engine.decode_tokens(requests),
        };
        engines.iter().enumerate().map(candidate).collect()
    }

    pub fn apply(&mut self, worker: usize, delta: &Delta) {
        for (level, changes) in Tier::ALL.into_iter().zip(&delta.levels) {
            self.index.apply_removed(self.places[worker], level, &changes.removed);
            self.index.apply_stored(self.places[worker], level, &changes.stored).expect("the index has room");
        }
        let (reader, place) = (self.index.reader(), self.places[worker]);
        self.fleet.measure(self.keys[worker], |chain, held| reader.depth_of(place, chain, held));
    }

    pub fn report(&mut self, worker: usize, report: Report) {
        self.fleet.report(self.keys[worker], report);
    }

    pub fn started(&mut self, route: Route, now: Micros) {
        let remember = self.policy == Policy::Approximate;
        self.fleet.started(self.keys[route.worker], route.booking, remember, self.at(now));
    }

    pub fn ended(&mut self, route: Route) {
        self.fleet.release(self.keys[route.worker], route.booking, false);
    }

    fn at(&self, now: Micros) -> Instant {
        self.start + Duration::from_micros(now)
    }
}

fn confirmed(depths: &[WorkerDepth], worker: WorkerIndex) -> u32 {
    let at = depths.binary_search_by_key(&worker, |depth| depth.worker);
    at.map_or(0, |at| depths[at].depth[0])
}
