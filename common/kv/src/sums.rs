//! Sums over a set of sequence hashes that both ends keep as it changes, to find out whether they hold the same without sending it.
//!
//! Not against forgery: they find mistakes. Two different sets have equal totals by chance once in 2¹²⁸, equal buckets once in 2⁶⁴.

use crate::SequenceHash;

/// Parts of a set that are compared one by one: by the first byte of the hash.
pub const BUCKETS: usize = 256;

/// How many hashes, and their sum mod 2¹²⁸, each mixed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sums {
    pub count: u64,
    pub sum: u128,
}

/// Sums of one set and of its buckets. 2 KiB.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SetSums {
    total: Sums,
    buckets: [u64; BUCKETS],
}

impl Default for SetSums {
    fn default() -> Self {
        Self { total: Sums::default(), buckets: [0; BUCKETS] }
    }
}

impl SetSums {
    /// `hash` was not in the set. O(1).
    pub fn add(&mut self, hash: SequenceHash) {
        let [low, high] = mixed(hash);
        self.total.count = self.total.count.wrapping_add(1);
        self.total.sum = self.total.sum.wrapping_add(wide(low, high));
        let sum = &mut self.buckets[bucket(hash)];
        *sum = sum.wrapping_add(low);
    }

    /// `hash` was in the set. O(1).
    pub fn remove(&mut self, hash: SequenceHash) {
        let [low, high] = mixed(hash);
        self.total.count = self.total.count.wrapping_sub(1);
        self.total.sum = self.total.sum.wrapping_sub(wide(low, high));
        let sum = &mut self.buckets[bucket(hash)];
        *sum = sum.wrapping_sub(low);
    }

    pub fn total(&self) -> Sums {
        self.total
    }

    /// Sum mod 2⁶⁴ of each bucket.
    pub fn buckets(&self) -> &[u64; BUCKETS] {
        &self.buckets
    }
}

impl FromIterator<SequenceHash> for SetSums {
    fn from_iter<I: IntoIterator<Item = SequenceHash>>(hashes: I) -> Self {
        let mut sums = Self::default();
        hashes.into_iter().for_each(|hash| sums.add(hash));
        sums
    }
}

/// Bucket of a hash: its highest byte.
pub fn bucket(hash: SequenceHash) -> usize {
    usize::from(hash.0.to_be_bytes()[0])
}

fn wide(low: u64, high: u64) -> u128 {
    u128::from(high) << 64 | u128::from(low)
}

/// Two independent mixes (the finaliser of SplitMix64 over different offsets). On the wire: both ends must have the same.
fn mixed(hash: SequenceHash) -> [u64; 2] {
    [0x9e37_79b9_7f4a_7c15, 0x6a09_e667_f3bc_c909].map(|offset: u64| {
        let mut z = hash.0.wrapping_add(offset);
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sums(hashes: &[u64]) -> SetSums {
        hashes.iter().copied().map(SequenceHash).collect()
    }

    #[test]
    fn order_does_not_matter_and_removal_undoes() {
        let mut all = sums(&[3, 1 << 60, 7]);
        assert_eq!(all, sums(&[7, 3, 1 << 60]));
        all.remove(SequenceHash(1 << 60));
        assert_eq!(all, sums(&[3, 7]));
        all.remove(SequenceHash(3));
        all.remove(SequenceHash(7));
        assert_eq!(all, SetSums::default());
    }

    #[test]
    fn a_difference_shows_in_its_bucket_alone() {
        let (a, b) = (sums(&[1, 5 << 56]), sums(&[1, 6 << 56]));
        assert_ne!(a.total(), b.total());
        let differ: Vec<_> = (0..BUCKETS).filter(|at| a.buckets()[*at] != b.buckets()[*at]).collect();
        assert_eq!(differ, [5, 6]);
    }

    /// SplitMix64 seeded with 0 gives e220a8397b1dcdaf first; its offset is the first of ours.
    #[test]
    fn the_mix_is_that_of_the_reference() {
        assert_eq!(mixed(SequenceHash(0))[0], 0xe220_a839_7b1d_cdaf);
    }
}
