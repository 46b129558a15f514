//! A balancer without its sockets: the real inboxes, index, fleet and choice.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fovea_balancer_core::choose::{self, Candidate, Query};
use fovea_balancer_core::fleet::{Description, Fleet, Freshness, State, WorkerKey};
use fovea_balancer_core::index::{Index, WorkerIndex};
use fovea_balancer_core::load::{BookingId, Charge, Report};
use fovea_gossip::audit::{self, Remedy};
use fovea_gossip::codec::Decoder;
use fovea_gossip::inbox::{Change, Inbox};
use fovea_gossip::message::{FromBalancer, FromSidecar, Version};
use fovea_kv::{SequenceHash, Tier};

use crate::mirror::Mirror;
use crate::prompt::{BLOCK, Tree};
use crate::{Break, Tick};

/// A pool's index is small here: nothing is ever full.
const ENTRIES_MAX: usize = 1 << 20;
pub const MODEL: &str = "m";

/// One stream's end.
pub struct Seat {
    pub inbox: Inbox,
    pub decoder: Decoder<FromSidecar>,
    /// From the hello on.
    pub place: Option<(WorkerKey, WorkerIndex)>,
    pub mirror: Mirror,
    /// The index was falsified on purpose, and is not repaired yet.
    pub falsified: bool,
    pub heard: Tick,
}

