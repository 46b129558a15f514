//! What the table promises of itself, for tests.

use super::*;

impl Table {
    /// Ids of all living entries.
    pub fn each(&self, look: impl FnMut(u32)) {
        let lines = self.shards.iter().flat_map(|shard| shard.lines().iter());
        let ids = lines.flat_map(|line| &line.ids).map(|id| id.load(Ordering::Relaxed));
        ids.filter(|id| *id != 0 && *id & DEAD == 0).for_each(look);
    }

    /// Counts, tags and filters say what the slots hold.
    pub fn check(&self) {
        let mut live = 0;
        for shard in &self.shards {
            let mut passed = vec![0_u32; shard.lines().len()];
            let (mut alive, mut used) = (0, 0);
            for (at, line) in shard.lines().iter().enumerate() {
                let tags = shard.part.tags[at].load(Ordering::Relaxed);
                assert_eq!(tags & PASSED != 0, line.passed.load(Ordering::Relaxed) > 0);
                for (slot, (key, id)) in line.keys.iter().zip(&line.ids).enumerate() {
                    let (key, id) = (key.load(Ordering::Relaxed), id.load(Ordering::Relaxed));
                    let marked = tags >> (8 * slot) & 0xFF;
                    if key == 0 {
                        assert_eq!((id, marked), (0, 0));
                        continue;
                    }
                    assert_eq!(marked, tag(spread(key)));
                    used += 1;
                    alive += usize::from(id & DEAD == 0);
                    let mut line = home(spread(key), shard.lines());
                    while line != at {
                        let tags = shard.part.tags[line].load(Ordering::Relaxed);
                        assert!(tags & passing(spread(key)) != 0);
                        passed[line] += 1;
                        line = shard.next(line);
                    }
                }
            }
            let counted: Vec<_> = shard.lines().iter().map(|line| line.passed.load(Ordering::Relaxed)).collect();
            assert_eq!((passed, alive, used), (counted, shard.live, shard.used));
            live += alive;
        }
        assert_eq!(live, self.live);
    }
}
