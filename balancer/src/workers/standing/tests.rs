use std::sync::Arc;
use std::time::Duration;

use fovea_balancer_core::load::Report;

use super::super::tests::workers as of_models;
use super::super::{Ask, Mode};
use super::*;

fn workers(settings: Settings) -> (Arc<Workers>, PoolRef, Vec<WorkerKey>) {
    let workers = of_models(Mode::RoundRobin, &["m"]);
    workers.health.lock().unwrap().clone_from(&Health::new(settings));
    let pool = workers.pools().remove(0);
    let mut keys = Vec::new();
    workers.each(Instant::now(), |worker, _| keys.push(worker.key));
    (workers, pool, keys)
}

fn routed(workers: &Arc<Workers>, pool: &PoolRef, now: Instant) -> WorkerKey {
    let ask = Ask { model: "m", prompt_tokens: 10, ..Ask::default() };
    workers.route(pool, &ask, None, now).unwrap().booked.key
}

#[test]
fn an_ejected_worker_gets_nothing_and_then_one_probe() {
    let (workers, pool, keys) = workers(Settings { slow_start: Duration::ZERO, ..Settings::default() });
    let now = Instant::now();
    keys.iter().for_each(|key| workers.health().add(*key, now));
    (0..5).for_each(|_| workers.note(keys[0], Sign::Failed, now));
    assert!((0..10).all(|_| routed(&workers, &pool, now) == keys[1]));
    // Heard lately enough to be asked at all.
    let later = now + Settings::default().open_for;
    workers.heard(keys.iter().copied(), later);
    let probes = (0..10).filter(|_| routed(&workers, &pool, later) == keys[0]).count();
    assert_eq!((probes, workers.standing(keys[0], later)), (1, Standing::Ejected));
    workers.note(keys[0], Sign::Served, later);
    assert!((0..2).any(|_| routed(&workers, &pool, later) == keys[0]));
}

#[test]
fn a_worker_that_must_serve_serves_though_it_is_new_or_sick() {
    let (workers, pool, keys) = workers(Settings::default());
    let now = Instant::now();
    keys.iter().for_each(|key| workers.health().add(*key, now));
    for key in &keys {
        (0..5).for_each(|_| workers.note(*key, Sign::Failed, now));
    }
    assert!((0..4).any(|_| routed(&workers, &pool, now) == keys[0]));
    workers.remove(keys[1]);
    assert_eq!(routed(&workers, &pool, now), keys[0]);
}

/// (overlap of the warm one, overlap of the new one) → turns of 100 in which the new one stays in the choice.
fn stays(warm: u32, new: u32) -> usize {
    let (workers, _, keys) = workers(Settings::default());
    let now = Instant::now();
    workers.health().add(keys[0], now);
    let born = now + Duration::from_secs(60);
    workers.health().add(keys[1], born);
    let candidate = |key, blocks| Candidate {
        key,
        affinity: key.0,
        overlap_blocks: [blocks; 3],
        embedded: Default::default(),
        waiting_tokens: 0,
        decode_tokens: 0,
    };
    let kept = |turn| {
        let mut candidates = vec![candidate(keys[0], warm), candidate(keys[1], new)];
        workers.sift(&mut candidates, turn, born);
        assert_eq!(candidates[0].key, keys[0]);
        candidates.len() == 2
    };
    (0..100).filter(|turn| kept(*turn)).count()
}

#[test]
fn a_new_worker_is_passed_over_unless_it_alone_holds_the_prefix() {
    assert!((1..25).contains(&stays(0, 0)));
    assert!((1..25).contains(&stays(3, 3)));
    assert_eq!(stays(3, 4), 100);
}

#[test]
fn a_pool_is_saturated_when_all_its_workers_are() {
    let (workers, pool, keys) = workers(Settings::default());
    let now = Instant::now();
    let few = Saturation { requests_max: 2, cache_factor: 0.0 };
    let saturated = |saturation| workers.is_saturated(&pool, saturation, now);
    let busy = Report { running: 1, waiting: 1, ..Report::default() };
    workers.report(keys[0], busy);
    assert!(!saturated(few));
    workers.report(keys[1], busy);
    assert!(saturated(few));
    assert!(!saturated(Saturation { requests_max: 0, cache_factor: 0.0 }));
    // Nothing is known of their caches.
    assert!(!saturated(Saturation { requests_max: 0, cache_factor: 0.1 }));
    keys.iter().for_each(|key| workers.remove(*key));
    assert!(!workers.is_saturated(&pool, few, now));
}
