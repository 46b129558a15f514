//! What a reader may have seen keeps its meaning until the epoch has moved by two: checked from outside, after every write, without
//! depending on how threads happen to run. Without the grace periods of slots and of set ids this fails within a few hundred steps.

use super::super::table::Shards;
use super::*;

/// Everything that a reader could have seen at one moment, with the memory it saw it in.
struct Seen {
    epoch: u64,
    view: View,
    /// (key, id) of each slot; id 0 = free or dead.
    slots: Vec<(u64, u32)>,
    /// Holders of each set that a slot names.
    sets: Vec<(u32, Vec<u64>)>,
}

fn holders(view: &View, id: u32) -> Vec<u64> {
    let (record, shape) = (view.sets.words(id).expect("the view knows the ids of its table"), view.sets.shape);
    let bank = |word: usize, bank: usize, tier: usize| record[shape.word(word, bank, tier)].load(Ordering::Relaxed);
    let words = (0..view.banks.len()).flat_map(|word| (0..shape.tiers).map(move |tier| (word, tier)));
    words.map(|(word, tier)| bank(word, 0, tier) & !view.banks[word] | bank(word, 1, tier) & view.banks[word]).collect()
}

fn slots(table: &Shards) -> Vec<(u64, u32)> {
    table.slots().collect()
}

fn see(index: &Index) -> Seen {
    let shared = index.reader.0.view.0.load();
    let view = View { table: shared.table.clone(), sets: shared.sets.clone(), banks: shared.banks.clone() };
    let slots = slots(&view.table);
    let ids: BTreeSet<u32> = slots.iter().map(|(_, id)| *id).filter(|id| *id != 0).collect();
    let sets = ids.into_iter().map(|id| (id, holders(&view, id))).collect();
    Seen { epoch: index.epoch, view, slots, sets }
}

/// A slot that named a living entry still has its key, and each id seen still names the same holders.
fn check(seen: &Seen, step: usize) {
    for (at, (before, now)) in seen.slots.iter().zip(slots(&seen.view.table)).enumerate() {
        assert!(before.1 == 0 || before.0 == now.0, "step {step}: slot {at} has another key within the grace period");
    }
    for (id, before) in &seen.sets {
        assert_eq!(&holders(&seen.view, *id), before, "step {step}: set {id} changed within the grace period");
    }
}

#[test]
fn what_was_seen_keeps_its_meaning_for_two_epochs() {
    const WORKERS: u64 = 6;
    let mut index = Index::new(1 << 20);
    for worker in 0..WORKERS {
        assert_eq!(index.add_worker(), WorkerIndex(worker as u32));
    }
    let mut random = model::Random(11);
    let mut seen: Vec<Seen> = Vec::new();
    let (mut checked, first) = (0, index.epoch);
    for step in 0..4000 {
        let worker = WorkerIndex(random.below(WORKERS) as u32);
        // The blocks in use move on, so that slots of dead ones are wanted for others.
        let start = 1 + (random.below(60) + step as u64 / 8) * 40;
        let run: Vec<_> = (start..start + 1 + random.below(40)).map(SequenceHash).collect();
        match random.below(60) {
            0 => index.clear(worker),
            1 => index.begin_snapshot(worker),
            2 => index.go_live(worker),
            3..30 => index.apply_stored(worker, Tier::Gpu, &run).unwrap(),
            _ => index.apply_removed(worker, Tier::Gpu, &run),
        }
        seen.retain(|seen| index.epoch <= seen.epoch + 1);
        seen.iter().for_each(|seen| check(seen, step));
        checked += seen.len();
        if seen.len() < 12 {
            seen.push(see(&index));
        }
    }
    assert!(index.epoch > first + 20 && checked > 1000, "{} epochs, {checked} checks", index.epoch - first);
}
