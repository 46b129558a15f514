//! What a balancer must hold of one worker, kept beside the index hash by hash: every state on the way must be closed by prefix.

use std::collections::{BTreeSet, HashMap};

use fovea_kv::sums::{SetSums, Sums};
use fovea_kv::{SequenceHash, Tier};

type Sets = [BTreeSet<SequenceHash>; 3];

#[derive(Default)]
pub struct Mirror {
    pub live: Sets,
    coming: Option<Sets>,
    pub is_live: bool,
    /// Held children of each held block, by level.
    children: [HashMap<SequenceHash, u32>; 3],
}

impl Mirror {
    pub fn void(&mut self) {
        *self = Self::default();
    }

    pub fn begin(&mut self) {
        self.coming = Some(Sets::default());
    }

    /// The new set begins with what `keep` takes.
    pub fn mend(&mut self, keep: impl Fn(Tier, SequenceHash) -> bool) {
        let kept = Tier::ALL.map(|level| {
            let held = &self.live[usize::from(level.index())];
            held.iter().copied().filter(|hash| keep(level, *hash)).collect()
        });
        self.coming = Some(kept);
    }

    pub fn stored(
        &mut self,
        level: Tier,
        hashes: &[SequenceHash],
        parents: &HashMap<SequenceHash, Option<SequenceHash>>,
    ) -> Result<(), String> {
        let level = usize::from(level.index());
        if let Some(coming) = &mut self.coming {
            coming[level].extend(hashes);
            return Ok(());
        }
        for hash in hashes {
            let parent = *parents.get(hash).ok_or_else(|| format!("{hash:?} is no block of any prompt"))?;
            if let Some(parent) = parent {
                if !self.live[level].contains(&parent) {
                    return Err(format!("level {level}: {hash:?} stored before its parent"));
                }
                *self.children[level].entry(parent).or_default() += 1;
            }
            if !self.live[level].insert(*hash) {
                return Err(format!("level {level}: {hash:?} stored twice"));
            }
        }
        Ok(())
    }

    pub fn removed(
        &mut self,
        level: Tier,
        hashes: &[SequenceHash],
        parents: &HashMap<SequenceHash, Option<SequenceHash>>,
    ) -> Result<(), String> {
        let level = usize::from(level.index());
        for hash in hashes {
            if self.children[level].get(hash).is_some_and(|held| *held > 0) {
                return Err(format!("level {level}: {hash:?} removed before its children"));
            }
            if !self.live[level].remove(hash) {
                return Err(format!("level {level}: {hash:?} removed and not held"));
            }
            if let Some(held) = parents.get(hash).copied().flatten().and_then(|at| self.children[level].get_mut(&at)) {
                *held -= 1;
            }
        }
        Ok(())
    }

    /// The set that was begun counts: it must be closed as a whole.
    pub fn go_live(&mut self, parents: &HashMap<SequenceHash, Option<SequenceHash>>) -> Result<(), String> {
        self.live = self.coming.take().ok_or("a set goes live that was not begun")?;
        self.is_live = true;
        self.children = Default::default();
        for (level, (set, children)) in self.live.iter().zip(&mut self.children).enumerate() {
            for hash in set {
                let Some(parent) = parents.get(hash).copied().flatten() else { continue };
                if !set.contains(&parent) {
                    return Err(format!("level {level}: a snapshot has {hash:?} without its parent"));
                }
                *children.entry(parent).or_default() += 1;
            }
        }
        Ok(())
    }

    pub fn sums(&self) -> [Sums; 3] {
        self.live.each_ref().map(|set| set.iter().copied().collect::<SetSums>().total())
    }

    /// Leading blocks of `chain` held in the GPU.
    pub fn depth(&self, chain: &[SequenceHash]) -> usize {
        if self.is_live { chain.iter().take_while(|hash| self.live[0].contains(hash)).count() } else { 0 }
    }
}
