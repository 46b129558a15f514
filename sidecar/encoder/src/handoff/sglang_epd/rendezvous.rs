//! Matches answers with receivers by request id, whichever comes first. Pure: times are milliseconds given by the caller.
//!
//! **Invariant:** each receiver of a part gets its answer once; what finds no partner in time is forgotten, and the number of parts that
//! wait is bounded.

use std::collections::{BTreeSet, HashMap};

use super::Frames;
use super::wire::{Destination, Receiver};

/// Bounds of what waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Parts that wait for their other side.
    pub parts_max: usize,
    /// Longest wait for the other side, in milliseconds, counted anew when the answer comes.
    pub wait_ms: u64,
}

impl Default for Limits {
    fn default() -> Self {
        Self { parts_max: 4096, wait_ms: 60_000 }
    }
}

/// A message to go out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Send {
    pub req_id: String,
    pub to: Destination,
    pub frames: Frames,
}

/// Why one side is turned away.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MatchError {
    #[error("{parts_max} parts wait already: send fewer requests at once")]
    Full { parts_max: usize },
    #[error("req_id {req_id} was encoded already: use an id once")]
    Encoded { req_id: String },
    #[error("receive_count is {found}, earlier receivers of this part said {wanted}")]
    Count { found: u32, wanted: u32 },
}

#[derive(Debug)]
struct Waiting {
    answer: Option<Frames>,
    /// All that announced themselves; those before `served` have been sent to.
    receivers: Vec<Destination>,
    served: usize,
    expected: Option<u32>,
    deadline_ms: u64,
}

/// Parts that wait for their answer or for receivers.
#[derive(Debug)]
pub struct Rendezvous {
    limits: Limits,
    waiting: HashMap<String, Waiting>,
    deadlines: BTreeSet<(u64, String)>,
}

impl Rendezvous {
    pub fn new(limits: Limits) -> Self {
        Self { limits, waiting: HashMap::new(), deadlines: BTreeSet::new() }
    }

    /// Parts that wait.
    pub fn len(&self) -> usize {
        self.waiting.len()
    }

    pub fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// A part was encoded, or failed.
    ///
    /// # Errors
    /// When it was answered before, or too many wait.
    pub fn encoded(&mut self, req_id: &str, frames: Frames, now_ms: u64) -> Result<Vec<Send>, MatchError> {
        let waiting = self.entry(req_id, now_ms)?;
        if waiting.answer.is_some() {
            return Err(MatchError::Encoded { req_id: req_id.to_owned() });
        }
        waiting.answer = Some(frames);
        self.renew(req_id, now_ms);
        Ok(self.flush(req_id))
    }

    /// A receiver announced itself. The same one again changes nothing.
    ///
    /// # Errors
    /// When it contradicts another receiver of the part, or too many wait.
    pub fn receiver(&mut self, receiver: Receiver, now_ms: u64) -> Result<Vec<Send>, MatchError> {
        let Receiver { req_id, receive_count: found, to } = receiver;
        let waiting = self.entry(&req_id, now_ms)?;
        let wanted = *waiting.expected.get_or_insert(found);
        if wanted != found {
            return Err(MatchError::Count { found, wanted });
        }
        if !waiting.receivers.contains(&to) {
            waiting.receivers.push(to);
        }
        Ok(self.flush(&req_id))
    }

    /// Forgets a part, such as one whose client left.
    pub fn cancel(&mut self, req_id: &str) {
        if let Some(waiting) = self.waiting.remove(req_id) {
            self.deadlines.remove(&(waiting.deadline_ms, req_id.to_owned()));
        }
    }

    /// When [`Self::expire`] has something to do next.
    pub fn next_deadline_ms(&self) -> Option<u64> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// Forgets all whose time is over; gives their ids.
    pub fn expire(&mut self, now_ms: u64) -> Vec<String> {
        let mut expired = Vec::new();
        while self.next_deadline_ms().is_some_and(|deadline| deadline <= now_ms) {
            let Some((_, req_id)) = self.deadlines.pop_first() else { break };
            self.waiting.remove(&req_id);
            expired.push(req_id);
        }
        expired
    }

    fn entry(&mut self, req_id: &str, now_ms: u64) -> Result<&mut Waiting, MatchError> {
        let Limits { parts_max, wait_ms } = self.limits;
        if !self.waiting.contains_key(req_id) {
            if self.waiting.len() >= parts_max {
                return Err(MatchError::Full { parts_max });
            }
            let deadline_ms = now_ms.saturating_add(wait_ms);
            self.deadlines.insert((deadline_ms, req_id.to_owned()));
            let new = Waiting { answer: None, receivers: Vec::new(), served: 0, expected: None, deadline_ms };
            self.waiting.insert(req_id.to_owned(), new);
        }
        self.waiting.get_mut(req_id).ok_or(MatchError::Full { parts_max })
    }

    fn renew(&mut self, req_id: &str, now_ms: u64) {
        if let Some(waiting) = self.waiting.get_mut(req_id) {
            self.deadlines.remove(&(waiting.deadline_ms, req_id.to_owned()));
            waiting.deadline_ms = now_ms.saturating_add(self.limits.wait_ms);
            self.deadlines.insert((waiting.deadline_ms, req_id.to_owned()));
        }
    }

    /// What can go out; the part is forgotten when all its receivers have been sent to.
    fn flush(&mut self, req_id: &str) -> Vec<Send> {
        let Some(waiting) = self.waiting.get_mut(req_id) else { return Vec::new() };
        let Some(frames) = &waiting.answer else { return Vec::new() };
        let send = |to: &Destination| Send { req_id: req_id.to_owned(), to: to.clone(), frames: frames.clone() };
        let sends = waiting.receivers[waiting.served..].iter().map(send).collect();
        waiting.served = waiting.receivers.len();
        if waiting.expected.is_some_and(|expected| waiting.served >= expected as usize) {
            self.cancel(req_id);
        }
        sends
    }
}
