//! Which workers are left out for a while: those that failed lately, and those too new to take a full share.
//!
//! A worker whose requests fail again and again is *ejected*: it gets nothing until a time is over, then one request as a probe.
//! **Invariant:** only so large a share of a pool is ejected at a time, and nobody when every worker looks sick: then the fault is
//! elsewhere, and a sick worker answers more than none.
//! **Invariant:** a new worker is passed over only while the pool has one that is not new.

use std::collections::{BTreeMap, VecDeque};
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::fleet::WorkerKey;

/// Failures remembered per worker, whatever the limit.
const FAILURES_MAX: usize = 64;
/// Share of its turns that a worker gets at its birth.
const FIRST_SHARE: f64 = 0.1;

#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Failures within `window` that eject a worker; 0 = none is ejected.
    pub failures_max: u32,
    pub window: Duration,
    /// Ejected this long, then probed by one request.
    pub open_for: Duration,
    /// Of a pool's workers, at most this share is ejected; one is allowed where there are two or more.
    pub ejected_share_max: f64,
    /// A worker's share grows over this time from its birth; 0 = at once.
    pub slow_start: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            failures_max: 5,
            window: Duration::from_secs(10),
            open_for: Duration::from_secs(5),
            ejected_share_max: 0.3,
            slow_start: Duration::from_secs(30),
        }
    }
}

/// What a request told of its worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sign {
    /// The engine answered, even if it refused.
    Served,
    /// No connection, or a 5xx.
    Failed,
}

/// What is thought of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Standing {
    Well,
    /// Gets nothing, as far as the pool's share allows.
    Ejected,
    /// The next request is its probe.
    Probed,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Breaker {
    Closed,
    Open {
        until: Instant,
    },
    /// A probe is on its way; another may go after `until`.
    HalfOpen {
        until: Instant,
    },
}

#[derive(Clone, Debug)]
struct WorkerHealth {
    born_at: Instant,
    /// Times of failures within the window, oldest first, and how many answers came after each.
    failures: VecDeque<(Instant, u64)>,
    breaker: Breaker,
}

/// One failure in so many answers is no sickness: a busy worker has its share of requests that fail by themselves.
const FAILED_SHARE: u64 = 10;

/// The health of all workers of a balancer.
#[derive(Clone, Debug)]
pub struct Health {
    settings: Settings,
    workers: BTreeMap<WorkerKey, WorkerHealth>,
    ejections: u64,
}

impl Health {
    pub fn new(settings: Settings) -> Self {
        Self { settings, workers: BTreeMap::new(), ejections: 0 }
    }

    /// Each worker that joins must leave by [`Self::remove`].
    pub fn add(&mut self, key: WorkerKey, now: Instant) {
        let fresh = WorkerHealth { born_at: now, failures: VecDeque::new(), breaker: Breaker::Closed };
        self.workers.insert(key, fresh);
    }

    pub fn remove(&mut self, key: WorkerKey) {
        self.workers.remove(&key);
    }

    /// Ejections so far.
    pub fn ejections(&self) -> u64 {
        self.ejections
    }

    /// A request went to this worker: a probe, where one is due.
    pub fn sent(&mut self, key: WorkerKey, now: Instant) {
        let until = now + self.settings.open_for;
        if let Some(worker) = self.workers.get_mut(&key)
            && standing(worker, now) == Standing::Probed
        {
            worker.breaker = Breaker::HalfOpen { until };
        }
    }

