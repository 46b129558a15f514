//! Everything under one clock: ticks of 10 ms, in which each part does what is due, in a fixed order.

use std::time::Instant;

use fovea_gossip::message::Load;
use fovea_gossip::outbox::RingLimits;

use crate::balancer::{Balancer, Figures};
use crate::engine::Engine;
use crate::plan::{Kind, Plan};
use crate::prompt::Tree;
use crate::random::Random;
use crate::requests::Request;
use crate::sidecar::Sidecar;
use crate::stream::Conn;
use crate::{Break, Tick};

/// A balancer's limit of silence.
const SILENCE: Tick = 1500;
/// Pauses between dials: first and longest (`gossip.backoff_max`).
const BACKOFF: (Tick, Tick) = (10, 80);
/// No fault any more, requests for a while, then rest: longer than a silent stream is kept.
const SETTLE: Tick = 2000;
const REQUESTS_AFTER: Tick = 200;

#[derive(Clone, Copy, Debug)]
pub struct Dial {
    pub at: Tick,
    pub pause: Tick,
    /// The two do not reach each other before.
    pub blocked_until: Tick,
}

pub struct World {
    pub now: Tick,
    pub plan: Plan,
    pub random: Random,
    pub tree: Tree,
    pub engines: Vec<Engine>,
    /// Down until.
    pub engine_back: Vec<Option<Tick>>,
    pub sidecars: Vec<Sidecar>,
    pub sidecar_back: Vec<Option<Tick>>,
    pub deaf_until: Vec<Tick>,
    pub balancers: Vec<Balancer>,
    pub balancer_back: Vec<Option<Tick>>,
    pub slow_until: Vec<Tick>,
    pub conns: Vec<Conn>,
    /// By sidecar, then balancer.
    pub dials: Vec<Vec<Dial>>,
    pub requests: Vec<Request>,
    pub broken: Option<Break>,
    pub trace: Option<Vec<String>>,
    pub routed: u64,
}

impl World {
    pub fn new(plan: Plan, broken: Option<Break>, trace: bool) -> Self {
        let mut random = Random::new(plan.seed ^ 0xf1ee7);
        let ring = RingLimits { bytes: 16 << 10, frames: plan.ring_frames };
        let start = Instant::now();
        let dial = Dial { at: 0, pause: BACKOFF.0, blocked_until: 0 };
        let sidecar = |_| Sidecar::new(ring, random.within(1 << 40..1 << 41), 0);
        let sidecars = (0..plan.sidecars).map(sidecar).collect();
        Self {
            now: 0,
            tree: Tree::default(),
            engines: (0..plan.sidecars).map(|_| Engine::new(&mut random)).collect(),
            random,
            engine_back: vec![None; plan.sidecars],
            sidecars,
            sidecar_back: vec![None; plan.sidecars],
            deaf_until: vec![0; plan.sidecars],
            balancers: plan.balancer_minors.iter().map(|minor| Balancer::new(start, *minor)).collect(),
            balancer_back: vec![None; plan.balancers],
            slow_until: vec![0; plan.balancers],
            conns: Vec::new(),
            dials: vec![vec![dial; plan.balancers]; plan.sidecars],
            requests: Vec::new(),
            broken,
            trace: trace.then(Vec::new),
            routed: 0,
            plan,
        }
    }

    /// Runs it to its end.
    pub fn run(&mut self) -> Result<(), String> {
        let end = self.plan.ticks + SETTLE;
        while self.now < end {
            self.now += 1;
            self.step().and_then(|()| self.check()).map_err(|broken| format!("tick {}: {broken}", self.now))?;
        }
        self.check_rest().map_err(|broken| format!("at rest: {broken}"))
    }

    pub fn faults_on(&self) -> bool {
        self.now < self.plan.ticks
    }

    pub fn say(&mut self, text: impl FnOnce() -> String) {
        let now = self.now;
        if let Some(trace) = &mut self.trace {
            trace.push(format!("{:7.2} s  {}", f64::from(u32::try_from(now).unwrap_or(u32::MAX)) / 100.0, text()));
        }
    }

    fn step(&mut self) -> Result<(), String> {
        let now = self.now;
        if now == self.plan.ticks {
            self.heal();
        }
        let due: Vec<_> = self.plan.faults.iter().filter(|fault| fault.at == now).map(|fault| fault.kind).collect();
        due.into_iter().for_each(|kind| self.inflict(kind));
        self.return_what_is_due();
        if now < self.plan.ticks + REQUESTS_AFTER && self.random.one_in(self.plan.pace) {
            self.request()?;
        }
        self.advance_requests()?;
        self.publish();
        let faults = self.faults_on();
        for (sidecar, engine) in self.sidecars.iter_mut().zip(&self.engines).filter(|(sidecar, _)| sidecar.up) {
            sidecar.step(engine, faults, &mut self.random, self.broken, now);
        }
        self.dial();
        self.talk()
    }

