//! What must hold in every case, on tiny ones.

use fovea_balancer_core::choose::Settings;

use super::case::{Traces, WORKLOADS, workload};
use super::engine;
use super::policy::Policy;
use super::simulation::{Ended, Fleet, run};
use super::workload::Workload;
use super::{media, trace};

fn fleet(workload: &Workload, workers: usize) -> Fleet {
    let engine = engine::Settings::default();
    let blocks = 6 * workload.blocks_max();
    Fleet { workers, blocks, engine, choose: Settings::default(), gap: 60_000.0 }
}

fn policies() -> impl Iterator<Item = Policy> {
    Policy::ALL.into_iter().chain([Policy::TrueLoad])
}

#[track_caller]
fn check_invariants(workload: &Workload, ended: &Ended) {
    assert!(ended.is_monotone, "time ran backwards, or a request was lost");
    assert_eq!(ended.outcomes.len(), workload.requests.len());
    for (outcome, request) in ended.outcomes.iter().zip(&workload.requests) {
        assert!(outcome.over.is_some(), "a request was lost");
        let reusable = request.reusable_blocks(workload.block_tokens) * workload.block_tokens;
        assert!(outcome.work.reused <= u64::from(reusable), "more is reused than a prompt allows");
        assert_eq!(outcome.work.reused + outcome.work.computed, u64::from(request.prompt_tokens()));
    }
}

#[test]
fn no_request_is_lost_and_time_goes_forward() {
    for name in WORKLOADS {
        let Some(mut workload) = workload(name, 4, 7, &Traces::default()) else { continue };
        workload.requests.truncate(150);
        for policy in policies() {
            check_invariants(&workload, &run(&workload, &fleet(&workload, 3), policy));
        }
    }
}

#[test]
fn nobody_reuses_more_than_all_prompts_share() {
    let workload = media::documents(120, 3);
    let mut seen = std::collections::HashSet::new();
    let mut most = 0;
    for request in &workload.requests {
        let reusable = request.reusable_blocks(workload.block_tokens) as usize;
        most += request.chain[..reusable].iter().take_while(|hash| seen.contains(*hash)).count();
        seen.extend(request.chain.iter().copied());
    }
    for policy in policies() {
        let ended = run(&workload, &fleet(&workload, 2), policy);
        let reused: u64 = ended.outcomes.iter().map(|outcome| outcome.work.reused).sum();
        assert!(reused <= most as u64 * u64::from(workload.block_tokens), "{policy:?}");
    }
}

#[test]
fn equal_seeds_give_equal_results() {
    for policy in policies() {
        let go = |seed| {
            let workload = media::reuse("reuse_50", 120, 50, seed);
            run(&workload, &fleet(&workload, 4), policy)
        };
        assert_eq!(go(5), go(5), "{policy:?}");
        assert_ne!(go(5), go(6), "{policy:?}");
    }
}

#[test]
fn one_worker_is_one_cache_whatever_the_policy() {
    let workload = media::documents(60, 1);
    let go = |policy| run(&workload, &fleet(&workload, 1), policy).outcomes;
    assert!(policies().all(|policy| go(policy) == go(Policy::RoundRobin)));
}

#[test]
fn events_tell_the_balancer_what_an_idle_fleet_holds() {
    // Far apart, so that every event has arrived before the next request.
    let workload = media::reuse("reuse_90", 60, 90, 2);
    let fleet = Fleet { gap: 5e6, ..fleet(&workload, 4) };
    let reused = |policy| run(&workload, &fleet, policy).outcomes.iter().map(|o| o.work.reused).sum::<u64>();
    assert_eq!(reused(Policy::Fovea), reused(Policy::Oracle));
    assert!(reused(Policy::Fovea) > reused(Policy::RoundRobin));
}

#[test]
fn a_trace_line_keeps_its_prefix_and_its_session() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("t.jsonl");
    let lines = [
        r#"{"timestamp": 0, "input_length": 1100, "output_length": 9, "hash_ids": [0, 5, 6]}"#,
        r#"{"timestamp": 3000, "input_length": 700, "output_length": 9, "hash_ids": [0, 8]}"#,
        r#"{"timestamp": 90000, "input_length": 1600, "output_length": 900, "hash_ids": [0, 5, 9, 10]}"#,
    ];
    std::fs::write(&path, lines.join("\n")).unwrap();
    let workload = trace::sample("t", &trace::read(&path).unwrap(), 3, 1);
    let [first, second, third] = &workload.requests[..] else { panic!("three requests") };
    assert_eq!((first.prompt_tokens(), third.prompt_tokens(), third.output_tokens), (1100, 1600, 96));
    assert_eq!([first.session == second.session, first.session == third.session], [false, true]);
    let shared = |a: &super::workload::Request, b: &super::workload::Request| {
        a.chain.iter().zip(b.chain.iter()).take_while(|(a, b)| a == b).count()
    };
    assert_eq!([shared(first, second), shared(first, third)], [4, 8]);
    std::fs::write(&path, "{}").unwrap();
    assert!(trace::read(&path).unwrap_err().to_string().contains("line 1"));
}
