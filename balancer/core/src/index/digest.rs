//! What one worker holds, summed up as it changes, and how a set that is found wrong is put right.

use fovea_kv::sums::{SetSums, Sums};
use fovea_kv::{SequenceHash, Tier};

use super::table::SHARDS;
use super::{Index, IndexFull, WorkerIndex};

/// Sums of one bank, by level; `None` = nothing of that level.
pub(super) type Levels = [Option<Box<SetSums>>; 3];

impl Index {
    /// Count and sum of what a worker holds, by level; `None` for one that is not there, or was taken out because the index was full.
    pub fn digest(&self, worker: WorkerIndex) -> Option<[Sums; 3]> {
        let levels = self.live_sums(worker)?;
        Some(levels.each_ref().map(|level| level.as_ref().map_or(Sums::default(), |sums| sums.total())))
    }

    /// The same with all buckets. Copies 6 KiB.
    pub fn sums(&self, worker: WorkerIndex) -> Option<[SetSums; 3]> {
        let levels = self.live_sums(worker)?;
        Some(levels.each_ref().map(|level| level.as_deref().cloned().unwrap_or_default()))
    }

    /// Every hash that a worker holds in one level, in no order. O(entries of all workers): for repairs and tests.
    pub fn held(&self, worker: WorkerIndex, level: Tier) -> Vec<SequenceHash> {
        let mut out = Vec::new();
        let (Some(place), shape) = (self.place(worker), self.sets.shape()) else { return out };
        let tier = usize::from(level.index());
        if tier >= shape.tiers {
            return out;
        }
        let (word, bit) = (shape.word(place / 64, self.slots[place].bank, tier), 1 << (place % 64));
        let arena = self.sets.arena();
        for shard in 0..SHARDS {
            self.table.scan(shard, |key, id| {
                let words = arena.words(id).and_then(|words| words.get(word));
                if words.is_some_and(|held| held.load(std::sync::atomic::Ordering::Relaxed) & bit != 0) {
                    out.push(SequenceHash(key));
                }
            });
        }
        out
    }

    /// Begins a snapshot with what is held and `keep` takes: the rest is to be stored, then [`Self::go_live`] puts it in place in one step.
    /// Lookups answer from the old set until then. O(entries of all workers).
    ///
    /// # Errors
    /// When the limit would be exceeded, as in [`Self::apply_stored`].
    pub fn begin_repair(
        &mut self,
        worker: WorkerIndex,
        keep: impl Fn(Tier, SequenceHash) -> bool,
    ) -> Result<(), IndexFull> {
        let kept = Tier::ALL.map(|level| {
            let mut held = self.held(worker, level);
            held.retain(|hash| keep(level, *hash));
            held
        });
        self.begin_snapshot(worker);
        for (level, hashes) in Tier::ALL.into_iter().zip(kept) {
            if !hashes.is_empty() {
                self.apply_stored(worker, level, &hashes)?;
            }
        }
        Ok(())
    }

    fn live_sums(&self, worker: WorkerIndex) -> Option<&Levels> {
        let place = self.place(worker).filter(|place| !self.slots[*place].out)?;
        Some(&self.sums[place][self.slots[place].bank])
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::WorkerDepth;

    fn hashes(range: std::ops::Range<u64>) -> Vec<SequenceHash> {
        // Spread over the buckets, one chain.
        range.map(|at| SequenceHash((at << 56 | at) + 1)).collect()
    }

    fn check(index: &Index, worker: WorkerIndex) {
        let held = Tier::ALL.map(|level| index.held(worker, level).into_iter().collect::<SetSums>());
        assert_eq!(index.sums(worker), Some(held.clone()));
        assert_eq!(index.digest(worker), Some(held.map(|sums| sums.total())));
    }

    #[test]
    fn sums_follow_what_is_held() {
        let mut index = Index::new(1 << 20);
        let (a, b) = (index.add_worker(), index.add_worker());
        index.apply_stored(a, Tier::Gpu, &hashes(0..300)).unwrap();
        index.apply_stored(a, Tier::Gpu, &hashes(0..310)).unwrap();
        index.apply_stored(b, Tier::Gpu, &hashes(0..100)).unwrap();
        index.apply_stored(a, Tier::Cpu, &hashes(0..320)).unwrap();
        let back: Vec<_> = hashes(290..400).into_iter().rev().collect();
        index.apply_removed(a, Tier::Gpu, &back);
        index.apply_removed(a, Tier::Gpu, &back);
        [a, b].iter().for_each(|worker| check(&index, *worker));
        assert_eq!(index.digest(a).unwrap().map(|sums| sums.count), [290, 320, 0]);
        index.begin_snapshot(a);
        index.apply_stored(a, Tier::Gpu, &hashes(5..9)).unwrap();
        assert_eq!(index.digest(a).unwrap()[0].count, 290);
        index.go_live(a);
        [a, b].iter().for_each(|worker| check(&index, *worker));
        assert_eq!(index.digest(a).unwrap().map(|sums| sums.count), [4, 0, 0]);
        index.clear(a);
        check(&index, a);
        index.remove_worker(b);
        assert_eq!(index.digest(b), None);
    }

    #[test]
    fn a_repair_replaces_what_is_not_kept_in_one_step() {
        let mut index = Index::new(1 << 20);
        let (a, b) = (index.add_worker(), index.add_worker());
        let chain = hashes(0..64);
        index.apply_stored(b, Tier::Gpu, &chain).unwrap();
        index.apply_stored(a, Tier::Gpu, &chain[..40]).unwrap();
        let mut depths = Vec::new();
        let mut seen = |index: &Index| {
            index.depths(&chain, &mut depths);
            depths.iter().map(|WorkerDepth { depth, .. }| depth[0]).collect::<Vec<_>>()
        };
        index.begin_repair(a, |_, hash| fovea_kv::sums::bucket(hash).is_multiple_of(2)).unwrap();
        assert_eq!(seen(&index), [40, 64]);
        let odd: Vec<_> =
            chain[..50].iter().copied().filter(|hash| !fovea_kv::sums::bucket(*hash).is_multiple_of(2)).collect();
        index.apply_stored(a, Tier::Gpu, &odd).unwrap();
        assert_eq!(seen(&index), [40, 64]);
        index.go_live(a);
        // Block 40 lies in an even bucket, and was not held.
        assert_eq!(seen(&index), [40, 64]);
        assert_eq!(index.digest(a).unwrap()[0].count, 45);
        check(&index, a);
        check(&index, b);
    }

    #[test]
    fn a_worker_taken_out_has_no_digest() {
        let mut index = Index::new(10);
        let worker = index.add_worker();
        assert!(index.apply_stored(worker, Tier::Gpu, &hashes(0..20)).is_err());
        assert_eq!(index.digest(worker), None);
        index.begin_snapshot(worker);
        check(&index, worker);
    }
}
