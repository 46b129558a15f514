//! One situation each that users of other routers complained of: the plan holds that fault alone, over many seeds.

use fleet::plan::{Fault, Kind, Plan};
use fleet::{Outcome, run};

/// `sidecars` workers, `balancers`, these faults, nothing lost but by them.
#[track_caller]
fn check(sidecars: usize, balancers: usize, faults: &[(u64, Kind)], loss: usize) -> Outcome {
    let mut last = Outcome::default();
    for seed in 0..12 {
        let faults = faults.iter().map(|(at, kind)| Fault { at: *at, kind: *kind }).collect();
        let plan = Plan {
            sidecars,
            balancers,
            sidecar_minors: vec![2; sidecars],
            balancer_minors: vec![2; balancers],
            ring_frames: 1 << 10,
            ticks: 4000,
            faults,
            loss,
            pace: 3,
            ..Plan::new(seed)
        };
        match run(&plan, None, false) {
            Ok(outcome) => last = outcome,
            Err(failure) => panic!("seed {seed}: {}", failure.what),
        }
    }
    last
}

/// EVT-05: the subscriber is away for 25 s; the restarted engine's numbers have passed ours by then.
#[test]
fn publisher_down_25_s_and_its_numbers_have_passed_ours() {
    check(2, 1, &[(300, Kind::EngineRestart { engine: 0, down: 20, late: 2500 })], 0);
}

/// EVT-04: restarted in place, subscribed to again at once.
#[test]
fn an_engine_restarted_in_place_keeps_no_dead_blocks() {
    let restart = |at| (at, Kind::EngineRestart { engine: 0, down: 1, late: 1 });
    check(2, 2, &[restart(300), restart(500), restart(501)], 0);
}

/// EVT-03: every 50th batch lost, and a stretch of them.
#[test]
fn lost_batches_leave_no_hole() {
    check(2, 1, &[(400, Kind::Deaf { sidecar: 0, ticks: 600 })], 50);
}

/// EVT-06, OPS-05: a balancer comes back when engines have sent more than they keep, and is told by the sidecars.
#[test]
fn a_late_balancer_is_complete_without_the_engines() {
    let crash = |balancer, silent| Kind::BalancerCrash { balancer, down: 50, silent };
    check(4, 2, &[(3000, crash(0, false)), (3300, crash(1, true))], 0);
}

/// EVT-11: the cache is emptied by a call; the engine tells with its next batch.
#[test]
fn a_cleared_cache_is_gone_at_once() {
    check(2, 1, &[(300, Kind::ClearCache { engine: 0 }), (900, Kind::ClearCache { engine: 1 })], 0);
}

/// LOD-03: a quarter of all requests is cancelled at any point; the rule of bookings holds after each tick.
#[test]
fn cancelled_requests_leave_no_booking() {
    assert!(check(3, 2, &[], 0).routed > 500);
}

/// LOD-04: the stream drops while requests run; their bookings are theirs.
#[test]
fn a_dropped_stream_erases_no_load_of_live_requests() {
    let drop = |at| (at, Kind::Partition { sidecar: 0, balancer: 0, ticks: 200 });
    check(2, 1, &[drop(400), drop(1000), drop(1500)], 0);
}

/// A balancer that reads nothing for a while gets a snapshot; rings and wires stay within their bounds.
#[test]
fn a_slow_balancer_falls_to_a_snapshot() {
    let slow = |at| (at, Kind::Slow { balancer: 0, ticks: 350 });
    check(4, 2, &[slow(300), slow(1200)], 0);
}

/// A stream that stands still without ending: both ends agree again, and no worker is there twice.
#[test]
fn a_half_open_stream_ends_in_one_stream() {
    let crash = Kind::SidecarCrash { sidecar: 0, down: 30, silent: true };
    check(2, 2, &[(300, Kind::Stall { sidecar: 1, balancer: 0, ticks: 390 }), (500, crash)], 0);
}
