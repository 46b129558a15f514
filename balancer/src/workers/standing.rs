//! What is thought of workers besides their load: who failed, who is new, who has enough.

use std::sync::{MutexGuard, PoisonError};
use std::time::Instant;

use fovea_balancer_core::choose::Candidate;
use fovea_balancer_core::fleet::{State, WorkerKey};
use fovea_balancer_core::health::{Health, Settings, Sign, Standing};
use fovea_balancer_core::queue::Bound;

use super::{PoolRef, Workers};

/// When a worker has enough, in requests and by the size of its cache.
#[derive(Clone, Copy, Debug)]
pub struct Saturation {
    /// 0 = however many.
    pub requests_max: u64,
    /// Outstanding tokens, as a multiple of what the KV cache holds; 0 = however many.
    pub cache_factor: f64,
}

impl Saturation {
    /// `capacity_tokens`: of the worker's cache; 0 = not known.
    #[expect(
        clippy::cast_precision_loss,
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "token counts are far below 2^53, and the factor is not negative"
    )]
    fn bound(self, capacity_tokens: u64) -> Bound {
        let tokens_max = (capacity_tokens as f64 * self.cache_factor) as u64;
        Bound { requests_max: self.requests_max, tokens_max }
    }
}

impl Workers {
    /// The same, with these settings of health.
    #[must_use]
    pub fn with_health(self, settings: Settings) -> Self {
        Self { health: Health::new(settings).into(), ..self }
    }

    /// What a request told of its worker.
    pub fn note(&self, key: WorkerKey, sign: Sign, now: Instant) {
        let mut health = self.health();
        let before = health.ejections();
        health.note(key, sign, now);
        if health.ejections() > before {
            tracing::warn!(key = key.0, "worker fails again and again, left out for a while");
        }
    }

    pub fn standing(&self, key: WorkerKey, now: Instant) -> Standing {
        self.health().standing(key, now)
    }

    /// Ejections so far.
    pub fn ejections(&self) -> u64 {
        self.health().ejections()
    }

    /// State of a worker; `None`: it has gone.
    pub fn state(&self, key: WorkerKey, now: Instant) -> Option<State> {
        let fleet = self.fleet();
        let worker = fleet.workers().iter().find(|worker| worker.key == key)?;
        Some(worker.state(fleet.freshness(), now))
    }

    /// Every worker of the pool that takes requests has enough; a pool without one has not.
    pub fn is_saturated(&self, pool: &PoolRef, saturation: Saturation, now: Instant) -> bool {
        let fleet = self.fleet();
        let mut ready = fleet
            .workers()
            .iter()
            .filter(|worker| worker.about.pool == *pool && worker.state(fleet.freshness(), now).takes_requests())
            .peekable();
        ready.peek().is_some()
            && ready.all(|worker| {
                let (report, booked) = (worker.load.last_report(), worker.load.booked() as u64);
                let requests = u64::from(report.running.saturating_add(report.waiting)).max(booked);
                let bound = saturation.bound(worker.about.capacity_tokens);
                bound.is_set() && bound.reached(requests, worker.load.outstanding_tokens())
            })
    }

    /// Ends when some worker's load may have fallen since the call before.
    pub async fn load_changed(&self) {
        self.freed.notified().await;
    }

    /// Leaves out who is ejected, and who is new and not in turn; but nobody who holds more of the prompt than those that stay.
    pub(super) fn sift(&self, candidates: &mut Vec<Candidate>, turn: u64, now: Instant) {
        let keys: Vec<_> = candidates.iter().map(|candidate| candidate.key).collect();
        let health = self.health();
        let (ejected, over) = (health.ejected(&keys, now), health.passed_over(&keys, turn, now));
        drop(health);
        if !ejected.contains(&true) && !over.contains(&true) {
            return;
        }
        let staying = |place: &usize| !ejected[*place] && !over[*place];
        let deepest = (0..keys.len()).filter(staying).map(|place| candidates[place].overlap_blocks[2]).max();
        // All the warm ones are ejected: new ones serve.
        let needed = |place: usize| deepest.is_none_or(|deepest| candidates[place].overlap_blocks[2] > deepest);
        let out: Vec<_> = (0..keys.len()).map(|place| ejected[place] || over[place] && !needed(place)).collect();
        if out.iter().all(|out| *out) {
            return;
        }
        for (key, _) in keys.iter().zip(&out).filter(|(_, out)| **out) {
            tracing::trace!(worker = key.0, standing = ?self.standing(*key, now), "left out");
        }
        let mut out = out.into_iter();
        candidates.retain(|_| !out.next().unwrap_or(false));
    }

    pub(super) fn health(&self) -> MutexGuard<'_, Health> {
        self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
