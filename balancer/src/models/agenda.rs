//! Which model is pulled next, from which worker, and when again after a failure. Time is an argument.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Source;
use super::pull::PullEnd;

/// Models pulled at a time; one takes tens of MB.
const MODELS_MAX: usize = 32;
/// Pause after the first failure; it doubles with each.
const PAUSE_FIRST: Duration = Duration::from_secs(1);
const PAUSE_MAX: Duration = Duration::from_secs(60);
/// A model without a connected worker for this long is forgotten, so that another one under its name is pulled anew.
const FORGET_AFTER: Duration = Duration::from_secs(60);

/// A connected worker.
#[derive(Clone, Debug)]
pub struct Seen {
    pub source: Source,
    /// Base URL of its sidecar.
    pub url: Arc<str>,
    pub takes_requests: bool,
}

#[derive(Debug)]
struct Entry {
    source: Source,
    seen_at: Instant,
    /// `None` = it is there.
    due: Option<Instant>,
    failures: u32,
    /// Causes of failures that were told.
    told: Vec<PullEnd>,
}

/// What is known of the models to be pulled.
#[derive(Debug, Default)]
pub struct Agenda {
    entries: Vec<Entry>,
    /// That there are too many was told.
    overfull: bool,
}

impl Agenda {
    /// Notes the workers that are connected now. Gives the models to be forgotten.
    pub fn see(&mut self, workers: &[Seen], now: Instant) -> Vec<Source> {
        for Seen { source, .. } in workers {
            let room = self.entries.len() < MODELS_MAX;
            match self.entries.iter_mut().find(|entry| entry.source == *source) {
                Some(entry) => entry.seen_at = now,
                None if room => {
                    let source = source.clone();
                    self.entries.push(Entry { source, seen_at: now, due: Some(now), failures: 0, told: Vec::new() });
                }
                None if !self.overfull => {
                    tracing::warn!(
                        limit = MODELS_MAX,
                        model = source.name(),
                        "too many models: this one is not pulled"
                    );
                    self.overfull = true;
                }
                None => {}
            }
        }
        let gone = |entry: &mut Entry| now.saturating_duration_since(entry.seen_at) >= FORGET_AFTER;
        self.entries.extract_if(.., gone).map(|entry| entry.source).collect()
    }

    /// The model to be pulled now, and where from: another worker after each failure.
    pub fn next(&self, workers: &[Seen], now: Instant) -> Option<(Source, Arc<str>)> {
        self.entries.iter().filter(|entry| entry.due.is_some_and(|due| due <= now)).find_map(|entry| {
            let ready: Vec<_> = workers.iter().filter(|w| w.takes_requests && w.source == entry.source).collect();
            let turn = (entry.failures as usize).checked_rem(ready.len())?;
            Some((entry.source.clone(), Arc::clone(&ready[turn].url)))
        })
    }

    pub fn done(&mut self, source: &Source) {
        self.of(source).into_iter().for_each(|entry| entry.due = None);
    }

    /// True = this cause is new for this model.
    pub fn failed(&mut self, source: &Source, cause: PullEnd, now: Instant) -> bool {
        let Some(entry) = self.of(source) else { return true };
        let pause = PAUSE_FIRST.saturating_mul(1 << entry.failures.min(16)).min(PAUSE_MAX);
        entry.due = Some(now + pause);
        entry.failures = entry.failures.saturating_add(1);
        let new = !entry.told.contains(&cause);
        if new {
            entry.told.push(cause);
        }
        new
    }

    fn of(&mut self, source: &Source) -> Option<&mut Entry> {
        self.entries.iter_mut().find(|entry| entry.source == *source)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worker(name: &str, url: &str, takes_requests: bool) -> Seen {
        let base_names = vec![name.to_owned()].into();
        let source = Source { base_names, engine_model: "/model".to_owned(), engine_version: "1".to_owned() };
        Seen { source, url: url.into(), takes_requests }
    }

    fn url(next: Option<(Source, Arc<str>)>) -> Option<String> {
        next.map(|(_, url)| url.to_string())
    }

    #[test]
    fn a_failure_waits_longer_each_time_and_asks_another_worker() {
        let (mut agenda, mut now) = (Agenda::default(), Instant::now());
        let workers = [worker("m", "a", true), worker("m", "b", true), worker("m", "c", false)];
        let source = workers[0].source.clone();
        agenda.see(&workers, now);
        for (failures, from) in ["a", "b", "a", "b", "a", "b", "a", "b"].into_iter().enumerate() {
            assert_eq!(url(agenda.next(&workers, now)).as_deref(), Some(from));
            assert_eq!(agenda.failed(&source, PullEnd::NotTrusted, now), failures == 0, "told once");
            let pause = Duration::from_secs(1 << failures).min(PAUSE_MAX);
            assert_eq!(url(agenda.next(&workers, now + pause - Duration::from_millis(1))), None);
            now += pause;
        }
        assert!(agenda.failed(&source, PullEnd::Status, now));
        agenda.done(&source);
        assert_eq!(url(agenda.next(&workers, now + PAUSE_MAX)), None);
    }

    #[test]
    fn equal_paths_of_different_models_are_different_models() {
        let (mut agenda, now) = (Agenda::default(), Instant::now());
        let workers = [worker("m", "a", true), worker("n", "b", true)];
        agenda.see(&workers, now);
        agenda.done(&workers[0].source);
        assert_eq!(url(agenda.next(&workers, now)).as_deref(), Some("b"));
    }

    #[test]
    fn a_model_without_worker_is_forgotten_and_then_pulled_anew() {
        let (mut agenda, start) = (Agenda::default(), Instant::now());
        let workers = [worker("m", "a", true)];
        agenda.see(&workers, start);
        agenda.done(&workers[0].source);
        assert_eq!(agenda.see(&[], start + FORGET_AFTER / 2), []);
        assert_eq!(agenda.see(&[], start + FORGET_AFTER), [workers[0].source.clone()]);
        agenda.see(&workers, start + FORGET_AFTER);
        assert_eq!(url(agenda.next(&workers, start + FORGET_AFTER)).as_deref(), Some("a"));
    }

    #[test]
    fn models_are_limited_in_number() {
        let (mut agenda, now) = (Agenda::default(), Instant::now());
        let workers: Vec<_> = (0..MODELS_MAX + 3).map(|n| worker(&n.to_string(), "a", true)).collect();
        agenda.see(&workers, now);
        assert_eq!(agenda.entries.len(), MODELS_MAX);
    }
}
