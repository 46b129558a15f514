//! The quarantine at work: who is suspect, and on which workers suspects are on trial.
//!
//! An engine *died* under a request when its sidecar says so of a broken or failed answer (it asked the engine and got no good answer),
//! when the sidecar's connection broke before an answer and its block stream is gone too, or when an answer broke off that had been
//! coming. Silence is no death, nor is a refused connection, nor an answer cut by a sidecar that drains.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fovea_balancer_core::fleet::WorkerKey;
use fovea_balancer_core::quarantine::{Fingerprint, Quarantine, Standing};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use tokio::sync::Notify;

/// What the quarantine shows.
#[derive(Clone, Debug, Default)]
pub struct SuspectMetrics {
    deaths: Counter,
    refused: Counter,
    entries: Gauge,
}

impl SuspectMetrics {
    pub fn register(r: &mut Registry) -> Self {
        let metrics = Self::default();
        r.register("engine_deaths", "Requests during which their engine died", metrics.deaths.clone());
        r.register("quarantine_refused", "Requests refused as poison", metrics.refused.clone());
        r.register("quarantine_entries", "Suspect and poison requests remembered", metrics.entries.clone());
        metrics
    }
}

pub struct Suspects {
    enabled: bool,
    quarantine: Mutex<Quarantine>,
    /// Workers that a suspect is on trial at: which trial, since when.
    trials: Mutex<BTreeMap<WorkerKey, (u64, Instant)>>,
    /// A trial counts for so long: what kills an engine does so soon, and others wait.
    trial_max: Duration,
    /// Suspects that have no place yet. They share out [`Self::all_within`], so that none of many is lost for want of one.
    waiting: AtomicU32,
    all_within: Duration,
    ended: Notify,
    metrics: SuspectMetrics,
}

impl Suspects {
    /// A trial counts for `trial_max` at most, and less where so many wait that they would not all be through in about twice `all_within`.
    pub fn new(
        quarantine: Quarantine,
        trial_max: Duration,
        all_within: Duration,
        enabled: bool,
        metrics: SuspectMetrics,
    ) -> Arc<Self> {
        let (quarantine, trials, waiting) = (Mutex::new(quarantine), Mutex::default(), AtomicU32::new(0));
        Arc::new(Self { enabled, quarantine, trials, trial_max, waiting, all_within, ended: Notify::new(), metrics })
    }

    pub fn enabled(&self) -> bool {
        self.enabled
    }

    pub fn standing(&self, print: Option<Fingerprint>) -> Standing {
        let Some(print) = print else { return Standing::Clear };
        let quarantine = lock(&self.quarantine);
        if quarantine.is_empty() { Standing::Clear } else { quarantine.standing(print, Instant::now()) }
    }

    /// A request was refused as poison.
    pub fn refused(&self) {
        self.metrics.refused.inc();
    }

    /// An engine died under this request.
    pub fn died(&self, print: Option<Fingerprint>) -> Standing {
        self.metrics.deaths.inc();
        let Some(print) = print else { return Standing::Clear };
        let mut quarantine = lock(&self.quarantine);
        let standing = quarantine.died(print, Instant::now());
        self.metrics.entries.set(i64::try_from(quarantine.len()).unwrap_or(i64::MAX));
        standing
    }

    /// Answered whole.
    pub fn answered(&self, print: Option<Fingerprint>) {
        let Some(print) = print else { return };
        let mut quarantine = lock(&self.quarantine);
        if !quarantine.is_empty() {
            quarantine.answered(print);
            quarantine.forget_old(Instant::now());
            self.metrics.entries.set(i64::try_from(quarantine.len()).unwrap_or(i64::MAX));
        }
    }

    /// No suspect is on trial at this worker.
    pub fn is_free(&self, key: WorkerKey, now: Instant) -> bool {
        let trials = lock(&self.trials);
        !trials.get(&key).is_some_and(|&(_, since)| self.lasts(since, trials.len(), now))
    }

    /// Some suspect is on trial.
    pub fn try_any(&self, now: Instant) -> bool {
        let trials = lock(&self.trials);
        trials.values().any(|&(_, since)| self.lasts(since, trials.len(), now))
    }

