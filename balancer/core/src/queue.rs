//! Requests that wait for room at a worker: who is next.
//!
//! Tenants take turns by deficit round robin, counted in prompt tokens, so that a tenant with many or long requests waits behind itself.
//! Within one tenant lower priority goes first, as vLLM reads its `priority` field, then first come, first served: a client's priority moves
//! nobody but its own tenant's others.
//! **Invariant:** at most `waiting_max` wait; an answer to [`Queue::leave`] leaves nothing behind.

use std::collections::{BTreeMap, VecDeque};

/// Tokens that a tenant may take in one turn: about one prompt.
const QUANTUM_TOKENS: u64 = 8_192;
/// Tokens that a request counts for at least: an answer costs something too.
const REQUEST_TOKENS_MIN: u64 = 256;
/// Priorities beyond these are cut to them.
pub const PRIORITIES: std::ops::RangeInclusive<i64> = -1_000..=1_000;

/// Names one waiting request; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Ticket(u64);

/// What decides about a place in the queue.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Claim {
    /// Lower goes first.
    pub priority: i64,
    /// 0 = all who are not told apart.
    pub tenant: u32,
    /// Prompt tokens.
    pub tokens: u64,
    /// Share of the tenant, as a multiple of the smallest; 0 counts as 1.
    pub weight: u32,
}

#[derive(Clone, Debug)]
struct Waiting<T> {
    tokens: u64,
    what: T,
}

#[derive(Clone, Debug)]
struct Lane<T> {
    tenant: u32,
    /// By priority, then as they came; not empty.
    waiting: BTreeMap<(i64, Ticket), Waiting<T>>,
    /// Tokens it may still take in this turn.
    credit: u64,
    /// Tokens that it gets per turn.
    quantum: u64,
}

impl<T> Lane<T> {
    /// Tokens that its first one lacks.
    fn need(&self) -> u64 {
        self.waiting.first_key_value().map_or(0, |(_, first)| first.tokens.saturating_sub(self.credit))
    }
}

/// All that wait for one pool.
#[derive(Clone, Debug)]
pub struct Queue<T> {
    waiting_max: usize,
    /// Tenants in order of their turns.
    lanes: VecDeque<Lane<T>>,
    /// Where each waits.
    places: BTreeMap<Ticket, (i64, u32)>,
    next: u64,
}

impl<T> Queue<T> {
    pub fn new(waiting_max: usize) -> Self {
        Self { waiting_max, lanes: VecDeque::new(), places: BTreeMap::new(), next: 0 }
    }

    pub fn len(&self) -> usize {
        self.places.len()
    }

    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Takes a place; `what` comes back when the queue is full, or when the tenant, if told apart, has half of it.
    ///
    /// # Errors
    /// When as many wait as may.
    pub fn join(&mut self, claim: Claim, what: T) -> Result<Ticket, T> {
        let place = self.lanes.iter().position(|lane| lane.tenant == claim.tenant);
        let own = place.map_or(0, |at| self.lanes[at].waiting.len());
        let own_max = if claim.tenant == 0 { self.waiting_max } else { self.waiting_max.div_ceil(2) };
        if self.places.len() >= self.waiting_max || own >= own_max {
            return Err(what);
        }
        let ticket = Ticket(self.next);
        self.next += 1;
        let priority = claim.priority.clamp(*PRIORITIES.start(), *PRIORITIES.end());
        let waiting = Waiting { tokens: claim.tokens.max(REQUEST_TOKENS_MIN), what };
        let quantum = QUANTUM_TOKENS * u64::from(claim.weight.max(1));
        if let Some(at) = place {
            let lane = &mut self.lanes[at];
            lane.waiting.insert((priority, ticket), waiting);
            lane.quantum = quantum;
        } else {
            let waiting = BTreeMap::from([((priority, ticket), waiting)]);
            self.lanes.push_back(Lane { tenant: claim.tenant, waiting, credit: 0, quantum });
        }
        self.places.insert(ticket, (priority, claim.tenant));
        Ok(ticket)
    }

    /// The next in turn.
    pub fn pop(&mut self) -> Option<(Ticket, T)> {
        let lanes = &mut self.lanes;
        // A long prompt saves up over several rounds; all but the last at once, so that the work is bounded by the number of tenants.
        let rounds = lanes.iter().map(|lane| lane.need().div_ceil(lane.quantum)).min()?;
        lanes.iter_mut().for_each(|lane| lane.credit += rounds.saturating_sub(1) * lane.quantum);
        while lanes.front().is_some_and(|lane| lane.need() > 0) {
            let mut lane = lanes.pop_front()?;
            lane.credit += lane.quantum;
            // Its turn is now if that was enough.
            if lane.need() == 0 { lanes.push_front(lane) } else { lanes.push_back(lane) }
        }
        let lane = lanes.front_mut()?;
        let ((_, ticket), first) = lane.waiting.pop_first()?;
        lane.credit = lane.credit.saturating_sub(first.tokens);
        if lane.waiting.is_empty() {
            // Credit is not saved for later.
            lanes.pop_front();
        } else if lane.need() > 0 {
            lanes.rotate_left(1);
        }
        self.places.remove(&ticket);
        Some((ticket, first.what))
    }

    /// Gives the place up. `None`: it is not waiting any more.
    pub fn leave(&mut self, ticket: Ticket) -> Option<T> {
        let (priority, tenant) = self.places.remove(&ticket)?;
        let at = self.lanes.iter().position(|lane| lane.tenant == tenant)?;
        let left = self.lanes[at].waiting.remove(&(priority, ticket))?;
        if self.lanes[at].waiting.is_empty() {
            self.lanes.remove(at);
        }
        Some(left.what)
    }
}

/// What a worker may have on its hands before it counts as saturated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Bound {
    /// Requests running and waiting; 0 = no bound.
    pub requests_max: u64,
    /// Tokens outstanding; 0 = no bound.
    pub tokens_max: u64,
}

impl Bound {
    pub fn is_set(&self) -> bool {
        self.requests_max > 0 || self.tokens_max > 0
    }

    /// No more is sent to a worker with so much.
    pub fn reached(&self, requests: u64, tokens: u64) -> bool {
        (self.requests_max > 0 && requests >= self.requests_max) || (self.tokens_max > 0 && tokens >= self.tokens_max)
    }
}

#[cfg(test)]
mod tests;
