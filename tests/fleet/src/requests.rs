//! Requests: routed by the real choice, cancelled at any point, tried once more where the worker fails before its first byte.

use std::sync::Arc;

use fovea_balancer_core::fleet::WorkerKey;
use fovea_balancer_core::load::BookingId;
use fovea_kv::SequenceHash;

use crate::prompt::Block;
use crate::world::World;
use crate::{Break, Tick};

/// Different first parts of prompts.
const CONVERSATIONS: usize = 24;

pub struct Request {
    pub balancer: usize,
    /// Life of the balancer.
    since: Tick,
    pub key: WorkerKey,
    booking: BookingId,
    pub sidecar: usize,
    life: u64,
    pub prompt: Arc<[Block]>,
    first_at: Tick,
    done_at: Tick,
    cancel_at: Option<Tick>,
    pub started: bool,
    retried: bool,
}

enum Turn {
    Goes,
    Starts,
    Ends,
    Fails,
    /// Its balancer is gone.
    Lost,
}

impl World {
    pub fn request(&mut self) -> Result<(), String> {
        let balancer = self.random.below(self.balancers.len());
        if !self.balancers[balancer].up {
            return Ok(());
        }
        let prompt: Arc<[Block]> = self.tree.prompt(CONVERSATIONS, &mut self.random).into();
        self.check_lookup(balancer, &prompt)?;
        self.send(balancer, prompt, None);
        Ok(())
    }

    fn send(&mut self, balancer: usize, prompt: Arc<[Block]>, avoid: Option<WorkerKey>) {
        let chain: Vec<SequenceHash> = prompt.iter().map(|block| block.hash).collect();
        let Some(chosen) = self.balancers[balancer].route(&chain, avoid, self.now) else { return };
        self.routed += 1;
        let first_at = self.now + self.random.within(1..20);
        let done_at = first_at + self.random.within(1..60);
        let cancelled = self.random.one_in(4);
        let cancel_at = cancelled.then(|| self.now + self.random.within(0..80));
        self.requests.push(Request {
            balancer,
            since: self.balancers[balancer].since,
            key: chosen.key,
            booking: chosen.booking,
            sidecar: chosen.sidecar,
            life: self.sidecars[chosen.sidecar].life,
            prompt,
            first_at,
            done_at,
            cancel_at,
            started: false,
            retried: avoid.is_some(),
        });
    }

    pub fn advance_requests(&mut self) -> Result<(), String> {
        let requests = std::mem::take(&mut self.requests);
        for mut request in requests {
            match self.turn(&request) {
                Turn::Goes => self.requests.push(request),
                Turn::Lost => {}
                Turn::Starts => {
                    self.engines[request.sidecar].compute(&request.prompt, &mut self.random);
                    let balancer = &mut self.balancers[request.balancer];
                    let at = balancer.at(self.now);
                    balancer.fleet.started(request.key, request.booking, false, at);
                    request.started = true;
                    self.requests.push(request);
                }
                Turn::Ends => self.release(&request),
                Turn::Fails => {
                    self.release(&request);
                    if !request.started && !request.retried {
                        self.send(request.balancer, request.prompt, Some(request.key));
                    }
                }
            }
        }
        Ok(())
    }

    fn release(&mut self, request: &Request) {
        if self.broken == Some(Break::LeakBooking) && request.cancel_at.is_some() {
            return;
        }
        let fleet = &mut self.balancers[request.balancer].fleet;
        fleet.release(request.key, request.booking, !request.started);
    }

    fn turn(&self, request: &Request) -> Turn {
        let (balancer, sidecar) = (&self.balancers[request.balancer], &self.sidecars[request.sidecar]);
        if !balancer.up || balancer.since != request.since {
            Turn::Lost
        } else if request.cancel_at.is_some_and(|at| at <= self.now) {
            Turn::Ends
        } else if !sidecar.up || sidecar.life != request.life || !self.engines[request.sidecar].up {
            Turn::Fails
        } else if !request.started && request.first_at <= self.now {
            Turn::Starts
        } else if request.done_at <= self.now {
            Turn::Ends
        } else {
            Turn::Goes
        }
    }
}