    /// The engines' batches, over a subscription that loses, repeats and reorders.
    fn publish(&mut self) {
        let faults = self.faults_on();
        for at in 0..self.engines.len() {
            let odd = faults && self.random.one_in(200);
            let Some(frame) = self.engines[at].up.then(|| self.engines[at].batch(odd)).flatten() else { continue };
            let (sidecar, random) = (&mut self.sidecars[at], &mut self.random);
            let lost = faults && self.plan.loss > 0 && random.one_in(self.plan.loss);
            if !sidecar.up || !sidecar.subscribed || self.deaf_until[at] > self.now || lost {
                continue;
            }
            let due = self.now + random.within(0..3);
            if faults && random.one_in(25) {
                sidecar.link.push_back((due, frame.clone()));
            }
            sidecar.link.push_back((due, frame));
            let last = sidecar.link.len() - 1;
            if faults && last > 0 && random.one_in(20) {
                sidecar.link.swap(last, last - 1);
            }
        }
    }

    fn inflict(&mut self, kind: Kind) {
        let now = self.now;
        self.say(|| format!("{kind:?}"));
        match kind {
            Kind::EngineRestart { engine, down, late } => {
                self.engines[engine].up = false;
                self.engine_back[engine] = Some(now + down);
                self.sidecars[engine].disconnect(now, now + down + late);
            }
            Kind::Unsubscribe { sidecar, away } => self.sidecars[sidecar].disconnect(now, now + away),
            Kind::Deaf { sidecar, ticks } => self.deaf_until[sidecar] = now + ticks,
            Kind::ClearCache { engine } => {
                if self.engines[engine].up {
                    self.engines[engine].clear();
                    if self.sidecars[engine].up {
                        self.sidecars[engine].cache_reset(self.broken, now);
                    }
                }
            }
            Kind::SidecarCrash { sidecar, down, silent } => {
                self.sidecars[sidecar].up = false;
                self.sidecar_back[sidecar] = Some(now + down);
                for conn in self.conns.iter_mut().filter(|conn| conn.sidecar == sidecar && conn.sidecar_open) {
                    (conn.sidecar_open, conn.silent) = (false, silent);
                }
            }
            Kind::BalancerCrash { balancer, down, silent } => {
                self.balancers[balancer].up = false;
                self.balancer_back[balancer] = Some(now + down);
                for conn in self.conns.iter_mut().filter(|conn| conn.balancer == balancer && conn.balancer_open) {
                    (conn.balancer_open, conn.silent) = (false, silent);
                }
            }
            Kind::Partition { sidecar, balancer, ticks } => {
                self.block(sidecar, balancer, ticks);
                self.each_conn(sidecar, balancer, |conn| conn.sidecar_open = false);
            }
            Kind::Stall { sidecar, balancer, ticks } => {
                self.block(sidecar, balancer, ticks);
                self.each_conn(sidecar, balancer, |conn| conn.stalled_until = now + ticks);
            }
            Kind::Slow { balancer, ticks } => self.slow_until[balancer] = now + ticks,
            Kind::Falsify { sidecar, balancer, add } => self.falsify(sidecar, balancer, add),
        }
    }

    fn block(&mut self, sidecar: usize, balancer: usize, ticks: Tick) {
        let dial = &mut self.dials[sidecar][balancer];
        dial.blocked_until = dial.blocked_until.max(self.now + ticks);
    }

    fn each_conn(&mut self, sidecar: usize, balancer: usize, act: impl FnMut(&mut Conn)) {
        self.conns.iter_mut().filter(|conn| (conn.sidecar, conn.balancer) == (sidecar, balancer)).for_each(act);
    }

    /// Everything that is down or blocked comes back.
    fn heal(&mut self) {
        let now = self.now;
        self.say(|| "no more faults".to_owned());
        let back = self.engine_back.iter_mut().chain(&mut self.sidecar_back).chain(&mut self.balancer_back);
        back.flatten().for_each(|at| *at = (*at).min(now + 1));
        self.slow_until.iter_mut().chain(&mut self.deaf_until).for_each(|until| *until = now);
        self.dials.iter_mut().flatten().for_each(|dial| dial.blocked_until = dial.blocked_until.min(now));
        self.conns.iter_mut().for_each(|conn| conn.stalled_until = conn.stalled_until.min(now));
    }

    fn return_what_is_due(&mut self) {
        let now = self.now;
        let is_due = |back: &mut Option<Tick>| back.take_if(|at| *at <= now).is_some();
        for at in 0..self.engines.len() {
            if is_due(&mut self.engine_back[at]) {
                self.engines[at].restart();
            }
            if is_due(&mut self.sidecar_back[at]) {
                self.sidecars[at].restart(now);
            }
        }
        for at in 0..self.balancers.len() {
            if is_due(&mut self.balancer_back[at]) {
                self.balancers[at].restart(now);
            }
        }
    }

