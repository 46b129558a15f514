//! The simulation as part of every test run, and the test of the test.

use fleet::plan::Plan;
use fleet::{Break, run};

#[track_caller]
fn check(seeds: std::ops::Range<u64>) {
    for seed in seeds {
        if let Err(failure) = run(&Plan::new(seed), None, false) {
            panic!("seed {seed}: {}\ntests/fleet.sh --seed {seed} --trace shows it", failure.what);
        }
    }
}

#[test]
fn at_256_seeds_both_ends_hold_the_truth_and_every_rule_holds_on_the_way() {
    check(0..256);
}

#[test]
fn every_fault_put_in_on_purpose_is_found() {
    for broken in [Break::SkipRemoval, Break::LoseRemoval, Break::LeakBooking, Break::SlowDial] {
        let found = (0..64).filter(|seed| run(&Plan::new(*seed), Some(broken), false).is_err()).count();
        assert!(found > 0, "{broken:?} is not found in 64 seeds");
    }
}

#[test]
fn a_falsified_index_is_found_by_digest_and_repaired() {
    let sum = (0..64).filter_map(|seed| run(&Plan::new(seed), None, false).ok());
    let (found, repaired) =
        sum.fold((0, 0), |(found, repaired), outcome| (found + outcome.mismatches, repaired + outcome.repaired));
    assert!(found > 0 && repaired > 0, "{found} found, {repaired} hashes sent again");
}

#[test]
fn a_failure_shrinks_to_fewer_faults_and_still_fails() {
    let broken = Some(Break::SkipRemoval);
    let plan = (0..64).map(Plan::new).find(|plan| plan.faults.len() > 4 && run(plan, broken, false).is_err());
    let plan = plan.expect("a seed with many faults fails");
    let short = fleet::shrink(&plan, broken);
    assert!(short.faults.len() < plan.faults.len() && run(&short, broken, false).is_err());
}
