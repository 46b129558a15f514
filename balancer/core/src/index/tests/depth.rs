//! One worker's depth, from any guess, against a walk over what was stored.

use super::model::Random;
use super::*;

const BLOCKS: u64 = 300;
const WORKERS: u32 = 70;

fn blocks(len: usize) -> Vec<SequenceHash> {
    (1..=BLOCKS).take(len).map(|at| SequenceHash(at.wrapping_mul(0xD6E8_FEB8_6659_FD93))).collect()
}

/// Leading blocks of `chain` among `held`, one by one.
fn walked(held: &BTreeSet<SequenceHash>, chain: &[SequenceHash]) -> u32 {
    chain.iter().take_while(|hash| held.contains(hash)).count() as u32
}

#[test]
fn depth_of_one_worker_equals_a_walk_from_any_guess() {
    let (mut index, mut random) = (Index::new(1 << 20), Random(5));
    let reader = index.reader();
    let mut held = vec![BTreeSet::new(); WORKERS as usize];
    (0..WORKERS).for_each(|worker| assert_eq!(index.add_worker(), WorkerIndex(worker)));
    for step in 0..4000 {
        let worker = random.below(u64::from(WORKERS)) as u32;
        let (id, own) = (WorkerIndex(worker), &mut held[worker as usize]);
        let wanted = random.below(BLOCKS + 1) as usize;
        match random.below(20) {
            0 => {
                index.clear(id);
                own.clear();
            }
            1 => {
                index.begin_snapshot(id);
                index.apply_stored(id, Tier::Gpu, &blocks(wanted)).unwrap();
                assert_eq!(reader.depth_of(id, &blocks(BLOCKS as usize), 0), own.len() as u32);
                index.go_live(id);
                *own = blocks(wanted).into_iter().collect();
            }
            _ if wanted > own.len() => {
                index.apply_stored(id, Tier::Gpu, &blocks(wanted)).unwrap();
                *own = blocks(wanted).into_iter().collect();
            }
            _ => {
                let gone: Vec<_> = blocks(own.len())[wanted..].iter().rev().copied().collect();
                index.apply_removed(id, Tier::Gpu, &gone);
                *own = blocks(wanted).into_iter().collect();
            }
        }
        // The CPU tier is no part of the answer.
        if step % 16 == 0 {
            index.apply_stored(id, Tier::Cpu, &blocks(wanted)).unwrap();
        }
        let asked = random.below(u64::from(WORKERS)) as u32;
        let mut chain = blocks(random.below(BLOCKS + 1) as usize);
        let known = random.below(BLOCKS + 1) as usize;
        chain.iter_mut().skip(known).for_each(|hash| hash.0 ^= 1 << 40);
        let expect = walked(&held[asked as usize], &chain);
        for guess in [0, 1, expect, expect + 1, expect.saturating_sub(1), random.below(BLOCKS) as u32, u32::MAX] {
            let depth = reader.depth_of(WorkerIndex(asked), &chain, guess);
            assert_eq!(depth, expect, "step {step}, worker {asked}, guess {guess}");
        }
    }
}

#[test]
fn a_worker_that_is_not_there_holds_nothing() {
    let (index, a, b) = two_workers();
    let (reader, chain) = (index.reader(), chain(&[1, 2, 3]));
    assert_eq!([a, b].map(|worker| reader.depth_of(worker, &chain, 2)), [3, 1]);
    for worker in [2, 63, 64, 100_000, u32::MAX] {
        assert_eq!(reader.depth_of(WorkerIndex(worker), &chain, 2), 0);
    }
    assert_eq!(reader.depth_of(a, &[], 9), 0);
}