    /// Streams that are to be and are not.
    fn dial(&mut self) {
        let now = self.now;
        for sidecar in 0..self.sidecars.len() {
            for balancer in 0..self.balancers.len() {
                let dial = &mut self.dials[sidecar][balancer];
                let stands = |conn: &Conn| (conn.sidecar, conn.balancer) == (sidecar, balancer) && conn.sidecar_open;
                if !self.sidecars[sidecar].up || now < dial.at || self.conns.iter().any(stands) {
                    continue;
                }
                if self.balancers[balancer].up && dial.blocked_until <= now {
                    dial.pause = BACKOFF.0;
                    self.conns.push(Conn::new(sidecar, balancer, self.sidecars[sidecar].life, now));
                    self.say(|| format!("sidecar {sidecar} connects to balancer {balancer}"));
                } else {
                    let dial = &mut self.dials[sidecar][balancer];
                    dial.at = now + dial.pause / 2 + self.random.within(0..dial.pause / 2 + 1);
                    let longest = if self.broken == Some(Break::SlowDial) { 200 } else { BACKOFF.1 };
                    dial.pause = (dial.pause * 2).min(longest);
                }
            }
        }
    }

    /// One tick of every stream.
    fn talk(&mut self) -> Result<(), String> {
        let mut conns = std::mem::take(&mut self.conns);
        let done = conns.iter_mut().try_for_each(|conn| self.tick(conn));
        conns.retain(|conn| conn.sidecar_open || conn.balancer_open);
        self.conns = conns;
        done
    }

    fn tick(&mut self, conn: &mut Conn) -> Result<(), String> {
        let now = self.now;
        if conn.sidecar_open {
            let load = self.load_of(conn.sidecar);
            let minor = self.plan.sidecar_minors[conn.sidecar];
            if !conn.speak(&self.sidecars[conn.sidecar], minor, load, now) {
                conn.sidecar_open = false;
            }
        }
        if conn.balancer_open && self.slow_until[conn.balancer] <= now {
            self.listen(conn)?;
            if now > conn.seat.heard + SILENCE {
                self.hang_up(conn);
            }
        }
        // Who is left learns of the other's end, unless that could not say it.
        let heard_of = now >= conn.stalled_until;
        if conn.sidecar_open && !conn.balancer_open && heard_of && (!conn.silent || self.balancers[conn.balancer].up) {
            conn.sidecar_open = false;
            self.dials[conn.sidecar][conn.balancer].at = now + self.random.within(BACKOFF.0 / 2..BACKOFF.0);
        }
        if conn.balancer_open && !conn.sidecar_open && heard_of && !conn.silent {
            self.hang_up(conn);
        }
        Ok(())
    }

    fn hang_up(&mut self, conn: &mut Conn) {
        conn.balancer_open = false;
        self.balancers[conn.balancer].remove(&conn.seat);
    }

    fn listen(&mut self, conn: &mut Conn) -> Result<(), String> {
        while let Some(bytes) = conn.arrived(self.now) {
            conn.seat.decoder.push(&bytes);
            while let Some(message) = conn.seat.decoder.next().map_err(|error| error.to_string())? {
                let balancer = &mut self.balancers[conn.balancer];
                let taken = balancer.take(&mut conn.seat, message, conn.sidecar, &self.tree, self.broken, self.now);
                for answer in taken? {
                    conn.answer(&answer, self.now);
                }
                conn.was_live |= conn.seat.mirror.is_live;
                self.check_seat(conn)?;
            }
        }
        Ok(())
    }

    fn load_of(&self, sidecar: usize) -> Load {
        let mut load = Load::default();
        for request in self.requests.iter().filter(|request| request.sidecar == sidecar) {
            let tokens = request.prompt.len() as u64 * u64::from(crate::prompt::BLOCK);
            if request.started {
                (load.running, load.decode_tokens) = (load.running + 1, load.decode_tokens + tokens);
            } else {
                (load.waiting, load.prefill_tokens) = (load.waiting + 1, load.prefill_tokens + tokens);
            }
        }
        load
    }

    pub fn figures(&self) -> Figures {
        self.balancers.iter().fold(Figures::default(), |sum, balancer| {
            let of = balancer.figures;
            Figures {
                resyncs: sum.resyncs + of.resyncs,
                digests: sum.digests + of.digests,
                mismatches: sum.mismatches + of.mismatches,
                repaired: sum.repaired + of.repaired,
                snapshots: sum.snapshots + of.snapshots,
            }
        })
    }
}
