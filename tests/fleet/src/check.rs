//! What must hold: after each message, after each tick, and at rest.

use fovea_kv::{SequenceHash, Tier};

use crate::Tick;
use crate::prompt::Block;
use crate::stream::{Conn, WIRE_MAX};
use crate::world::World;

/// A balancer that came back routes exactly after so long.
const EXACT_AFTER: Tick = 100;
/// More than any snapshot or repair of these engines.
const WIRE_SLACK: usize = 16 << 10;

impl World {
    /// The index holds what the sidecar published at the watermark applied, no more and no less.
    pub fn check_seat(&self, conn: &Conn) -> Result<(), String> {
        let (seat, at) = (&conn.seat, format!("sidecar {} at balancer {}", conn.sidecar, conn.balancer));
        let Some((epoch, seq)) = seat.inbox.watermark(0) else { return Ok(()) };
        let mirror = seat.mirror.sums();
        let published = self.sidecars[conn.sidecar].history.get(&(conn.life, epoch, seq));
        if published != Some(&mirror) {
            return Err(format!("{at}: what was told up to {epoch}/{seq} is not what was published then"));
        }
        let held = seat.place.and_then(|(_, index)| self.balancers[conn.balancer].index.digest(index));
        if !seat.falsified && held != Some(mirror) {
            return Err(format!("{at}: the index does not hold what was told up to {epoch}/{seq}"));
        }
        Ok(())
    }

    /// A lookup finds what the mirrors hold.
    pub fn check_lookup(&self, balancer: usize, prompt: &[Block]) -> Result<(), String> {
        let chain: Vec<SequenceHash> = prompt.iter().map(|block| block.hash).collect();
        let mut depths = Vec::new();
        self.balancers[balancer].index.depths(&chain, &mut depths);
        for conn in self.conns.iter().filter(|conn| conn.balancer == balancer && conn.balancer_open) {
            let Some((_, index)) = conn.seat.place.filter(|_| !conn.seat.falsified) else { continue };
            let found = depths.iter().find(|depth| depth.worker == index).map_or(0, |depth| depth.depth[0]);
            if found as usize != conn.seat.mirror.depth(&chain) {
                return Err(format!(
                    "a lookup at balancer {balancer} finds {found} blocks of sidecar {}",
                    conn.sidecar
                ));
            }
        }
        Ok(())
    }

    /// After each tick.
    pub fn check(&self) -> Result<(), String> {
        for (at, balancer) in self.balancers.iter().enumerate().filter(|(_, balancer)| balancer.up) {
            let is_there = |key| balancer.fleet.workers().iter().any(|worker| worker.key == key);
            let live = self.requests.iter().filter(|request| request.balancer == at && is_there(request.key)).count();
            if balancer.booked() != live {
                return Err(format!("balancer {at} has {} bookings for {live} requests", balancer.booked()));
            }
            if self.now == balancer.since + EXACT_AFTER {
                self.check_return(at)?;
            }
        }
        for conn in &self.conns {
            if conn.in_flight > WIRE_MAX + WIRE_SLACK {
                return Err(format!("{} bytes on one stream", conn.in_flight));
            }
        }
        for sidecar in &self.sidecars {
            let (bytes, frames) = sidecar.outbox.held(0);
            if bytes > sidecar.ring.bytes || frames > sidecar.ring.frames {
                return Err(format!("a ring holds {bytes} bytes in {frames} frames"));
            }
        }
        Ok(())
    }

    fn check_return(&self, balancer: usize) -> Result<(), String> {
        let since = self.balancers[balancer].since;
        if self.slow_until[balancer] > since {
            return Ok(());
        }
        for (at, sidecar) in self.sidecars.iter().enumerate() {
            let within_reach = sidecar.up && sidecar.since <= since && self.dials[at][balancer].blocked_until <= since;
            let stands = |conn: &Conn| (conn.sidecar, conn.balancer, conn.was_live) == (at, balancer, true);
            if within_reach && !self.conns.iter().any(stands) {
                return Err(format!("balancer {balancer} came back and does not know sidecar {at} after 1 s"));
            }
        }
        Ok(())
    }

    /// No fault for long: everybody holds the truth, or says that it is partial.
    pub fn check_rest(&self) -> Result<(), String> {
        for (at, (sidecar, engine)) in self.sidecars.iter().zip(&self.engines).enumerate() {
            let published = sidecar.published();
            let truth = engine.truth();
            if !sidecar.replica.is_live() {
                return Err(format!("sidecar {at} does not follow its engine"));
            }
            // A level never stored to equals the one below, and is left empty.
            let upper = if published[1].is_empty() { &published[0] } else { &published[1] };
            let is_whole = published[0] == truth[0] && *upper == truth[1];
            let is_part = published[0].is_subset(&truth[0]) && upper.is_subset(&truth[1]);
            if !is_part || (sidecar.replica.is_complete() && !is_whole) {
                let excess = published[0].difference(&truth[0]).count();
                let missing = truth[0].difference(&published[0]).count();
                return Err(format!("sidecar {at}: {excess} blocks too many, {missing} missing"));
            }
            for balancer in 0..self.balancers.len() {
                self.check_pair(at, balancer)?;
            }
        }
        if !self.requests.is_empty() || self.balancers.iter().any(|balancer| balancer.booked() > 0) {
            return Err("requests or bookings are left".to_owned());
        }
        Ok(())
    }

    fn check_pair(&self, sidecar: usize, balancer: usize) -> Result<(), String> {
        let ours = |conn: &&Conn| (conn.sidecar, conn.balancer) == (sidecar, balancer);
        let conns: Vec<_> = self.conns.iter().filter(ours).collect();
        let [conn] = conns.as_slice() else {
            return Err(format!("{} streams from sidecar {sidecar} to balancer {balancer}", conns.len()));
        };
        let wrong = |what: &str| Err(format!("balancer {balancer} holds {what} of sidecar {sidecar}"));
        if conn.seat.inbox.watermark(0) != self.sidecars[sidecar].outbox.watermark(0) {
            return wrong("an old state");
        }
        let Some((_, index)) = conn.seat.place else { return wrong("nothing") };
        for level in Tier::ALL {
            let held: std::collections::BTreeSet<_> =
                self.balancers[balancer].index.held(index, level).into_iter().collect();
            if held != self.sidecars[sidecar].publisher.snapshot(level).into_iter().collect() {
                return wrong("something else than what is published");
            }
        }
        Ok(())
    }

    /// Takes a leaf out of the index, or puts a block in that nobody has.
    pub fn falsify(&mut self, sidecar: usize, balancer: usize, add: bool) {
        let minors = (self.plan.sidecar_minors[sidecar], self.plan.balancer_minors[balancer]);
        let bogus = SequenceHash(self.random.next() | 1);
        let index = &mut self.balancers[balancer].index;
        let ours = |conn: &&mut Conn| (conn.sidecar, conn.balancer) == (sidecar, balancer) && conn.balancer_open;
        let Some(conn) = self.conns.iter_mut().find(ours).filter(|_| minors == (2, 2)) else { return };
        let seat = &mut conn.seat;
        let Some((_, place)) = seat.place.filter(|_| seat.mirror.is_live && seat.inbox.watermark(0).is_some()) else {
            return;
        };
        seat.falsified = true;
        if add {
            let stored = index.apply_stored(place, Tier::Gpu, &[bogus]);
            debug_assert!(stored.is_ok(), "the index has room");
        } else if let Some(leaf) = seat.mirror.live[0].last() {
            index.apply_removed(place, Tier::Gpu, &[*leaf]);
        }
    }
}
