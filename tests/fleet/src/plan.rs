//! What happens in one run: the shape of the fleet and its faults, all from the seed.

use crate::Tick;
use crate::random::Random;

#[derive(Clone, Copy, Debug)]
pub enum Kind {
    /// The engine dies, comes back after `down`, and is subscribed to `late` ticks after that: its numbers may have passed ours.
    EngineRestart {
        engine: usize,
        down: Tick,
        late: Tick,
    },
    /// The subscription breaks.
    Unsubscribe {
        sidecar: usize,
        away: Tick,
    },
    /// The subscription delivers nothing, and does not end.
    Deaf {
        sidecar: usize,
        ticks: Tick,
    },
    ClearCache {
        engine: usize,
    },
    SidecarCrash {
        sidecar: usize,
        down: Tick,
        silent: bool,
    },
    BalancerCrash {
        balancer: usize,
        down: Tick,
        silent: bool,
    },
    Partition {
        sidecar: usize,
        balancer: usize,
        ticks: Tick,
    },
    /// The stream stands still, and goes on.
    Stall {
        sidecar: usize,
        balancer: usize,
        ticks: Tick,
    },
    /// The balancer reads nothing.
    Slow {
        balancer: usize,
        ticks: Tick,
    },
    /// The index loses a hash, or gets one too many: a fault of ours, to be found by digest.
    Falsify {
        sidecar: usize,
        balancer: usize,
        add: bool,
    },
}

#[derive(Clone, Copy, Debug)]
pub struct Fault {
    pub at: Tick,
    pub kind: Kind,
}

#[derive(Clone, Debug)]
pub struct Plan {
    pub seed: u64,
    pub sidecars: usize,
    pub balancers: usize,
    pub sidecar_minors: Vec<u16>,
    pub balancer_minors: Vec<u16>,
    /// Frames a ring holds.
    pub ring_frames: usize,
    /// Faults end after so many ticks.
    pub ticks: Tick,
    pub faults: Vec<Fault>,
    /// One in so many events of the subscription is lost; 0 = none.
    pub loss: usize,
    /// Ticks between two requests, about.
    pub pace: usize,
}

impl Plan {
    pub fn new(seed: u64) -> Self {
        let random = &mut Random::new(seed);
        let (sidecars, balancers) = (1 + random.below(8), 1 + random.below(4));
        let ticks = 200 + random.within(0..500);
        let mut minors = |count: usize| (0..count).map(|_| if random.one_in(4) { 1 } else { 2 }).collect::<Vec<_>>();
        let (sidecar_minors, balancer_minors) = (minors(sidecars), minors(balancers));
        let mut faults: Vec<_> = (0..random.below(14)).map(|_| fault(random, sidecars, balancers, ticks)).collect();
        faults.sort_by_key(|fault| fault.at);
        Self {
            seed,
            sidecars,
            balancers,
            sidecar_minors,
            balancer_minors,
            ring_frames: [2, 8, 1 << 10][random.below(3)],
            ticks,
            faults,
            loss: [0, 12, 40][random.below(3)],
            pace: 2 + random.below(10),
        }
    }
}

fn fault(random: &mut Random, sidecars: usize, balancers: usize, ticks: Tick) -> Fault {
    let (sidecar, balancer) = (random.below(sidecars), random.below(balancers));
    let (short, long) = (random.within(1..60), random.within(1..400));
    let silent = random.one_in(3);
    let kind = match random.below(11) {
        0 | 1 => Kind::EngineRestart { engine: sidecar, down: short, late: long },
        2 => Kind::Unsubscribe { sidecar, away: short },
        3 => Kind::Deaf { sidecar, ticks: short },
        4 => Kind::ClearCache { engine: sidecar },
        5 => Kind::SidecarCrash { sidecar, down: short, silent },
        6 => Kind::BalancerCrash { balancer, down: long, silent },
        7 => Kind::Partition { sidecar, balancer, ticks: long },
        8 => Kind::Stall { sidecar, balancer, ticks: long },
        9 => Kind::Slow { balancer, ticks: long },
        _ => Kind::Falsify { sidecar, balancer, add: random.one_in(2) },
    };
    Fault { at: random.within(20..ticks), kind }
}
