//! Long chains: few holders, many, and more than bisection has room for.

use super::model::Random;
use super::*;

const BLOCKS: usize = 600;
/// Leading blocks that all chains share.
const FRONT: usize = 100;
const CHAINS: u64 = 6;

fn long(chain: u64) -> Vec<SequenceHash> {
    let hash = |at: usize| if at < FRONT { at as u64 + 1 } else { (chain + 2) << 20 | at as u64 };
    (0..BLOCKS).map(|at| SequenceHash(hash(at).wrapping_mul(0xD6E8_FEB8_6659_FD93))).collect()
}

/// Asks for the first `known` blocks of a chain and then for unknown ones.
fn ask(index: &Index, chain: u64, known: usize) -> Vec<(u32, u32)> {
    let mut hashes = long(chain);
    (known..BLOCKS).for_each(|at| hashes[at] = SequenceHash(1 << 60 | at as u64));
    let mut out = Vec::new();
    index.depths(&hashes, &mut out);
    assert!(out.iter().all(|depth| depth.depth[0] == depth.depth[1] && depth.depth[1] == depth.depth[2]));
    out.iter().map(|depth| (depth.worker.0, depth.depth[0])).collect()
}

/// Each worker's depth on each chain, at least the front where it holds anything.
fn check(index: &Index, depths: &[Vec<usize>], chain: u64, known: usize) {
    let expect = (0..).zip(depths).filter_map(|(worker, depths)| {
        let front = if depths.iter().any(|depth| *depth > 0) { FRONT } else { 0 };
        let depth = depths[chain as usize].max(front).min(known);
        (depth > 0).then_some((worker, depth as u32))
    });
    assert_eq!(ask(index, chain, known), expect.collect::<Vec<_>>(), "chain {chain}, {known} blocks known");
}

#[test]
fn staircases_of_any_height() {
    for workers in [1, 2, 3, 7, 9, 20, 47, 50, 63, 64, 65, 200, 500] {
        let mut index = Index::new(1 << 20);
        let mut depths = Vec::new();
        for worker in 0..workers {
            let depth = FRONT + worker * (BLOCKS - FRONT) / workers;
            assert_eq!(index.add_worker(), WorkerIndex(worker as u32));
            index.apply_stored(WorkerIndex(worker as u32), Tier::Gpu, &long(0)[..depth]).unwrap();
            depths.push(vec![depth]);
        }
        for known in [0, 1, 2, 5, FRONT, FRONT + 1, 300, BLOCKS - 1, BLOCKS] {
            check(&index, &depths, 0, known);
        }
    }
}

#[test]
fn random_depths_on_long_chains() {
    let (mut index, mut random) = (Index::new(1 << 20), Random(3));
    let mut depths = vec![vec![0; CHAINS as usize]; 80];
    (0..80).for_each(|worker| assert_eq!(index.add_worker(), WorkerIndex(worker)));
    for step in 0..6000 {
        // Few workers at first, so that chains have few sets; more and more later.
        let worker = random.below(4 + step / 80) as usize;
        let (chain, id) = (random.below(CHAINS), WorkerIndex(worker as u32));
        let (held, hashes) = (depths[worker][chain as usize].max(FRONT), long(chain));
        let wanted = FRONT + random.below((BLOCKS - FRONT) as u64) as usize;
        if random.below(200) == 0 {
            index.clear(id);
            depths[worker] = vec![0; CHAINS as usize];
        } else if wanted > held || depths[worker].iter().all(|depth| *depth == 0) {
            index.apply_stored(id, Tier::Gpu, &hashes[..wanted]).unwrap();
            depths[worker][chain as usize] = wanted;
        } else {
            let gone: Vec<_> = hashes[wanted..held].iter().rev().copied().collect();
            index.apply_removed(id, Tier::Gpu, &gone);
            depths[worker][chain as usize] = wanted;
        }
        check(&index, &depths, random.below(CHAINS), random.below(BLOCKS as u64 + 1) as usize);
    }
}
