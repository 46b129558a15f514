//! Lookups ask the allocator for nothing, however long the chain; updates of a full cache for next to nothing.
#![expect(unsafe_code, reason = "an allocator that counts can only be written so")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use fovea_balancer_core::index::{Index, WorkerIndex};
use fovea_kv::{SequenceHash, Tier};

thread_local! {
    static CALLS: Cell<usize> = const { Cell::new(0) };
}

struct Counting;

// SAFETY: passes everything on to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.with(|calls| calls.set(calls.get() + 1));
        // SAFETY: the caller's promise.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn calls(act: impl FnOnce()) -> usize {
    let before = CALLS.with(Cell::get);
    act();
    CALLS.with(Cell::get) - before
}

fn chain(own: u64, blocks: u64) -> Vec<SequenceHash> {
    let hash = |at: u64| if at < 50 { at + 1 } else { own << 32 | at };
    (0..blocks).map(|at| SequenceHash(hash(at).wrapping_mul(0xD6E8_FEB8_6659_FD93))).collect()
}

/// Worker w holds the first `depth(w)` blocks of one long chain.
fn staircase(workers: u32, depth: impl Fn(u32) -> u64) -> (Index, Vec<SequenceHash>) {
    let mut index = Index::new(1 << 20);
    let blocks = chain(1, 5000);
    for worker in 0..workers {
        assert_eq!(index.add_worker(), WorkerIndex(worker));
        index.apply_stored(WorkerIndex(worker), Tier::Gpu, &blocks[..depth(worker) as usize]).expect("far from full");
    }
    (index, blocks)
}

#[test]
fn a_lookup_allocates_nothing() {
    let (index, blocks) = staircase(40, |worker| 100 + 120 * u64::from(worker));
    let (reader, mut out) = (index.reader(), Vec::with_capacity(64));
    for asked in [&blocks[..], &blocks[..500], &blocks[..1], &[], &chain(2, 500)] {
        assert_eq!(calls(|| reader.depths(asked, &mut out)), 0, "{} blocks", asked.len());
    }
}

#[test]
fn a_chain_with_many_holders_allocates_once_whatever_its_length() {
    let (index, blocks) = staircase(200, |worker| 10 + 20 * u64::from(worker));
    let (reader, mut out) = (index.reader(), Vec::with_capacity(256));
    for asked in [&blocks[..], &blocks[..2500]] {
        assert_eq!(calls(|| reader.depths(asked, &mut out)), 1, "{} blocks", asked.len());
    }
    assert_eq!(out.len(), 200);
}

#[test]
fn updates_of_a_full_cache_allocate_next_to_nothing() {
    let (mut index, blocks) = staircase(8, |_| 1000);
    let back: Vec<_> = blocks[400..1000].iter().rev().copied().collect();
    let mut turn = || {
        for worker in (0..8).map(WorkerIndex) {
            index.apply_removed(worker, Tier::Gpu, &back);
            index.apply_stored(worker, Tier::Gpu, &blocks[400..1000]).expect("far from full");
        }
    };
    (0..20).for_each(|_| turn());
    // 192,000 blocks: lists of what died may still grow once or twice.
    assert!(calls(|| (0..20).for_each(|_| turn())) <= 4);
}
