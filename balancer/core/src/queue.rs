//! Requests that wait for room at a worker: who is next.
//!
//! Lower priority first, as vLLM reads its `priority` field. Within one priority tenants take turns by deficit round robin, counted in
//! prompt tokens, so that a tenant with many or long requests waits behind itself; within one tenant first come, first served.
//! **Invariant:** at most `waiting_max` wait; an answer to [`Queue::leave`] leaves nothing behind.

use std::collections::{BTreeMap, VecDeque};

/// Tokens that a tenant may take in one turn: about one prompt.
const QUANTUM_TOKENS: u64 = 8_192;
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
    ticket: Ticket,
    tokens: u64,
    what: T,
}

#[derive(Clone, Debug)]
struct Lane<T> {
    tenant: u32,
    waiting: VecDeque<Waiting<T>>,
    /// Tokens it may still take in this turn.
    credit: u64,
    /// Tokens that it gets per turn.
    quantum: u64,
}

impl<T> Lane<T> {
    /// Tokens that its first one lacks.
    fn need(&self) -> u64 {
        self.waiting.front().map_or(0, |first| first.tokens.saturating_sub(self.credit))
    }
}

/// All that wait for one pool.
#[derive(Clone, Debug)]
pub struct Queue<T> {
    waiting_max: usize,
    /// By priority, tenants in order of their turns; none is empty.
    levels: BTreeMap<i64, VecDeque<Lane<T>>>,
    /// Where each waits.
    places: BTreeMap<Ticket, (i64, u32)>,
    next: u64,
}

impl<T> Queue<T> {
    pub fn new(waiting_max: usize) -> Self {
        Self { waiting_max, levels: BTreeMap::new(), places: BTreeMap::new(), next: 0 }
    }

    pub fn len(&self) -> usize {
        self.places.len()
    }

    pub fn is_empty(&self) -> bool {
        self.places.is_empty()
    }

    /// Takes a place; `what` comes back when the queue is full.
    ///
    /// # Errors
    /// When as many wait as may.
    pub fn join(&mut self, claim: Claim, what: T) -> Result<Ticket, T> {
        if self.places.len() >= self.waiting_max {
            return Err(what);
        }
        let ticket = Ticket(self.next);
        self.next += 1;
        let priority = claim.priority.clamp(*PRIORITIES.start(), *PRIORITIES.end());
        let lanes = self.levels.entry(priority).or_default();
        let waiting = Waiting { ticket, tokens: claim.tokens, what };
        let quantum = QUANTUM_TOKENS * u64::from(claim.weight.max(1));
        match lanes.iter_mut().find(|lane| lane.tenant == claim.tenant) {
            Some(lane) => {
                lane.waiting.push_back(waiting);
                lane.quantum = quantum;
            }
            None => lanes.push_back(Lane { tenant: claim.tenant, waiting: [waiting].into(), credit: 0, quantum }),
        }
        self.places.insert(ticket, (priority, claim.tenant));
        Ok(ticket)
    }

    /// The next in turn.
    pub fn pop(&mut self) -> Option<(Ticket, T)> {
        let mut level = self.levels.first_entry()?;
        let lanes = level.get_mut();
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
        let first = lane.waiting.pop_front()?;
        lane.credit = lane.credit.saturating_sub(first.tokens);
        if lane.waiting.is_empty() {
            // Credit is not saved for later.
            lanes.pop_front();
        } else if lane.need() > 0 {
            lanes.rotate_left(1);
        }
        if lanes.is_empty() {
            level.remove();
        }
        self.places.remove(&first.ticket);
        Some((first.ticket, first.what))
    }

    /// Gives the place up. `None`: it is not waiting any more.
    pub fn leave(&mut self, ticket: Ticket) -> Option<T> {
        let (priority, tenant) = self.places.remove(&ticket)?;
        let lanes = self.levels.get_mut(&priority)?;
        let at = lanes.iter().position(|lane| lane.tenant == tenant)?;
        let lane = &mut lanes[at];
        let place = lane.waiting.binary_search_by_key(&ticket, |waiting| waiting.ticket).ok()?;
        let left = lane.waiting.remove(place)?;
        if lane.waiting.is_empty() {
            lanes.remove(at);
        }
        if lanes.is_empty() {
            self.levels.remove(&priority);
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