    /// A request told something of its worker. An unknown worker is ignored: it has gone.
    pub fn note(&mut self, key: WorkerKey, sign: Sign, now: Instant) {
        let Settings { failures_max, window, open_for, .. } = self.settings;
        let Some(worker) = self.workers.get_mut(&key) else { return };
        match (sign, worker.breaker) {
            (Sign::Served, Breaker::Open { until }) if until > now => {}
            (Sign::Served, Breaker::Open { .. } | Breaker::HalfOpen { .. }) => {
                worker.breaker = Breaker::Closed;
                worker.failures.clear();
            }
            (Sign::Served, Breaker::Closed) => {
                if let Some((_, served)) = worker.failures.back_mut() {
                    *served += 1;
                }
            }
            (Sign::Failed, Breaker::HalfOpen { .. }) => {
                worker.breaker = Breaker::Open { until: now + open_for };
                self.ejections += 1;
            }
            (Sign::Failed, Breaker::Open { .. }) => {}
            (Sign::Failed, Breaker::Closed) => {
                let is_old = |(at, _): &(Instant, u64)| now.saturating_duration_since(*at) >= window;
                while worker.failures.len() >= FAILURES_MAX || worker.failures.front().is_some_and(is_old) {
                    worker.failures.pop_front();
                }
                worker.failures.push_back((now, 0));
                let limit = usize::try_from(failures_max).unwrap_or(usize::MAX).min(FAILURES_MAX);
                let served: u64 = worker.failures.iter().map(|(_, served)| served).sum();
                let share = worker.failures.len() as u64 * FAILED_SHARE >= served;
                if failures_max > 0 && worker.failures.len() >= limit && share {
                    worker.breaker = Breaker::Open { until: now + open_for };
                    worker.failures.clear();
                    self.ejections += 1;
                }
            }
        }
    }

    pub fn standing(&self, key: WorkerKey, now: Instant) -> Standing {
        self.workers.get(&key).map_or(Standing::Well, |worker| standing(worker, now))
    }

    /// Which of a pool's `workers` are left out by their standing; in their order. Where more are sick than may be ejected, those that
    /// failed last are.
    pub fn ejected(&self, workers: &[WorkerKey], now: Instant) -> Vec<bool> {
        let mut sick: Vec<(Instant, usize)> = Vec::new();
        for (place, key) in workers.iter().enumerate() {
            let seen = self.workers.get(key).map(|worker| (standing(worker, now), worker.breaker));
            if let Some((Standing::Ejected, Breaker::Open { until } | Breaker::HalfOpen { until })) = seen {
                sick.push((until, place));
            }
        }
        let mut out = vec![false; workers.len()];
        if sick.len() < workers.len() {
            sick.sort_unstable_by(|a, b| b.cmp(a));
            sick.iter().take(self.ejected_max(workers.len())).for_each(|(_, place)| out[*place] = true);
        }
        out
    }

    fn ejected_max(&self, workers: usize) -> usize {
        if workers < 2 {
            return 0;
        }
        // At least one: a share of two workers would be none.
        let share = (0..=workers).rev().find(|&count| ratio(count, workers) <= self.settings.ejected_share_max);
        share.unwrap_or(0).max(1)
    }

    /// Which of a pool's `workers` leave this turn to others because they are new; in their order. Their share grows with their age.
    pub fn passed_over(&self, workers: &[WorkerKey], turn: u64, now: Instant) -> Vec<bool> {
        let slow = self.settings.slow_start;
        let age = |key: &WorkerKey| self.workers.get(key).map(|worker| now.saturating_duration_since(worker.born_at));
        let is_new = |key: &WorkerKey| age(key).is_some_and(|age| age < slow);
        if slow.is_zero() || workers.iter().all(is_new) {
            return vec![false; workers.len()];
        }
        let over = |key: &WorkerKey| {
            is_new(key) && {
                let grown = age(key).unwrap_or(slow).as_secs_f64() / slow.as_secs_f64();
                unit(xxh3_64_with_seed(&turn.to_le_bytes(), key.0)) >= grown.max(FIRST_SHARE)
            }
        };
        workers.iter().map(over).collect()
    }
}

fn standing(worker: &WorkerHealth, now: Instant) -> Standing {
    match worker.breaker {
        Breaker::Closed => Standing::Well,
        Breaker::Open { until } | Breaker::HalfOpen { until } if until > now => Standing::Ejected,
        Breaker::Open { .. } | Breaker::HalfOpen { .. } => Standing::Probed,
    }
}

#[expect(clippy::cast_precision_loss, reason = "counts of workers are far below 2^53")]
fn ratio(count: usize, of: usize) -> f64 {
    count as f64 / of as f64
}

/// A hash as a number from 0 to 1.
#[expect(clippy::cast_precision_loss, reason = "the upper 53 bits fit")]
fn unit(hash: u64) -> f64 {
    (hash >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests;
