//! The published sets: how many blocks stand behind each sequence hash per level, and what of it has been sent.

use std::collections::HashMap;

use fovea_kv::sums::SetSums;
use fovea_kv::{SequenceHash, Tier};

/// Level of a block that no level contains.
pub(super) const UNPUBLISHED: u8 = 3;

/// Difference of one level between two published sets: apply the removals, then the stores.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LevelDelta {
    /// Children before parents.
    pub removed: Vec<SequenceHash>,
    /// Parents before children.
    pub stored: Vec<SequenceHash>,
}

/// Differences by level, index = `Tier::index`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Delta {
    pub levels: [LevelDelta; 3],
}

impl Delta {
    pub fn is_empty(&self) -> bool {
        self.levels.iter().all(|level| level.removed.is_empty() && level.stored.is_empty())
    }
}

#[derive(Clone, Copy, Debug, Default)]
struct Entry {
    /// Blocks behind this hash in each level: several when groups or look-ahead hashing give one content several engine hashes.
    blocks: [u32; 3],
    /// Position in the chain: parents have smaller ones.
    depth: u32,
    /// Level i has been sent ⇔ bit i.
    sent: u8,
    dirty: bool,
}

#[derive(Debug, Default)]
pub(super) struct Sets {
    entries: HashMap<SequenceHash, Entry>,
    /// Hashes whose entry is dirty, and some that came and went; bounded by the entries.
    dirty: Vec<SequenceHash>,
    published: [usize; 3],
    /// Levels in use: 0 up to the highest tier ever stored to.
    top: u8,
    /// Of what has been sent, by level.
    sums: [SetSums; 3],
}

impl Sets {
    /// One block behind `hash` moves from level `from` to `to`; [`UNPUBLISHED`] = in none.
    pub(super) fn shift(&mut self, hash: SequenceHash, depth: u32, from: u8, to: u8) {
        let entry = self.entries.entry(hash).or_default();
        entry.depth = depth;
        for (level, blocks) in entry.blocks.iter_mut().enumerate() {
            let (was, is) = (usize::from(from) <= level, usize::from(to) <= level);
            if is && !was {
                self.published[level] += usize::from(*blocks == 0);
                *blocks += 1;
            } else if was && !is {
                *blocks -= 1;
                self.published[level] -= usize::from(*blocks == 0);
            }
        }
        if entry.blocks == [0; 3] && entry.sent == 0 {
            // Came and went between two deltas: nobody is told.
            self.entries.remove(&hash);
        } else if !entry.dirty {
            entry.dirty = true;
            self.dirty.push(hash);
        }
        if self.dirty.len() > 2 * self.entries.len() + 1024 {
            self.dirty = self.entries.iter().filter(|(_, entry)| entry.dirty).map(|(&hash, _)| hash).collect();
        }
    }

    /// Brings the levels up to `tier` into use. The first time each is sent as a whole.
    pub(super) fn use_tier(&mut self, tier: Tier) {
        if tier.index() > self.top {
            self.top = tier.index();
            for (&hash, entry) in &mut self.entries {
                if !entry.dirty {
                    entry.dirty = true;
                    self.dirty.push(hash);
                }
            }
        }
    }

    /// Nothing is published any more.
    pub(super) fn clear(&mut self) {
        for (&hash, entry) in &mut self.entries {
            entry.blocks = [0; 3];
            if !entry.dirty {
                entry.dirty = true;
                self.dirty.push(hash);
            }
        }
        self.published = [0; 3];
    }

    pub(super) fn holds(&self, hash: SequenceHash) -> bool {
        self.entries.get(&hash).is_some_and(|entry| entry.blocks != [0; 3])
    }

    pub(super) fn is_dirty(&self) -> bool {
        !self.dirty.is_empty()
    }

    pub(super) fn published(&self) -> [usize; 3] {
        self.published
    }

    pub(super) fn take_delta(&mut self) -> Delta {
        let mut changed: [(Vec<_>, Vec<_>); 3] = Default::default();
        for hash in self.dirty.drain(..) {
            let Some(entry) = self.entries.get_mut(&hash).filter(|entry| entry.dirty) else { continue };
            entry.dirty = false;
            for (level, (removed, stored)) in changed.iter_mut().enumerate().take(usize::from(self.top) + 1) {
                let (is, was) = (entry.blocks[level] > 0, entry.sent & 1 << level != 0);
                match (was, is) {
                    (true, false) => {
                        removed.push((entry.depth, hash));
                        self.sums[level].remove(hash);
                    }
                    (false, true) => {
                        stored.push((entry.depth, hash));
                        self.sums[level].add(hash);
                    }
                    _ => continue,
                }
                entry.sent ^= 1 << level;
            }
            if entry.blocks == [0; 3] {
                self.entries.remove(&hash);
            }
        }
        Delta {
            levels: changed.map(|(removed, stored)| LevelDelta {
                removed: by_depth(removed).into_iter().rev().collect(),
                stored: by_depth(stored),
            }),
        }
    }

    pub(super) fn snapshot(&self, level: Tier) -> Vec<SequenceHash> {
        let sent = |entry: &Entry| entry.sent & 1 << level.index() != 0;
        by_depth(
            self.entries.iter().filter(|(_, entry)| sent(entry)).map(|(&hash, entry)| (entry.depth, hash)).collect(),
        )
    }

    /// Of [`Self::snapshot`] of each level.
    pub(super) fn sums(&self) -> &[SetSums; 3] {
        &self.sums
    }

    /// Blocks behind each hash, to compare with a count from scratch.
    pub(super) fn blocks(&self) -> HashMap<SequenceHash, [u32; 3]> {
        let counted = self.entries.iter().filter(|(_, entry)| entry.blocks != [0; 3]);
        counted.map(|(&hash, entry)| (hash, entry.blocks)).collect()
    }
}

fn by_depth(mut hashes: Vec<(u32, SequenceHash)>) -> Vec<SequenceHash> {
    hashes.sort_unstable();
    hashes.into_iter().map(|(_, hash)| hash).collect()
}