impl Seat {
    pub fn new(now: Tick) -> Self {
        Self {
            inbox: Inbox::new(),
            decoder: Decoder::new(),
            place: None,
            mirror: Mirror::default(),
            falsified: false,
            heard: now,
        }
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Figures {
    pub resyncs: u64,
    pub digests: u64,
    pub mismatches: u64,
    pub repaired: u64,
    pub snapshots: u64,
}

pub struct Balancer {
    pub up: bool,
    pub since: Tick,
    pub minor: u16,
    pub fleet: Fleet<u8>,
    pub index: Index,
    start: Instant,
    turn: u64,
    pub figures: Figures,
}

/// A chosen worker, and what its index said of the prompt.
pub struct Chosen {
    pub key: WorkerKey,
    pub booking: BookingId,
    pub sidecar: usize,
}

impl Balancer {
    pub fn new(start: Instant, minor: u16) -> Self {
        let (fleet, index) = (Fleet::new(Freshness::default()), Index::new(ENTRIES_MAX));
        Self { up: true, since: 0, minor, fleet, index, start, turn: 0, figures: Figures::default() }
    }

    pub fn restart(&mut self, now: Tick) {
        (self.fleet, self.index) = (Fleet::new(Freshness::default()), Index::new(ENTRIES_MAX));
        (self.up, self.since) = (true, now);
    }

    pub fn at(&self, now: Tick) -> Instant {
        self.start + Duration::from_millis(now * 10)
    }

    /// The stream ended.
    pub fn remove(&mut self, seat: &Seat) {
        if let Some((key, index)) = seat.place {
            self.fleet.remove(key);
            self.index.remove_worker(index);
        }
    }

    /// Takes one message; gives what is to be answered.
    pub fn take(
        &mut self,
        seat: &mut Seat,
        message: FromSidecar,
        sidecar: usize,
        tree: &Tree,
        broken: Option<Break>,
        now: Tick,
    ) -> Result<Vec<FromBalancer>, String> {
        seat.heard = now;
        let first = seat.inbox.hello().is_none();
        let mut answers = Vec::new();
        for change in seat.inbox.apply(message).map_err(|error| error.to_string())? {
            match change {
                Change::Hello(hello) => {
                    if seat.place.is_none() {
                        let index = self.index.add_worker();
                        let about = description(sidecar, index, hello.workers[0].events);
                        seat.place = Some((self.fleet.add(about, self.at(now)), index));
                    } else if let Some((key, index)) = seat.place {
                        self.fleet.describe(key, description(sidecar, index, hello.workers[0].events));
                    }
                    if first {
                        answers.push(FromBalancer::Welcome(Version { major: 1, minor: self.minor }));
                    }
                }
                Change::Resync { worker } => {
                    self.figures.resyncs += 1;
                    self.void(seat);
                    answers.push(FromBalancer::Resync { worker });
                }
                Change::Digest { worker, levels } => {
                    let ours = seat.place.and_then(|(_, index)| self.index.digest(index));
                    self.figures.digests += 1;
                    if ours.is_some_and(|ours| ours != levels) {
                        self.figures.mismatches += 1;
                        answers.push(FromBalancer::AskBuckets { worker });
                    }
                }
                Change::Buckets(theirs) => {
                    let Some(ours) = seat.place.and_then(|(_, index)| self.index.sums(index)) else { continue };
                    match audit::remedy(&ours, &theirs) {
                        Remedy::Nothing => {}
                        Remedy::Repair(buckets) => answers.push(FromBalancer::AskRepair { worker: 0, buckets }),
                        Remedy::Snapshot => {
                            seat.inbox.resync(0);
                            answers.push(FromBalancer::Resync { worker: 0 });
                        }
                    }
                }
                other => self.perform(seat, other, tree, broken)?,
            }
        }
        if let Some((key, index)) = seat.place {
            self.fleet.heard(key, self.at(now));
            let reader = self.index.reader();
            self.fleet.measure(key, |chain, held| reader.depth_of(index, chain, held));
        }
        Ok(answers)
    }

    fn void(&mut self, seat: &mut Seat) {
        seat.mirror.void();
        seat.falsified = false;
        if let Some((_, index)) = seat.place {
            self.index.clear(index);
        }
    }

    fn perform(&mut self, seat: &mut Seat, change: Change, tree: &Tree, broken: Option<Break>) -> Result<(), String> {
        let Some((key, place)) = seat.place else { return Err("a change before the hello".to_owned()) };
        match change {
            Change::Begin { .. } => {
                self.index.begin_snapshot(place);
                seat.mirror.begin();
            }
            Change::Mend { buckets, .. } => {
                let keep = |level: Tier, hash: SequenceHash| !audit::is_in(&buckets[usize::from(level.index())], hash);
                self.index.begin_repair(place, keep).map_err(|error| error.to_string())?;
                seat.mirror.mend(keep);
            }
            Change::Live { .. } => {
                self.index.go_live(place);
                seat.mirror.go_live(&tree.parents)?;
                seat.falsified = false;
                self.figures.snapshots += 1;
            }
            Change::Removed { level, hashes, .. } => {
                seat.mirror.removed(level, &hashes, &tree.parents)?;
                let skipped = usize::from(broken == Some(Break::SkipRemoval));
                self.index.apply_removed(place, level, &hashes[..hashes.len() - skipped.min(hashes.len())]);
            }
            Change::Stored { level, hashes, .. } => {
                seat.mirror.stored(level, &hashes, &tree.parents)?;
                self.index.apply_stored(place, level, &hashes).map_err(|error| error.to_string())?;
            }
            Change::Load(load) => self.fleet.report(
                key,
                Report {
                    running: load.running,
                    waiting: load.waiting,
                    prefill_tokens: load.prefill_tokens,
                    decode_tokens: load.decode_tokens,
                },
            ),
            Change::Repaired { hashes, .. } => self.figures.repaired += hashes,
            Change::Embeddings(held) => self.fleet.embedded(key, held.first, &held.stored, &held.removed),
            Change::Learnt(_) => {}
            Change::Hello(_) | Change::Resync { .. } | Change::Digest { .. } | Change::Buckets(_) => {
                return Err("a change that the stream does itself".to_owned());
            }
        }
        Ok(())
    }

    /// Chooses and books. `avoid` had its try.
    pub fn route(&mut self, chain: &[SequenceHash], avoid: Option<WorkerKey>, now: Tick) -> Option<Chosen> {
        let (mut depths, mut explained) = (Vec::new(), Vec::new());
        self.index.depths(chain, &mut depths);
        let (at, freshness) = (self.at(now), *self.fleet.freshness());
        let candidates: Vec<Candidate> = self
            .fleet
            .candidates(&0, MODEL, at)
            .filter(|worker| Some(worker.key) != avoid)
            .map(|worker| {
                let believed = worker.about.events && worker.state(&freshness, at) == State::Up;
                let found = depths.binary_search_by_key(&worker.about.index, |depth| depth.worker);
                let confirmed = found.ok().filter(|_| believed).map_or([0; 3], |found| depths[found].depth);
                let assumed = worker.speculation.depth(chain, confirmed[0], at);
                Candidate {
                    key: worker.key,
                    affinity: worker.key.0,
                    overlap_blocks: confirmed.map(|depth| depth.max(assumed)),
                    embedded: 0,
                    waiting_tokens: worker.load.waiting_tokens(),
                    decode_tokens: worker.load.decode_tokens(),
                }
            })
            .collect();
        self.turn += 1;
        let prompt_tokens = u32::try_from(chain.len()).unwrap_or(0) * BLOCK + 1;
        let query = Query { prompt_tokens, block_tokens: BLOCK, turn: self.turn, ..Query::default() };
        let chosen = choose::choose(&candidates, &query, &choose::Settings::default(), &mut explained)?;
        let charge = Charge {
            prefill_tokens: u64::from(prompt_tokens - chosen.reused_tokens),
            prompt_tokens: u64::from(prompt_tokens),
            block_tokens: BLOCK,
            ..Charge::default()
        };
        let booking = self.fleet.book(chosen.key, charge, chain.into(), at)?;
        let worker = self.fleet.workers().iter().find(|worker| worker.key == chosen.key)?;
        let sidecar = worker.about.url.parse().ok()?;
        Some(Chosen { key: chosen.key, booking, sidecar })
    }

    /// Live bookings of all workers.
    pub fn booked(&self) -> usize {
        self.fleet.workers().iter().map(|worker| worker.load.booked()).sum()
    }
}

pub fn description(sidecar: usize, index: WorkerIndex, events: bool) -> Description<u8> {
    let name: Arc<str> = sidecar.to_string().into();
    Description {
        pool: 0,
        index,
        name: Arc::clone(&name),
        url: name,
        dp_rank: 0,
        served_names: [MODEL.to_owned()].into(),
        lora_names: [].into(),
        events,
        draining: false,
        capacity_tokens: 0,
        media_trusted: true,
        by_load: false,
    }
}
