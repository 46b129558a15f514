use super::*;

fn about(pool: u8, names: &[&str], loras: &[&str]) -> Description<u8> {
    let owned = |names: &[&str]| names.iter().map(ToString::to_string).collect::<Vec<_>>().into();
    Description {
        pool,
        index: WorkerIndex(0),
        name: "w".into(),
        url: "http://127.0.0.1:1".into(),
        dp_rank: 0,
        served_names: owned(names),
        lora_names: owned(loras),
        events: true,
        draining: false,
        by_load: false,
        capacity_tokens: 0,
        media_trusted: true,
    }
}

fn millis(n: u64) -> Duration {
    Duration::from_millis(n)
}

#[track_caller]
fn check_state(silent_ms: u64, draining: bool, expect: State) {
    let (mut fleet, start) = (Fleet::new(Freshness::default()), Instant::now());
    fleet.add(Description { draining, ..about(1, &["m"], &[]) }, start);
    assert_eq!(fleet.workers()[0].state(fleet.freshness(), start + millis(silent_ms)), expect);
}

#[test]
fn silence_makes_stale_then_excluded() {
    check_state(999, false, State::Up);
    check_state(1000, false, State::Stale);
    check_state(5000, false, State::Excluded);
}

#[test]
fn draining_holds_until_excluded() {
    check_state(0, true, State::Draining);
    check_state(2000, true, State::Draining);
    check_state(5000, true, State::Excluded);
}

#[test]
fn a_message_makes_a_stale_worker_fresh() {
    let (mut fleet, start) = (Fleet::new(Freshness::default()), Instant::now());
    let key = fleet.add(about(1, &["m"], &[]), start);
    fleet.heard(key, start + millis(1500));
    assert_eq!(fleet.workers()[0].state(fleet.freshness(), start + millis(2400)), State::Up);
}

#[test]
fn another_pool_of_the_model_counts_while_it_takes_requests() {
    let (mut fleet, now) = (Fleet::new(Freshness::default()), Instant::now());
    fleet.add(about(1, &["m"], &[]), now);
    assert!(!fleet.is_served_elsewhere(&1, "m", now));
    fleet.add(about(2, &["m"], &[]), now);
    assert!(fleet.is_served_elsewhere(&1, "m", now) && !fleet.is_served_elsewhere(&1, "n", now));
    assert!(!fleet.is_served_elsewhere(&1, "m", now + millis(5000)));
}

#[test]
fn names_resolve_to_pools_and_adapters() {
    let (mut fleet, now) = (Fleet::new(Freshness::default()), Instant::now());
    fleet.add(about(1, &["m"], &["ada"]), now);
    let base_names: Arc<[String]> = vec!["m".to_owned()].into();
    let found = |served| Resolved::Pool { pool: 1, served, base_names: base_names.clone() };
    assert_eq!(fleet.resolve("m", 0, now), found(Served::Base));
    assert_eq!(fleet.resolve("ada", 0, now), found(Served::Lora));
    assert_eq!(fleet.resolve("other", 0, now), Resolved::Unknown);
    assert_eq!(fleet.resolve("m", 0, now + millis(5000)), Resolved::NoneReady);
    let live: Vec<_> = fleet.live_names(now).into_iter().map(|(name, (served, _))| (name, served)).collect();
    assert_eq!(live, [("ada", Served::Lora), ("m", Served::Base)]);
}

#[test]
fn an_adapter_is_served_only_where_it_is_loaded() {
    let (mut fleet, now) = (Fleet::new(Freshness::default()), Instant::now());
    fleet.add(about(1, &["m"], &["ada"]), now);
    let other = fleet.add(about(1, &["m"], &[]), now);
    assert_eq!(fleet.candidates(&1, "ada", now).map(|w| w.key).collect::<Vec<_>>(), [WorkerKey(0)]);
    assert!(fleet.candidates(&1, "m", now).any(|w| w.key == other));
}

#[test]
fn two_pools_of_one_name_share_by_ready_workers() {
    let (mut fleet, now) = (Fleet::new(Freshness::default()), Instant::now());
    for pool in [1, 2, 2] {
        fleet.add(about(pool, &["m"], &[]), now);
    }
    let pools: Vec<_> = (0..3)
        .map(|turn| match fleet.resolve("m", turn, now) {
            Resolved::Pool { pool, .. } => pool,
            _ => 0,
        })
        .collect();
    assert_eq!(pools, [1, 2, 2]);
}

#[test]
fn a_removed_worker_is_gone_and_its_bookings_are_void() {
    let (mut fleet, now) = (Fleet::new(Freshness::default()), Instant::now());
    let key = fleet.add(about(1, &["m"], &[]), now);
    let booking = fleet.book(key, Charge::default(), [].into(), now).unwrap();
    assert!(fleet.remove(key).is_some());
    fleet.release(key, booking, false);
    assert_eq!(fleet.resolve("m", 0, now), Resolved::Unknown);
    assert_eq!((fleet.book(key, Charge::default(), [].into(), now), fleet.pool_like(&1)), (None, None));
}
