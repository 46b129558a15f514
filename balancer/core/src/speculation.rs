//! What one worker is assumed to hold because this balancer sent it there, until its events tell.
//!
//! Sequence hashes commit to everything before them, so the blocks that two chains share are found by bisection over the two.
//! Kept apart from what is confirmed: only the choice looks at it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fovea_kv::SequenceHash;

use crate::load::BookingId;

/// Events follow the first response byte within this time; then they alone count.
const CONFIRMED_AFTER: Duration = Duration::from_secs(1);
/// Routed chains remembered per worker; the oldest go first.
const CHAINS_MAX: usize = 256;

#[derive(Debug)]
struct Routed {
    booking: BookingId,
    chain: Arc<[SequenceHash]>,
    until: Instant,
}

/// Chains of the requests a worker was sent lately, oldest first.
#[derive(Debug, Default)]
pub struct Speculation {
    routed: VecDeque<Routed>,
}

impl Speculation {
    /// A request was sent; it is assumed to be prefilled within `ttl`.
    pub fn routed(&mut self, booking: BookingId, chain: Arc<[SequenceHash]>, ttl: Duration, now: Instant) {
        while self.routed.len() >= CHAINS_MAX || self.routed.front().is_some_and(|oldest| oldest.until <= now) {
            self.routed.pop_front();
        }
        if !chain.is_empty() {
            self.routed.push_back(Routed { booking, chain, until: now + ttl });
        }
    }

    /// Its first response byte came: the blocks exist, and their events are on their way.
    pub fn started(&mut self, booking: BookingId, now: Instant) {
        if let Some(routed) = self.routed.iter_mut().find(|routed| routed.booking == booking) {
            routed.until = routed.until.min(now + CONFIRMED_AFTER);
        }
    }

    /// It ended without a response byte: nothing may be assumed.
    pub fn failed(&mut self, booking: BookingId) {
        self.routed.retain(|routed| routed.booking != booking);
    }

    /// Leading blocks of `chain` held or assumed held, given that `confirmed` are held. O(routed chains), plus O(log blocks) for each
    /// that goes further.
    pub fn depth(&self, chain: &[SequenceHash], confirmed: u32, now: Instant) -> u32 {
        let mut depth = confirmed as usize;
        for routed in self.routed.iter().filter(|routed| routed.until > now) {
            if matches!((chain.get(depth), routed.chain.get(depth)), (Some(a), Some(b)) if a == b) {
                let both = chain.len().min(routed.chain.len());
                let rest = depth..both;
                depth += rest_shared(&chain[rest.clone()], &routed.chain[rest]);
            }
        }
        u32::try_from(depth).unwrap_or(u32::MAX)
    }
}

/// Leading equal hashes of two equally long chains.
fn rest_shared(a: &[SequenceHash], b: &[SequenceHash]) -> usize {
    let (mut low, mut high) = (0, a.len());
    while low < high {
        let middle = low.midpoint(high);
        if a[middle] == b[middle] {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    low
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::WorkerLoad;

    const TTL: Duration = Duration::from_secs(10);

    fn chain(hashes: &[u64]) -> Arc<[SequenceHash]> {
        hashes.iter().copied().map(SequenceHash).collect()
    }

    /// A worker that was sent the chains, and the last booking.
    fn sent(chains: &[&[u64]]) -> (Speculation, BookingId, Instant) {
        let (mut load, mut speculation, now) = (WorkerLoad::default(), Speculation::default(), Instant::now());
        let mut last = load.book(Default::default(), [].into());
        for hashes in chains {
            last = load.book(Default::default(), [].into());
            speculation.routed(last, chain(hashes), TTL, now);
        }
        (speculation, last, now)
    }

    #[track_caller]
    fn check(chains: &[&[u64]], asked: &[u64], confirmed: u32, expect: u32) {
        let (speculation, _, now) = sent(chains);
        assert_eq!(speculation.depth(&chain(asked), confirmed, now), expect);
    }

    #[test]
    fn the_longest_shared_front_counts() {
        check(&[&[1, 2, 3], &[1, 2, 8, 9]], &[1, 2, 8, 7], 0, 3);
        check(&[&[1, 2, 3]], &[1, 2, 3, 4], 0, 3);
        check(&[&[1, 2, 3]], &[5], 0, 0);
        check(&[&[1, 2, 3]], &[], 0, 0);
        check(&[&[]], &[1], 0, 0);
    }

    #[test]
    fn what_is_confirmed_stays() {
        check(&[&[1, 2, 3]], &[1, 2, 3, 4], 4, 4);
        check(&[&[1, 9]], &[1, 2, 3, 4], 2, 2);
        check(&[&[1, 2, 3]], &[1, 2, 3], 1, 3);
    }

    #[test]
    fn an_assumption_ends_by_time_by_events_or_by_failure() {
        let asked = chain(&[1, 2]);
        let (mut speculation, last, now) = sent(&[&[1, 2]]);
        assert_eq!(speculation.depth(&asked, 0, now + TTL), 0);
        speculation.started(last, now);
        assert_eq!(speculation.depth(&asked, 0, now), 2);
        assert_eq!(speculation.depth(&asked, 0, now + CONFIRMED_AFTER), 0);
        speculation.failed(last);
        assert_eq!(speculation.depth(&asked, 0, now), 0);
    }

    #[test]
    fn only_so_many_are_remembered() {
        let one: &[u64] = &[1, 2];
        let (speculation, ..) = sent(&vec![one; CHAINS_MAX + 9]);
        assert_eq!(speculation.routed.len(), CHAINS_MAX);
    }
}
