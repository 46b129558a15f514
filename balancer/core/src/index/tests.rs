use std::collections::BTreeSet;

use fovea_kv::Tier;
use proptest::prelude::*;

use super::*;

mod chains;
mod depth;
mod grace;
mod model;
mod readers;

fn chain(hashes: &[u64]) -> Vec<SequenceHash> {
    hashes.iter().copied().map(SequenceHash).collect()
}

/// Depths as "worker:gpu/cpu/storage …".
#[track_caller]
fn check(index: &Index, hashes: &[u64], expect: &str) {
    let mut out = Vec::new();
    index.depths(&chain(hashes), &mut out);
    let text: Vec<_> =
        out.iter().map(|d| format!("{}:{}/{}/{}", d.worker.0, d.depth[0], d.depth[1], d.depth[2])).collect();
    assert_eq!(text.join(" "), expect);
}

fn two_workers() -> (Index, WorkerIndex, WorkerIndex) {
    let mut index = Index::new(100);
    let (a, b) = (index.add_worker(), index.add_worker());
    index.apply_stored(a, Tier::Gpu, &chain(&[1, 2, 3])).unwrap();
    index.apply_stored(b, Tier::Gpu, &chain(&[1])).unwrap();
    (index, a, b)
}

#[test]
fn depth_is_the_length_of_the_held_prefix() {
    let (index, ..) = two_workers();
    check(&index, &[1, 2, 3, 4], "0:3/3/3 1:1/1/1");
    check(&index, &[9, 2], "");
    check(&index, &[], "");
}

#[test]
fn a_slower_level_continues_a_faster_one() {
    let (mut index, a, _) = two_workers();
    index.apply_stored(a, Tier::Cpu, &chain(&[4, 5])).unwrap();
    index.apply_stored(a, Tier::Storage, &chain(&[6])).unwrap();
    check(&index, &[1, 2, 3, 4, 5, 6, 7], "0:3/5/6 1:1/1/1");
}

#[test]
fn a_block_leaves_when_its_last_level_withdraws_it() {
    let (mut index, a, _) = two_workers();
    index.apply_stored(a, Tier::Cpu, &chain(&[1, 2, 3])).unwrap();
    index.apply_removed(a, Tier::Gpu, &chain(&[3, 2]));
    check(&index, &[1, 2, 3], "0:1/3/3 1:1/1/1");
    index.apply_removed(a, Tier::Cpu, &chain(&[3]));
    assert_eq!(index.entries(), 3);
}

#[test]
fn a_snapshot_is_seen_only_when_it_is_whole() {
    let (mut index, a, _) = two_workers();
    index.begin_snapshot(a);
    index.apply_stored(a, Tier::Gpu, &chain(&[8, 7])).unwrap();
    check(&index, &[1, 2, 3], "0:3/3/3 1:1/1/1");
    check(&index, &[7, 8], "");
    index.go_live(a);
    check(&index, &[1, 2, 3], "1:1/1/1");
    check(&index, &[7, 8], "0:2/2/2");
    assert_eq!(index.entries(), 3);
}

#[test]
fn a_freed_place_is_used_again_and_holds_nothing() {
    let (mut index, a, _) = two_workers();
    index.remove_worker(a);
    index.apply_stored(a, Tier::Gpu, &chain(&[1])).unwrap();
    check(&index, &[1, 2, 3], "1:1/1/1");
    assert_eq!(index.add_worker(), a);
    check(&index, &[1, 2, 3], "1:1/1/1");
    assert_eq!(index.entries(), 1);
}

#[test]
fn a_worker_beyond_the_limit_is_taken_out_as_a_whole() {
    let mut index = Index::new(4);
    let (a, b) = (index.add_worker(), index.add_worker());
    index.apply_stored(a, Tier::Gpu, &chain(&[1, 2])).unwrap();
    index.apply_stored(b, Tier::Gpu, &chain(&[1])).unwrap();
    index.begin_snapshot(b);
    assert_eq!(index.apply_stored(b, Tier::Gpu, &chain(&[1, 2, 3])), Err(IndexFull(b)));
    check(&index, &[1, 2], "0:2/2/2");
    assert_eq!(index.entries(), 2);
    assert_eq!(index.apply_stored(b, Tier::Gpu, &chain(&[1])), Ok(()));
    check(&index, &[1, 2], "0:2/2/2");
    index.begin_snapshot(b);
    index.apply_stored(b, Tier::Gpu, &chain(&[1])).unwrap();
    index.go_live(b);
    check(&index, &[1, 2], "0:2/2/2 1:1/1/1");
}

/// P is 1–4, X 11–14, Y 21–24. Worker 0 holds P and X, worker 1 P and Y; then worker 0 loses P, and its sidecar withdraws X with it.
#[test]
fn a_worker_that_lost_the_head_of_a_shared_prefix_changes_nothing_for_others() {
    let mut index = Index::new(100);
    let (a, b) = (index.add_worker(), index.add_worker());
    index.apply_stored(a, Tier::Gpu, &chain(&[1, 2, 3, 4, 11, 12, 13, 14])).unwrap();
    index.apply_stored(b, Tier::Gpu, &chain(&[1, 2, 3, 4, 21, 22, 23, 24])).unwrap();
    index.apply_removed(a, Tier::Gpu, &chain(&[14, 13, 12, 11, 4, 3, 2, 1]));
    check(&index, &[1, 2, 3, 4, 11, 12, 13, 14], "1:4/4/4");
    index.apply_stored(a, Tier::Gpu, &chain(&[1, 2, 3, 4, 11])).unwrap();
    check(&index, &[1, 2, 3, 4, 11, 12, 13, 14], "0:5/5/5 1:4/4/4");
}

