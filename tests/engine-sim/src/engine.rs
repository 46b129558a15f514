//! One engine: what all its data-parallel ranks share behind one HTTP port.
//!
//! Mirrors vLLM 0.32 with an internal load balancer: one API server, `--data-parallel-size` engine cores.

mod rank;
mod state;

use crate::config::SimConfig;
use crate::fault::Fault;
use crate::prompt::{MediaCache, Model};
use crate::publisher::Changes;
use crate::trtllm::pull::Queue;
pub use rank::{Answers, Place, QueueFull, Rank, Sources, submit};
pub use state::State;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio_util::sync::CancellationToken;

/// What HTTP handlers and the ranks' tasks share.
pub struct Engine {
    /// Settings.
    pub config: Arc<SimConfig>,
    /// The model directory.
    pub model: Arc<Model>,
    /// Processor cache, in front of all ranks.
    pub media: Mutex<MediaCache>,
    /// At least one.
    pub ranks: Vec<Arc<Rank>>,
    /// Ends all tasks; cancelled by the owner or by the fault `die`.
    pub stop: CancellationToken,
    /// Events that wait for a poll (TensorRT-LLM).
    pub pull: Arc<Queue>,
    /// Steps up to the last poll of `/metrics` (TensorRT-LLM).
    pub polled_steps: AtomicU64,
    changes: Changes,
    died: AtomicBool,
    /// Text of a request that ends the process, and the tokens of its answer before that.
    dies_of: Mutex<Option<(String, usize)>>,
    errors: Mutex<Vec<ErrorsLeft>>,
    request_number: AtomicU64,
    /// Where the search for the rank with the least work begins.
    next_rank: AtomicUsize,
}

/// Requests that are to fail, by the fault `error`.
struct ErrorsLeft {
    /// `None` = whatever the rank.
    rank: Option<usize>,
    left: u64,
    status: u16,
}

/// The request header `X-data-parallel-rank` names a rank that is not there.
#[derive(Debug, thiserror::Error)]
#[error("data_parallel_rank {rank} is out of range [0, {ranks})")]
pub struct NoSuchRank {
    rank: i64,
    ranks: usize,
}

impl Engine {
    /// An idle engine.
    pub fn new(
        config: Arc<SimConfig>,
        model: Arc<Model>,
        ranks: Vec<Arc<Rank>>,
        pull: Arc<Queue>,
        changes: Changes,
    ) -> Self {
        Self {
            config,
            model,
            media: Mutex::default(),
            ranks,
            stop: CancellationToken::new(),
            pull,
            polled_steps: AtomicU64::new(0),
            changes,
            died: AtomicBool::new(false),
            dies_of: Mutex::default(),
            errors: Mutex::default(),
            request_number: AtomicU64::new(0),
            next_rank: AtomicUsize::new(0),
        }
    }

    /// A place on the rank asked for, else on the one with the fewest requests, ties in turn.
    ///
    /// # Errors
    /// There is no such rank.
    pub fn place(&self, pinned: Option<i64>) -> Result<Place, NoSuchRank> {
        let ranks = self.ranks.len();
        if let Some(rank) = pinned {
            let found = usize::try_from(rank).ok().and_then(|index| self.ranks.get(index));
            return found.map(Place::on).ok_or(NoSuchRank { rank, ranks });
        }
        let start = self.next_rank.fetch_add(1, Ordering::Relaxed);
        let in_turn = (0..ranks).map(|i| &self.ranks[start.wrapping_add(i) % ranks]);
        let least = in_turn.min_by_key(|rank| rank.outstanding()).unwrap_or(&self.ranks[0]);
        Ok(Place::on(least))
    }

    /// Drops the prefix cache of every rank; false when one could not.
    pub fn reset_prefix_cache(&self) -> bool {
        let kept = self.ranks.iter().filter(|rank| !rank.reset_prefix_cache()).count();
        kept == 0
    }

    /// `/sleep` and `/wake_up`.
    pub fn set_asleep(&self, asleep: bool) {
        self.ranks.iter().for_each(|rank| rank.set_asleep(asleep));
    }

    /// What tests wait for and look at.
    pub fn state(&self) -> State {
        State::sum(self.ranks.iter().map(|rank| rank.state()).collect())
    }

    /// Waits until the state is as asked and returns it.
    pub async fn wait_for(&self, reached: impl Fn(&State) -> bool) -> State {
        let mut changes = self.changes.subscribe();
        loop {
            let state = self.state();
            if reached(&state) || changes.changed().await.is_err() {
                return state;
            }
        }
    }

    /// Whether the fault `die` ended the engine.
    pub fn has_died(&self) -> bool {
        self.died.load(Ordering::Relaxed)
    }

    /// A number for the next request's id.
    pub fn next_request(&self) -> u64 {
        self.request_number.fetch_add(1, Ordering::Relaxed)
    }

    /// Status with which this generation request is to fail, by a fault.
    pub fn take_error(&self, place: &Place) -> Option<u16> {
        let rank = place.rank().index;
        let mut errors = lock(&self.errors);
        let due = errors.iter_mut().find(|e| e.left > 0 && e.rank.is_none_or(|named| named == rank))?;
        due.left -= 1;
        Some(due.status)
    }

    /// Tokens after which the process ends of this request.
    pub(crate) fn dies_of(&self, body: &str) -> Option<usize> {
        lock(&self.dies_of).as_ref().filter(|(text, _)| body.contains(text.as_str())).map(|(_, after)| *after)
    }

    /// Applies a fault to one rank, or to all.
    ///
    /// # Errors
    /// There is no such rank.
    pub async fn fault(&self, fault: Fault, rank: Option<usize>) -> Result<(), NoSuchRank> {
        let ranks = match rank {
            None => &self.ranks[..],
            Some(rank) => self
                .ranks
                .get(rank..=rank)
                .ok_or(NoSuchRank { rank: i64::try_from(rank).unwrap_or(i64::MAX), ranks: self.ranks.len() })?,
        };
        match &fault {
            Fault::Error { count, status } => {
                let mut errors = lock(&self.errors);
                errors.retain(|e| e.rank != rank);
                errors.push(ErrorsLeft { rank, left: *count, status: *status });
            }
            // A dead rank takes the API server with it.
            Fault::Die => {
                self.died.store(true, Ordering::Relaxed);
                self.stop.cancel();
            }
            Fault::DieOf { text, after_tokens } => {
                *lock(&self.dies_of) = Some((text.clone(), *after_tokens));
                return Ok(());
            }
            Fault::Restart if rank.is_none() => lock(&self.media).clear(),
            _ => {}
        }
        for rank in ranks {
            rank.fault(fault.clone()).await;
        }
        Ok(())
    }
}

/// A poisoned lock means a panicked test; its data is still whole between steps.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
