use super::*;
use crate::sglang::digest::on_wire;
use crate::sglang::{Event, PageTree, Rules, Version};

fn wire(tree: &PageTree) -> HashSet<i64> {
    tree.cached().iter().map(on_wire).collect()
}

fn tree(capacity: usize) -> PageTree {
    let mut tree = PageTree::new(4, capacity, Rules::of(Version(0, 5, 23)));
    tree.take_events();
    tree
}

fn prompt(tokens: std::ops::Range<u32>) -> Sequence {
    let mut sequence = Sequence::default();
    sequence.tokens.extend(tokens);
    sequence
}

/// Computes a whole prompt in one step; gives the pages that were hit.
fn compute(tree: &mut PageTree, sequence: &mut Sequence) -> usize {
    let hits = tree.hit_pages(sequence);
    assert!(tree.admit(sequence, hits, sequence.tokens.len() - hits * 4));
    sequence.computed = sequence.tokens.len();
    tree.commit(sequence);
    hits
}

fn stored(events: &[Event]) -> usize {
    let pages = |event: &Event| if let Event::Stored(stored) = event { stored.hashes.len() } else { 0 };
    events.iter().map(pages).sum()
}

#[test]
fn a_repeat_hits_all_but_its_last_token() {
    let mut tree = tree(16);
    for (length, hits) in [(12, 0), (12, 2), (13, 3), (14, 3)] {
        let mut sequence = prompt(0..length);
        assert_eq!(compute(&mut tree, &mut sequence), hits, "{length} tokens");
        tree.release(&mut sequence, true);
    }
    assert_eq!(stored(&tree.take_events()), 3, "no event on a hit");
    assert_eq!(tree.in_use(), 0);
}

#[test]
fn output_is_stored_at_the_end_and_not_before() {
    let mut tree = tree(16);
    let mut sequence = prompt(0..6);
    compute(&mut tree, &mut sequence);
    assert_eq!(stored(&tree.take_events()), 1);
    for token in 100..110 {
        sequence.tokens.push(token);
        assert!(tree.grow(&mut sequence, 1));
        sequence.computed += 1;
    }
    sequence.tokens.push(110);
    assert_eq!(tree.take_events(), []);
    tree.release(&mut sequence, true);
    let events = tree.take_events();
    let [Event::Stored(stored)] = &events[..] else { panic!("{events:?}") };
    assert_eq!(stored.tokens, [4, 5, 100, 101, 102, 103, 104, 105, 106, 107, 108, 109]);
    assert!(stored.parent.is_some());
}

#[test]
fn equal_prompts_at_the_same_time_are_stored_once() {
    let mut tree = tree(16);
    let (mut a, mut b) = (prompt(0..10), prompt(0..10));
    for sequence in [&mut a, &mut b] {
        assert!(tree.admit(sequence, 0, 10));
        sequence.computed = 10;
    }
    assert_eq!(tree.in_use(), 6);
    tree.commit(&mut a);
    tree.commit(&mut b);
    assert_eq!(stored(&tree.take_events()), 2);
    assert_eq!(tree.in_use(), 4, "two shared pages, and a partial one each");
    tree.release(&mut a, true);
    tree.release(&mut b, true);
    assert_eq!((tree.in_use(), tree.cached().len()), (0, 2));
}

#[test]
fn what_is_in_use_is_never_evicted() {
    let mut tree = tree(6);
    let mut held = prompt(0..16);
    compute(&mut tree, &mut held);
    let mut other = prompt(100..112);
    assert!(!tree.admit(&mut other, 0, 12), "3 pages do not fit beside 4 of 6");
    tree.release(&mut held, true);
    tree.take_events();
    compute(&mut tree, &mut other);
    let events = tree.take_events();
    assert!(matches!(&events[..], [Event::Removed(gone), Event::Stored(_)] if gone.len() == 4), "{events:?}");
}

#[test]
fn a_branch_splits_a_node_whose_tail_goes_first() {
    let mut tree = tree(64);
    tree.insert(&(0..16).collect::<Vec<_>>(), None, None, None);
    tree.insert(&[0, 1, 2, 3, 4, 5, 6, 7, 9, 9, 9, 9], None, None, None);
    assert_eq!(stored(&tree.take_events()), 5);
    tree.evict(1);
    let events = tree.take_events();
    assert!(matches!(&events[..], [Event::Removed(gone)] if gone.len() == 2), "the two pages after the split");
    let mut sequence = prompt(0..17);
    assert_eq!(tree.hit_pages(&mut sequence), 2);
}

#[test]
fn a_retracted_sequence_keeps_what_was_stored_before() {
    let mut tree = tree(16);
    let mut sequence = prompt(0..8);
    compute(&mut tree, &mut sequence);
    sequence.tokens.extend([50, 51, 52, 53]);
    assert!(tree.grow(&mut sequence, 4));
    sequence.computed += 4;
    tree.release(&mut sequence, false);
    assert_eq!((tree.cached().len(), tree.in_use()), (2, 0));
    assert_eq!(tree.hit_pages(&mut sequence), 2);
}

#[test]
fn a_reset_waits_for_requests() {
    let mut tree = tree(16);
    let mut sequence = prompt(0..8);
    compute(&mut tree, &mut sequence);
    assert!(!tree.reset());
    tree.release(&mut sequence, true);
    tree.take_events();
    assert!(tree.reset());
    assert_eq!((tree.take_events(), tree.cached().len()), (vec![Event::Cleared], 0));
}

/// Many requests over a small pool: the counts hold, and what is evicted was stored.
#[test]
fn counts_hold_under_pressure() {
    let mut tree = tree(20);
    let (mut running, mut state) = (Vec::new(), 7u64);
    let mut known = HashSet::new();
    for _ in 0..3000 {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        let pick = |n: u64| u32::try_from((state >> 33) % n).unwrap();
        if running.len() < 3 && pick(2) == 0 {
            let start = pick(5) * 8;
            let mut sequence = prompt(start..start + 6 + pick(20));
            let hits = tree.hit_pages(&mut sequence);
            let rest = sequence.tokens.len() - hits * 4;
            if tree.admit(&mut sequence, hits, rest) {
                sequence.computed = sequence.tokens.len();
                running.push(sequence);
            }
        } else if !running.is_empty() {
            let at = usize::try_from(pick(running.len() as u64)).unwrap();
            tree.commit(&mut running[at]);
            let mut sequence = running.swap_remove(at);
            tree.release(&mut sequence, pick(3) > 0);
        }
        assert!(tree.held + tree.reserved <= tree.capacity);
        assert_eq!(tree.held, tree.nodes.values().map(|node| node.pages.len()).sum::<usize>());
        for event in tree.take_events() {
            match event {
                Event::Stored(stored) => stored.hashes.iter().for_each(|hash| assert!(known.insert(*hash))),
                Event::Removed(gone) => gone.iter().for_each(|hash| assert!(known.remove(hash))),
                Event::Cleared => panic!("nobody asked for it"),
            }
        }
        assert_eq!(wire(&tree), known);
    }
}
