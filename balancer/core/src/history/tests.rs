use proptest::prelude::*;

use super::*;

fn chain(hashes: impl IntoIterator<Item = u64>) -> Vec<SequenceHash> {
    hashes.into_iter().map(SequenceHash).collect()
}

fn recall(blocks_max: usize) -> Recall {
    Recall { ttl: Duration::from_secs(120), blocks_max, seed: 7 }
}

#[test]
fn a_chain_shortens_from_its_end() {
    let (mut history, now, recall) = (History::default(), Instant::now(), recall(250));
    let prompts: Vec<_> = (0..3).map(|prompt| chain((0..100).map(|block| 1000 * prompt + block))).collect();
    for prompt in &prompts {
        history.sent(prompt, 16, 0, &recall, now);
    }
    let depths: Vec<_> = prompts.iter().map(|prompt| history.depth(prompt, &recall, now)).collect();
    assert_eq!((depths, history.blocks()), (vec![50, 100, 100], 250));
}

#[test]
fn the_worker_s_capacity_bounds_what_is_believed() {
    let (mut history, now, recall) = (History::default(), Instant::now(), recall(1000));
    history.sent(&chain(0..10), 16, 160, &recall, now);
    history.sent(&chain(100..104), 16, 160, &recall, now);
    assert_eq!(history.depth(&chain(0..10), &recall, now), 6);
    // A prompt longer than all of it.
    history.sent(&chain(200..250), 16, 160, &recall, now);
    assert_eq!((history.depth(&chain(200..250), &recall, now), history.blocks()), (10, 10));
}

#[test]
fn each_turn_of_a_conversation_finds_the_turns_before() {
    let (mut history, now, recall) = (History::default(), Instant::now(), recall(1000));
    for turn in 1..=8 {
        let prompt = chain(0..turn * 12);
        assert_eq!(history.depth(&prompt, &recall, now), u32::try_from((turn - 1) * 12).unwrap());
        history.sent(&prompt, 16, 0, &recall, now);
    }
    // Another answer to the third turn.
    assert_eq!(history.depth(&chain((0..36).chain(900..950)), &recall, now), 36);
}

#[test]
fn what_was_not_sent_for_a_while_is_forgotten() {
    let (mut history, now, recall) = (History::default(), Instant::now(), recall(1000));
    let at = |seconds| now + Duration::from_secs(seconds);
    history.sent(&chain(0..4), 16, 0, &recall, now);
    history.sent(&chain(0..2), 16, 0, &recall, at(100));
    assert_eq!(history.depth(&chain(0..4), &recall, at(119)), 4);
    assert_eq!(history.depth(&chain(0..4), &recall, at(121)), 2);
    assert_eq!(history.depth(&chain(0..4), &recall, at(221)), 0);
    history.sent(&chain([9]), 16, 0, &recall, at(300));
    assert_eq!(history.blocks(), 1);
}

proptest! {
    /// Chains are paths in a tree of prefixes: block i of prompt p is named by the first i + 1 choices.
    #[test]
    fn it_is_prefix_closed_and_never_over_its_bounds(
        prompts in prop::collection::vec((prop::collection::vec(0..3u64, 1..12), 0..40u64), 1..60),
        blocks_max in 1..30usize,
        capacity_blocks in 0..30u64,
    ) {
        let (mut history, mut now, recall) = (History::default(), Instant::now(), recall(blocks_max));
        let path = |choices: &[u64]| -> Vec<SequenceHash> {
            choices.iter().scan(1, |name, choice| { *name = *name * 3 + choice; Some(SequenceHash(*name)) }).collect()
        };
        for (choices, wait) in prompts {
            now += Duration::from_secs(wait);
            let chain = path(&choices);
            history.sent(&chain, 16, capacity_blocks * 16, &recall, now);
            let most = if capacity_blocks == 0 { blocks_max } else { blocks_max.min(usize::try_from(capacity_blocks).unwrap()) };
            prop_assert!(history.blocks() <= most);
            prop_assert_eq!(history.depth(&chain, &recall, now) as usize, chain.len().min(most));
            for name in history.places.keys().filter(|name| **name >= 9) {
                prop_assert!(history.places.contains_key(&(name / 3)), "a block without its parent");
            }
            prop_assert_eq!(history.held_tokens, 16 * history.blocks() as u64);
        }
    }
}
