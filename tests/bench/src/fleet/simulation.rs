//! One case from its first arrival to its last answer: a queue of events in order of time.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use fovea_balancer_core::choose::Settings;
use fovea_balancer_core::load::Report;
use fovea_sidecar_core::publish::Delta;

use super::Micros;
use super::engine::{self, Engine, Output, Work};
use super::policy::{Policy, Route, Router};
use super::sidecar::Sidecar;
use super::workload::Workload;

/// One way between balancer and sidecar.
const HOP: Micros = 300;

#[derive(Clone, Copy, Debug)]
pub struct Fleet {
    pub workers: usize,
    /// KV blocks of each engine.
    pub blocks: u32,
    pub engine: engine::Settings,
    pub choose: Settings,
    /// Mean time between two requests.
    pub gap: f64,
}

enum Event {
    Arrive(usize),
    Submit(usize),
    StepEnd(usize),
    FirstByte(usize),
    Over(usize),
    Flush(usize),
    Delta(usize, Box<Delta>),
    ReportDue(usize),
    Report(usize, Report),
}

struct Entry {
    at: Micros,
    /// Equal times go in order of entry.
    number: u64,
    event: Event,
}

impl PartialEq for Entry {
    fn eq(&self, other: &Self) -> bool {
        (self.at, self.number) == (other.at, other.number)
    }
}

impl Eq for Entry {}

impl PartialOrd for Entry {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Entry {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        (self.at, self.number).cmp(&(other.at, other.number))
    }
}

/// What became of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Outcome {
    pub worker: usize,
    pub arrived: Micros,
    pub first_byte: Option<Micros>,
    pub over: Option<Micros>,
    pub work: Work,
}

/// What a case left behind.
#[derive(Clone, Debug, PartialEq)]
pub struct Ended {
    pub outcomes: Vec<Outcome>,
    /// Share of the time from first to last arrival that engines spent on prefill and encoding.
    pub utilisation: f64,
    /// Workers that hold the hot image at the end.
    pub hot_workers: usize,
    /// Events in order of time; a request's later stages never before its earlier ones.
    pub is_monotone: bool,
}

struct Simulation<'a> {
    workload: &'a Workload,
    router: Router,
    engines: Vec<Engine>,
    sidecars: Vec<Sidecar>,
    routes: Vec<Option<Route>>,
    outcomes: Vec<Outcome>,
    work: Vec<Work>,
    queue: BinaryHeap<Reverse<Entry>>,
    entries: u64,
    outputs: Vec<Output>,
}

/// Runs `workload` under `policy` to its end.
pub fn run(workload: &Workload, fleet: &Fleet, policy: Policy) -> Ended {
    let (block_tokens, count) = (workload.block_tokens, workload.requests.len());
    let engines: Vec<_> = (0..fleet.workers).map(|_| Engine::new(fleet.engine, block_tokens, fleet.blocks)).collect();
    let mut simulation = Simulation {
        workload,
        router: Router::new(policy, fleet.choose, &engines, block_tokens, count),
        engines,
        sidecars: (0..fleet.workers).map(|_| Sidecar::default()).collect(),
        routes: vec![None; count],
        outcomes: vec![Outcome::default(); count],
        work: vec![Work::default(); count],
        queue: BinaryHeap::new(),
        entries: 0,
        outputs: Vec::new(),
    };
    for (number, request) in workload.requests.iter().enumerate() {
        simulation.push((request.at * fleet.gap) as Micros, Event::Arrive(number));
    }
    let (mut last, mut is_monotone, mut busy, mut arrivals) = (0, true, 0.0, 0);
    while let Some(Reverse(entry)) = simulation.queue.pop() {
        is_monotone &= entry.at >= last;
        last = entry.at;
        simulation.step(entry.event, entry.at);
        arrivals += usize::from(simulation.outcomes.get(arrivals).is_some_and(|next| next.arrived > 0));
        if arrivals == count && busy == 0.0 {
            busy = simulation.engines.iter().map(|engine| engine.busy).sum();
        }
    }
    simulation.end(busy, is_monotone)
}