/// The set of worker 0 alone has died, and comes back in a batch during which the table grows and epochs pass.
#[test]
fn a_set_that_comes_back_while_the_table_grows_is_counted() {
    for full in (100..600).step_by(10) {
        let mut index = Index::new(100_000);
        let (a, b) = (index.add_worker(), index.add_worker());
        index.apply_stored(b, Tier::Gpu, &chain(&(10_000..10_000 + full).collect::<Vec<_>>())).unwrap();
        index.apply_stored(a, Tier::Gpu, &chain(&[1])).unwrap();
        index.apply_removed(a, Tier::Gpu, &chain(&[1]));
        let blocks: Vec<_> = (1..30).collect();
        index.apply_stored(a, Tier::Gpu, &chain(&blocks)).unwrap();
        index.apply_stored(b, Tier::Gpu, &chain(&blocks[..7])).unwrap();
        check(&index, &blocks[..9], "0:9/9/9 1:7/7/7");
        model::check_inside(&index);
    }
}

/// A forest in which node n > 2 has parent n / 3: many chains that share prefixes.
fn ancestors(mut node: u64) -> Vec<u64> {
    let mut path = vec![node];
    while node > 2 {
        node /= 3;
        path.push(node);
    }
    path.reverse();
    path
}

#[derive(Clone, Debug)]
enum Step {
    Store(usize, Tier, u64),
    Remove(usize, Tier, u64),
    Restart(usize),
    Replace(usize),
    Begin(usize),
    Live(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let tier = || prop::sample::select(Tier::ALL.to_vec());
    let step = prop_oneof![
        6 => (0..3usize, tier(), 1..80u64).prop_map(|(w, t, n)| Step::Store(w, t, n)),
        3 => (0..3usize, tier(), 1..80u64).prop_map(|(w, t, n)| Step::Remove(w, t, n)),
        1 => (0..3usize).prop_map(Step::Restart),
        1 => (0..3usize).prop_map(Step::Replace),
        1 => (0..3usize).prop_map(Step::Begin),
        1 => (0..3usize).prop_map(Step::Live),
    ];
    prop::collection::vec(step, 0..120)
}

type Pairs = BTreeSet<(u64, u8)>;

#[derive(Default)]
struct Model {
    live: Pairs,
    coming: Option<Pairs>,
}

/// Closed changes only, as every sidecar promises: a store brings its ancestors, a removal takes its descendants.
fn perform(index: &mut Index, ids: &mut [WorkerIndex], model: &mut [Model], step: &Step) {
    match *step {
        Step::Store(w, tier, node) => {
            index.apply_stored(ids[w], tier, &chain(&ancestors(node))).unwrap();
            let Model { live, coming } = &mut model[w];
            coming.as_mut().unwrap_or(live).extend(ancestors(node).iter().map(|&n| (n, tier.index())));
        }
        Step::Remove(w, tier, node) => {
            let gone: Vec<_> = (1..80).rev().filter(|&n| ancestors(n).contains(&node)).collect();
            index.apply_removed(ids[w], tier, &chain(&gone));
            let Model { live, coming } = &mut model[w];
            coming.as_mut().unwrap_or(live).retain(|pair| pair.1 != tier.index() || !gone.contains(&pair.0));
        }
        Step::Restart(w) => {
            index.clear(ids[w]);
            model[w] = Model::default();
        }
        Step::Replace(w) => {
            index.remove_worker(ids[w]);
            ids[w] = index.add_worker();
            model[w] = Model::default();
        }
        Step::Begin(w) => {
            index.begin_snapshot(ids[w]);
            model[w].coming = Some(Pairs::new());
        }
        Step::Live(w) => {
            index.go_live(ids[w]);
            if let Some(coming) = model[w].coming.take() {
                model[w].live = coming;
            }
        }
    }
}

proptest! {
    #[test]
    fn depths_equal_a_walk_over_sets_of_pairs(steps in steps()) {
        let mut index = Index::new(10_000);
        let mut ids = [index.add_worker(), index.add_worker(), index.add_worker()];
        let mut model = [Model::default(), Model::default(), Model::default()];
        for step in &steps {
            perform(&mut index, &mut ids, &mut model, step);
        }
        let blocks = |pairs: &Pairs| pairs.iter().map(|pair| pair.0).collect::<BTreeSet<_>>().len();
        let entries: usize = model.iter().map(|m| blocks(&m.live) + m.coming.as_ref().map_or(0, blocks)).sum();
        prop_assert_eq!(index.entries(), entries);
        for node in 1..80 {
            let path = ancestors(node);
            let mut out = Vec::new();
            index.depths(&chain(&path), &mut out);
            for (w, id) in ids.iter().enumerate() {
                let holds = |n: u64, level: u8| (0..=level).any(|l| model[w].live.contains(&(n, l)));
                let expect = [0, 1, 2].map(|l| path.iter().take_while(|&&n| holds(n, l)).count() as u32);
                let got = out.iter().find(|d| d.worker == *id).map_or([0; 3], |d| d.depth);
                prop_assert_eq!(got, expect);
            }
        }
    }
}
