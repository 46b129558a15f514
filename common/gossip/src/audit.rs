//! Do both ends hold the same? A balancer compares a digest with its own sums; where they differ it asks for buckets, and for those that
//! differ. Too many are cheaper as a snapshot.

use fovea_kv::SequenceHash;
use fovea_kv::sums::{BUCKETS, SetSums, bucket};

use crate::message::{BucketMask, Buckets};

/// Differing buckets of all levels above which a snapshot is asked for.
pub const REPAIR_BUCKETS_MAX: u32 = 64;

/// What to do about a worker whose digest differed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Remedy {
    /// They do not differ any more.
    Nothing,
    /// Ask for the hashes of these buckets, by level.
    Repair([BucketMask; 3]),
    Snapshot,
}

/// Compares bucket by bucket.
pub fn remedy(ours: &[SetSums; 3], theirs: &Buckets) -> Remedy {
    let mut masks = [BucketMask::default(); 3];
    for ((mask, ours), theirs) in masks.iter_mut().zip(ours).zip(theirs.levels.iter()) {
        for at in (0..BUCKETS).filter(|at| ours.buckets()[*at] != theirs[*at]) {
            mask[at / 8] |= 1 << (at % 8);
        }
    }
    match masks.iter().flatten().map(|byte| byte.count_ones()).sum() {
        0 => Remedy::Nothing,
        1..=REPAIR_BUCKETS_MAX => Remedy::Repair(masks),
        _ => Remedy::Snapshot,
    }
}

/// Is the hash's bucket one of these?
pub fn is_in(mask: &BucketMask, hash: SequenceHash) -> bool {
    let at = bucket(hash);
    mask[at / 8] >> (at % 8) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(ours: &[u64], theirs: &[u64], expected: Remedy) {
        let sums = |hashes: &[u64]| hashes.iter().map(|hash| SequenceHash(*hash)).collect::<SetSums>();
        let level = |hashes| *sums(hashes).buckets();
        let theirs = Buckets { worker: 0, epoch: 0, seq: 0, levels: Box::new([level(theirs), level(&[]), level(&[])]) };
        assert_eq!(remedy(&[sums(ours), SetSums::default(), SetSums::default()], &theirs), expected);
    }

    #[test]
    fn few_buckets_are_repaired_and_many_are_a_snapshot() {
        let mut mask = [0; 32];
        mask[1] = 2;
        check(&[1, 9 << 56], &[1], Remedy::Repair([mask, [0; 32], [0; 32]]));
        assert!(is_in(&mask, SequenceHash(9 << 56 | 5)) && !is_in(&mask, SequenceHash(1)));
        check(&[4, 5], &[5, 4], Remedy::Nothing);
        let many: Vec<u64> = (0..65).map(|at| at << 56 | 1).collect();
        check(&many, &[], Remedy::Snapshot);
    }
}