impl Simulation<'_> {
    fn push(&mut self, at: Micros, event: Event) {
        self.entries += 1;
        self.queue.push(Reverse(Entry { at, number: self.entries, event }));
    }

    fn step(&mut self, event: Event, now: Micros) {
        match event {
            Event::Arrive(number) => self.arrive(number, now),
            Event::Submit(number) => self.submit(number, now),
            Event::StepEnd(worker) => self.end_step(worker, now),
            Event::FirstByte(number) => {
                self.outcomes[number].first_byte = Some(now);
                if let Some(route) = self.routes[number] {
                    self.router.started(route, now);
                }
            }
            Event::Over(number) => {
                self.outcomes[number].over = Some(now);
                if let Some(route) = self.routes[number].take() {
                    self.router.ended(route);
                }
            }
            Event::Flush(worker) => {
                let delta = self.sidecars[worker].flush();
                self.push(now + HOP, Event::Delta(worker, Box::new(delta)));
            }
            Event::Delta(worker, delta) => self.router.apply(worker, &delta),
            Event::ReportDue(worker) => {
                let report = self.sidecars[worker].report(now);
                self.push(now + HOP, Event::Report(worker, report));
            }
            Event::Report(worker, report) => self.router.report(worker, report),
        }
    }

    fn arrive(&mut self, number: usize, now: Micros) {
        let route = self.router.route(number, &self.workload.requests, &self.engines, now);
        self.engines[route.worker].expect(number);
        self.routes[number] = Some(route);
        self.outcomes[number].arrived = now.max(1);
        self.outcomes[number].worker = route.worker;
        self.push(now + HOP, Event::Submit(number));
    }

    fn submit(&mut self, number: usize, now: Micros) {
        let Some(Route { worker, charge, .. }) = self.routes[number] else { return };
        let due = self.sidecars[worker].arrived(charge, now);
        self.report_at(worker, due);
        self.engines[worker].submit(number);
        if !self.engines[worker].is_stepping {
            self.begin_step(worker, now);
        }
    }

    fn begin_step(&mut self, worker: usize, now: Micros) {
        let engine = &mut self.engines[worker];
        if let Some(time) = engine.begin_step(&self.workload.requests, &mut self.work) {
            self.push(now + time, Event::StepEnd(worker));
        }
    }

    fn end_step(&mut self, worker: usize, now: Micros) {
        let mut outputs = std::mem::take(&mut self.outputs);
        self.engines[worker].end_step(&self.workload.requests, &mut outputs);
        self.announce(worker, now);
        for output in outputs.drain(..) {
            let (Output::First(number) | Output::Last(number)) = output;
            let Some(Route { charge, .. }) = self.routes[number] else { continue };
            let sidecar = &mut self.sidecars[worker];
            let (due, event) = match output {
                Output::First(_) => (sidecar.started(charge, now), Event::FirstByte(number)),
                Output::Last(_) => (sidecar.ended(charge, now), Event::Over(number)),
            };
            self.report_at(worker, due);
            self.push(now + HOP, event);
        }
        self.outputs = outputs;
        self.begin_step(worker, now);
    }

    fn announce(&mut self, worker: usize, now: Micros) {
        let engine = &mut self.engines[worker];
        let (stored, removed) = (engine.take_stored(), engine.pool.take_removed());
        if !self.router.reads_events() {
            return;
        }
        let (requests, block_tokens) = (&self.workload.requests, self.workload.block_tokens);
        if let Some(due) = self.sidecars[worker].events(&stored, removed, requests, block_tokens, now) {
            self.push(due, Event::Flush(worker));
        }
    }

    fn report_at(&mut self, worker: usize, due: Option<Micros>) {
        if let Some(due) = due {
            self.push(due, Event::ReportDue(worker));
        }
    }

    fn end(mut self, busy: f64, is_monotone: bool) -> Ended {
        for (outcome, work) in self.outcomes.iter_mut().zip(&self.work) {
            outcome.work = *work;
        }
        let first = self.outcomes.iter().map(|outcome| outcome.arrived).min().unwrap_or(0);
        let last = self.outcomes.iter().map(|outcome| outcome.arrived).max().unwrap_or(0);
        let hot = self.workload.hot_chain();
        let holds_all = |engine: &&Engine| !hot.is_empty() && engine.pool.hits(hot, u32::MAX) as usize == hot.len();
        let in_order = |outcome: &Outcome| {
            outcome.first_byte.is_some_and(|first| outcome.arrived <= first)
                && outcome.over.is_some_and(|over| outcome.first_byte.is_some_and(|first| first <= over))
        };
        let is_idle = self.engines.iter().all(Engine::is_idle);
        Ended {
            utilisation: busy / (self.engines.len() as f64 * (last - first).max(1) as f64),
            hot_workers: self.engines.iter().filter(holds_all).count(),
            is_monotone: is_monotone && is_idle && self.outcomes.iter().all(in_order),
            outcomes: self.outcomes,
        }
    }
}
