use super::*;

const SECOND: Duration = Duration::from_secs(1);

fn fleet(count: u64) -> (Health, Vec<WorkerKey>, Instant) {
    let (mut health, now) = (Health::new(Settings::default()), Instant::now());
    let keys: Vec<_> = (0..count).map(WorkerKey).collect();
    keys.iter().for_each(|key| health.add(*key, now));
    (health, keys, now)
}

fn fail(health: &mut Health, key: WorkerKey, times: u32, now: Instant) {
    (0..times).for_each(|_| health.note(key, Sign::Failed, now));
}

#[test]
fn five_failures_in_ten_seconds_eject_and_four_do_not() {
    let (mut health, keys, now) = fleet(4);
    fail(&mut health, keys[0], 4, now);
    assert_eq!(health.standing(keys[0], now), Standing::Well);
    // The first four are older than the window by then.
    fail(&mut health, keys[0], 4, now + 10 * SECOND);
    assert_eq!(health.standing(keys[0], now + 10 * SECOND), Standing::Well);
    fail(&mut health, keys[0], 1, now + 11 * SECOND);
    assert_eq!(health.standing(keys[0], now + 11 * SECOND), Standing::Ejected);
    assert_eq!(health.ejected(&keys, now + 11 * SECOND), [true, false, false, false]);
}

#[test]
fn a_busy_worker_is_not_ejected_for_a_failure_in_a_hundred() {
    let (mut health, keys, now) = fleet(4);
    for _ in 0..20 {
        fail(&mut health, keys[0], 1, now);
        (0..99).for_each(|_| health.note(keys[0], Sign::Served, now));
    }
    assert_eq!(health.standing(keys[0], now), Standing::Well);
    fail(&mut health, keys[0], 200, now);
    assert_eq!(health.standing(keys[0], now), Standing::Ejected);
}

#[test]
fn one_probe_decides_what_follows_an_ejection() {
    let (mut health, keys, now) = fleet(4);
    fail(&mut health, keys[0], 5, now);
    let later = now + 5 * SECOND;
    assert_eq!(health.standing(keys[0], later), Standing::Probed);
    health.sent(keys[0], later);
    assert_eq!(health.standing(keys[0], later), Standing::Ejected);
    fail(&mut health, keys[0], 1, later);
    assert_eq!(health.standing(keys[0], later + 4 * SECOND), Standing::Ejected);
    let last = later + 5 * SECOND;
    health.sent(keys[0], last);
    health.note(keys[0], Sign::Served, last);
    assert_eq!((health.standing(keys[0], last), health.ejections()), (Standing::Well, 2));
    // It begins anew.
    fail(&mut health, keys[0], 4, last);
    assert_eq!(health.standing(keys[0], last), Standing::Well);
}

#[test]
fn a_probe_without_a_word_is_followed_by_another() {
    let (mut health, keys, now) = fleet(2);
    fail(&mut health, keys[0], 5, now);
    health.sent(keys[0], now + 5 * SECOND);
    assert_eq!(health.standing(keys[0], now + 9 * SECOND), Standing::Ejected);
    assert_eq!(health.standing(keys[0], now + 10 * SECOND), Standing::Probed);
}

#[test]
fn an_answer_from_before_the_ejection_does_not_end_it() {
    let (mut health, keys, now) = fleet(2);
    fail(&mut health, keys[0], 5, now);
    health.note(keys[0], Sign::Served, now + SECOND);
    assert_eq!(health.standing(keys[0], now + SECOND), Standing::Ejected);
}

#[track_caller]
fn check_share(workers: u64, sick: u64, expect_ejected: usize) {
    let (mut health, keys, now) = fleet(workers);
    keys.iter().take(sick as usize).for_each(|key| fail(&mut health, *key, 5, now));
    assert_eq!(health.ejected(&keys, now).iter().filter(|out| **out).count(), expect_ejected);
}

#[test]
fn only_a_share_of_a_pool_is_ejected() {
    check_share(10, 2, 2);
    check_share(10, 5, 3);
    check_share(3, 2, 1);
    check_share(2, 1, 1);
    check_share(1, 1, 0);
}

#[test]
fn when_all_look_sick_nobody_is_ejected() {
    check_share(10, 10, 0);
    check_share(2, 2, 0);
}

#[test]
fn those_that_failed_last_are_ejected_first() {
    let (mut health, keys, now) = fleet(3);
    fail(&mut health, keys[0], 5, now);
    fail(&mut health, keys[2], 5, now + SECOND);
    assert_eq!(health.ejected(&keys, now + SECOND), [false, false, true]);
}

/// Turns of 10,000 that the new worker leaves to the warm one.
fn passed(age: Duration) -> usize {
    let (mut health, _, now) = fleet(1);
    let born = now + Duration::from_secs(100);
    health.add(WorkerKey(7), born);
    let keys = [WorkerKey(0), WorkerKey(7)];
    let over = |turn| health.passed_over(&keys, turn, born + age);
    assert!((0..10_000).all(|turn| !over(turn)[0]));
    (0..10_000).filter(|turn| over(*turn)[1]).count()
}

#[test]
fn a_new_workers_share_grows_with_its_age() {
    assert!((8_800..9_200).contains(&passed(Duration::ZERO)));
    assert!((4_800..5_200).contains(&passed(15 * SECOND)));
    assert_eq!(passed(30 * SECOND), 0);
}

#[test]
fn without_a_warm_worker_nobody_is_passed_over() {
    let (health, keys, now) = fleet(3);
    assert!((0..100).all(|turn| health.passed_over(&keys, turn, now + SECOND) == [false; 3]));
}

#[test]
fn a_worker_that_left_is_forgotten() {
    let (mut health, keys, now) = fleet(2);
    fail(&mut health, keys[0], 5, now);
    health.remove(keys[0]);
    fail(&mut health, keys[0], 5, now);
    assert_eq!((health.standing(keys[0], now), health.workers.len()), (Standing::Well, 1));
}

/// Ejections never take more than the share, whatever happens, and a healthy pool always comes back to all.
#[test]
fn whatever_fails_the_pool_keeps_most_of_its_workers() {
    for seed in 0..200_u64 {
        let count = 1 + seed % 12;
        let (mut health, keys, start) = fleet(count);
        let mut now = start;
        for step in 0..300_u64 {
            let draw = xxh3_64_with_seed(&step.to_le_bytes(), seed);
            let key = keys[(draw % count) as usize];
            now += Duration::from_millis(draw >> 8 & 0xff);
            match draw >> 32 & 3 {
                0 => health.note(key, Sign::Served, now),
                1 => health.sent(key, now),
                _ => health.note(key, Sign::Failed, now),
            }
            let out = health.ejected(&keys, now).iter().filter(|out| **out).count();
            let most = ((count as f64 * 0.3) as usize).max(usize::from(count > 1));
            assert!(out <= most, "seed {seed} step {step}: {out} of {count} ejected");
        }
        now += Duration::from_secs(60);
        for key in &keys {
            health.sent(*key, now);
            health.note(*key, Sign::Served, now);
        }
        assert!(keys.iter().all(|key| health.standing(*key, now) == Standing::Well), "seed {seed}");
    }
}