    fn lasts(&self, since: Instant, trials: usize, now: Instant) -> bool {
        now.saturating_duration_since(since) < self.trial(trials)
    }

    fn trial(&self, trials: usize) -> Duration {
        let places = u32::try_from(trials.max(1)).unwrap_or(u32::MAX);
        let share = self.all_within.saturating_mul(places) / self.waiting.load(Ordering::Relaxed).max(1);
        share.min(self.trial_max)
    }

    /// Ends when a trial has ended by its answer since the future was made.
    pub fn trial_ended(&self) -> tokio::sync::futures::Notified<'_> {
        self.ended.notified()
    }

    /// How long a trial counts at this moment.
    pub fn trial_now(&self) -> Duration {
        self.trial(lock(&self.trials).len())
    }

    /// A suspect waits for its place until this is dropped.
    pub fn wait(self: &Arc<Self>) -> Waits {
        self.waiting.fetch_add(1, Ordering::Relaxed);
        Waits(Arc::clone(self))
    }

    /// Puts a suspect on trial at a worker; `None`: another is there.
    pub fn begin(self: &Arc<Self>, key: WorkerKey, now: Instant) -> Option<Trial> {
        let mut trials = lock(&self.trials);
        let before = trials.get(&key).copied();
        if before.is_some_and(|(_, since)| self.lasts(since, trials.len(), now)) {
            return None;
        }
        let number = before.map_or(0, |(number, _)| number + 1);
        trials.insert(key, (number, now));
        drop(trials);
        Some(Trial { suspects: Arc::clone(self), key, number })
    }
}

pub struct Waits(Arc<Suspects>);

impl Drop for Waits {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// A suspect at a worker, until this is dropped.
pub struct Trial {
    suspects: Arc<Suspects>,
    key: WorkerKey,
    number: u64,
}

impl Drop for Trial {
    fn drop(&mut self) {
        let mut trials = lock(&self.suspects.trials);
        // Another may be on trial by now.
        if trials.get(&self.key).is_some_and(|&(number, _)| number == self.number) {
            trials.remove(&self.key);
        }
        drop(trials);
        self.suspects.ended.notify_waiters();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use fovea_balancer_core::quarantine::Settings;

    use super::*;

    const TRIAL: Duration = Duration::from_secs(1);

    fn suspects() -> Arc<Suspects> {
        Suspects::new(Quarantine::new(Settings::default()), TRIAL, 2 * TRIAL, true, SuspectMetrics::default())
    }

    #[tokio::test]
    async fn one_suspect_at_a_time_is_on_trial_at_a_worker() {
        let (suspects, now) = (suspects(), Instant::now());
        let first = suspects.begin(WorkerKey(1), now).unwrap();
        let (second, other) = (suspects.begin(WorkerKey(1), now), suspects.begin(WorkerKey(2), now));
        assert!(second.is_none() && other.is_some() && !suspects.is_free(WorkerKey(1), now));
        drop(first);
        assert!(suspects.is_free(WorkerKey(1), now) && suspects.try_any(now));
        drop(other);
        assert!(!suspects.try_any(now));
    }

    #[test]
    fn many_that_wait_share_the_time() {
        let (suspects, now) = (suspects(), Instant::now());
        let _trials = [1, 2].map(|key| suspects.begin(WorkerKey(key), now).unwrap());
        let waiting: Vec<_> = (0..40).map(|_| suspects.wait()).collect();
        // 2 s for 40 at two places.
        assert_eq!(suspects.trial_now(), TRIAL / 10);
        assert!(suspects.is_free(WorkerKey(1), now + TRIAL / 10));
        drop(waiting);
        assert_eq!(suspects.trial_now(), TRIAL);
    }

    #[test]
    fn a_trial_counts_for_its_time_and_ends_nobody_elses() {
        let (suspects, now) = (suspects(), Instant::now());
        let long = suspects.begin(WorkerKey(1), now).unwrap();
        let later = now + TRIAL;
        assert!(suspects.is_free(WorkerKey(1), later) && !suspects.try_any(later));
        let next = suspects.begin(WorkerKey(1), later).unwrap();
        drop(long);
        assert!(!suspects.is_free(WorkerKey(1), later), "the second one is still there");
        drop(next);
        assert!(suspects.is_free(WorkerKey(1), later));
    }
}
