//! Readers beside a running writer.

use std::sync::atomic::AtomicBool;

use super::*;

const CHAIN: u64 = 300;
const CHAINS: u64 = 40;

fn hashes(chain: u64) -> Vec<SequenceHash> {
    // The first 50 blocks are shared by all chains.
    (0..CHAIN).map(|at| SequenceHash(if at < 50 { at + 1 } else { (chain + 1) << 32 | at })).collect()
}

/// Worker 0 holds all chains, always. Workers 1.. store and remove in the writer's order; each has a largest depth that it never goes beyond.
fn highest(worker: u32, chain: u64) -> u32 {
    ((u64::from(worker) * 37 + chain * 13) % (CHAIN - 50)) as u32 + 50
}

fn read(reader: &Reader, stop: &AtomicBool, seed: u64, workers: u32) -> usize {
    let chains: Vec<_> = (0..CHAINS).map(hashes).collect();
    let (mut out, mut random, mut queries) = (Vec::new(), model::Random(seed), 0);
    while !stop.load(Ordering::Relaxed) {
        let chain = random.below(CHAINS);
        reader.depths(&chains[chain as usize], &mut out);
        assert!(out.is_sorted_by_key(|depth| depth.worker));
        let full = out.first().expect("worker 0 holds every chain, whatever the others do");
        assert_eq!((full.worker, full.depth), (WorkerIndex(0), [CHAIN as u32; 3]));
        for depth in &out[1..] {
            assert!(depth.worker.0 <= workers, "nobody has that place");
            let most = highest(depth.worker.0, chain);
            assert!(depth.depth[0] > 0 && depth.depth[0] <= most, "worker {} over-credited", depth.worker.0);
            // The worker that snapshots has one of two sets, never a part of the one in progress.
            if depth.worker.0 == workers {
                assert!([50, most].contains(&depth.depth[0]), "half a snapshot: {}", depth.depth[0]);
            }
        }
        queries += 1;
    }
    queries
}

#[test]
fn readers_see_only_what_each_worker_had_at_some_moment() {
    const WORKERS: u32 = 9;
    let mut index = Index::new(1 << 20);
    (0..=WORKERS).for_each(|worker| assert_eq!(index.add_worker(), WorkerIndex(worker)));
    let chains: Vec<_> = (0..CHAINS).map(hashes).collect();
    for chain in &chains {
        index.apply_stored(WorkerIndex(0), Tier::Gpu, chain).unwrap();
    }
    let (stop, reader) = (AtomicBool::new(false), index.reader());
    std::thread::scope(|scope| {
        let readers: Vec<_> = (0..2)
            .map(|seed| {
                scope.spawn({
                    let (reader, stop) = (&reader, &stop);
                    move || read(reader, stop, seed, WORKERS)
                })
            })
            .collect();
        let mut random = model::Random(7);
        for step in 0..30_000_u64 {
            let worker = 1 + random.below(u64::from(WORKERS) - 1) as u32;
            let chain = random.below(CHAINS);
            let (id, most) = (WorkerIndex(worker), highest(worker, chain) as usize);
            let held = &chains[chain as usize][..most];
            match random.below(40) {
                0 => index.clear(id),
                1 => {
                    index.remove_worker(id);
                    assert_eq!(index.add_worker(), id);
                }
                2..=20 => index.apply_stored(id, Tier::Gpu, held).unwrap(),
                _ => {
                    let keep = random.below(most as u64) as usize;
                    // Other chains live on the shared front: it goes only with all of them.
                    let gone: Vec<_> = held[keep.max(50)..].iter().rev().copied().collect();
                    index.apply_removed(id, Tier::Gpu, &gone);
                }
            }
            if step % 64 == 0 {
                snapshot(&mut index, WorkerIndex(WORKERS), &chains, step % 128 == 0);
            }
        }
        stop.store(true, Ordering::Relaxed);
        let queries: usize = readers.into_iter().map(|reader| reader.join().expect("no assertion failed")).sum();
        assert!(queries > 0);
    });
}

/// Long or short: all of each chain's share, or the shared front alone; children first, since order does not matter.
fn snapshot(index: &mut Index, worker: WorkerIndex, chains: &[Vec<SequenceHash>], long: bool) {
    index.begin_snapshot(worker);
    for (chain, hashes) in (0..).zip(chains) {
        let end = if long { highest(worker.0, chain) as usize } else { 50 };
        let reversed: Vec<_> = hashes[..end].iter().rev().copied().collect();
        index.apply_stored(worker, Tier::Gpu, &reversed).unwrap();
    }
    index.go_live(worker);
}

#[test]
fn a_reader_outlives_its_index() {
    let (index, ..) = two_workers();
    let reader = index.reader();
    drop(index);
    let mut out = Vec::new();
    reader.depths(&chain(&[1, 2, 3]), &mut out);
    assert_eq!(out.len(), 2);
}
