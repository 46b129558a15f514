//! How busy one worker is: the requests this balancer sent there, exactly, and what its sidecar's last report counts beyond them.
//!
//! A report and this balancer's own sends and answers cross each other on the way. A report is taken to know all that is known here;
//! where it does not yet, the change that it misses makes the sidecar send another within its shortest pause (50 ms by default), so such
//! an error does not last. Reports count a request whole until its first byte. How far its prefill has come is told by the worker's
//! events: the blocks of its own chain that are held by now are taken off.

use std::collections::BTreeMap;
use std::sync::Arc;

use fovea_kv::SequenceHash;

/// Waiting bookings whose progress is followed, the oldest first: an engine computes prompts nearly in order of arrival.
const FOLLOWED_MAX: usize = 64;

/// A sidecar's account of one worker, all balancers' requests together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Report {
    /// Requests with a first byte and without a last.
    pub running: u32,
    /// Requests without a first byte.
    pub waiting: u32,
    /// Prompt tokens of waiting requests that no cache covers.
    pub prefill_tokens: u64,
    /// Prompt tokens of running requests.
    pub decode_tokens: u64,
}

/// What one routed request costs its worker.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Charge {
    /// Prompt tokens expected to be computed: what its sidecar counts for it, too.
    pub prefill_tokens: u64,
    /// Length of the whole prompt.
    pub prompt_tokens: u64,
    /// What encoding its images takes, in prefill tokens. Sidecars do not count it.
    pub encode_tokens: u64,
    /// Tokens per block of the chain booked with it; 0 = its progress is not told.
    pub block_tokens: u32,
}

/// Names one booking of one worker; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BookingId(u64);

#[derive(Clone, Debug)]
struct Booking {
    charge: Charge,
    chain: Arc<[SequenceHash]>,
    /// Leading blocks of the chain that the worker held when it was measured last.
    held_blocks: u32,
    /// Its first response byte was seen.
    started: bool,
}

impl Booking {
    /// Work before its first output. A request's last block is not full, or computed again: something is always left of a prefill.
    fn left_tokens(&self) -> u64 {
        let Charge { prefill_tokens, prompt_tokens, encode_tokens, block_tokens } = self.charge;
        let held = u64::from(self.held_blocks) * u64::from(block_tokens);
        let left = prompt_tokens.saturating_sub(held).max(1).min(prefill_tokens);
        // Images lie anywhere in the part that is computed.
        left + (encode_tokens * left).checked_div(prefill_tokens).unwrap_or(encode_tokens)
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sums {
    /// Of waiting requests: what is left …
    left_waiting: u64,
    /// … and what their sidecar counts.
    prefill_waiting: u64,
    decode_running: u64,
}

/// The load of one worker as this balancer sees it.
#[derive(Debug, Default)]
pub struct WorkerLoad {
    report: Report,
    bookings: BTreeMap<BookingId, Booking>,
    next: u64,
    sums: Sums,
    /// Of the last report, beyond this balancer's requests of that moment.
    others_prefill: u64,
    others_decode: u64,
}

impl WorkerLoad {
    /// Takes the place of the report before.
    pub fn report(&mut self, report: Report) {
        self.report = report;
        self.others_prefill = report.prefill_tokens.saturating_sub(self.sums.prefill_waiting);
        self.others_decode = report.decode_tokens.saturating_sub(self.sums.decode_running);
    }

    /// Books a request that is about to be sent. Every booking must be given back to [`Self::release`].
    /// `chain`: of its prompt, as far as known; its prefill shows in the worker's events.
    pub fn book(&mut self, charge: Charge, chain: Arc<[SequenceHash]>) -> BookingId {
        let id = BookingId(self.next);
        self.next += 1;
        self.bookings.insert(id, Booking { charge, chain, held_blocks: 0, started: false });
        self.add_up();
        id
    }

    /// The worker's events were applied: `held` tells how many leading blocks of a chain it holds now, given how many it held before.
    /// It is called for the oldest waiting requests, at most [`FOLLOWED_MAX`] times.
    pub fn measure(&mut self, mut held: impl FnMut(&[SequenceHash], u32) -> u32) {
        let is_followed =
            |booking: &&mut Booking| !booking.started && booking.charge.block_tokens > 0 && !booking.chain.is_empty();
        let mut moved = false;
        for booking in self.bookings.values_mut().filter(is_followed).take(FOLLOWED_MAX) {
            let before = booking.held_blocks;
            booking.held_blocks = held(&booking.chain, before);
            moved |= booking.held_blocks != before;
        }
        if moved {
            self.add_up();
        }
    }

    /// The request's first response byte came: its prefill is done. Returns the chain it was booked with and the tokens of its blocks,
    /// the first time.
    pub fn started(&mut self, id: BookingId) -> Option<(Arc<[SequenceHash]>, u32)> {
        let booking = self.bookings.get_mut(&id).filter(|booking| !booking.started)?;
        booking.started = true;
        let chain = std::mem::replace(&mut booking.chain, [].into());
        let block_tokens = booking.charge.block_tokens;
        self.add_up();
        Some((chain, block_tokens))
    }

    /// The request is over, however it ended. An unknown booking is ignored: its worker was replaced.
    pub fn release(&mut self, id: BookingId) {
        self.bookings.remove(&id);
        self.add_up();
    }

    /// Work before a new request gets its turn, in prefill tokens.
    pub fn waiting_tokens(&self) -> u64 {
        self.others_prefill + self.sums.left_waiting
    }

    /// Prompt tokens of the requests that are being decoded.
    pub fn decode_tokens(&self) -> u64 {
        self.others_decode + self.sums.decode_running
    }

    /// Everything the worker has on its hands, in tokens.
    pub fn outstanding_tokens(&self) -> u64 {
        self.waiting_tokens() + self.decode_tokens()
    }

    /// Requests of this balancer at the worker.
    pub fn booked(&self) -> usize {
        self.bookings.len()
    }

    pub fn last_report(&self) -> Report {
        self.report
    }

    /// O(bookings): as many as an engine's batch and queue hold, a few hundred.
    fn add_up(&mut self) {
        let mut sums = Sums::default();
        for booking in self.bookings.values() {
            if booking.started {
                sums.decode_running += booking.charge.prompt_tokens;
            } else {
                sums.left_waiting += booking.left_tokens();
                sums.prefill_waiting += booking.charge.prefill_tokens;
            }
        }
        self.sums = sums;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn charge(tokens: u64) -> Charge {
        Charge { prefill_tokens: tokens, prompt_tokens: 2 * tokens, block_tokens: 10, encode_tokens: 0 }
    }

    fn told(prefill_tokens: u64, decode_tokens: u64) -> Report {
        Report { prefill_tokens, decode_tokens, ..Report::default() }
    }

    fn chain(first: u64) -> Arc<[SequenceHash]> {
        (first..first + 20).map(SequenceHash).collect()
    }

    #[track_caller]
    fn check(load: &WorkerLoad, waiting: u64, decode: u64) {
        assert_eq!((load.waiting_tokens(), load.decode_tokens()), (waiting, decode));
    }

    #[test]
    fn a_request_counts_from_its_booking_to_its_release() {
        let mut load = WorkerLoad::default();
        let id = load.book(charge(100), [].into());
        check(&load, 100, 0);
        assert!(load.started(id).is_some() && load.started(id).is_none());
        check(&load, 0, 200);
        load.release(id);
        check(&load, 0, 0);
    }

    #[test]
    fn a_request_that_ended_since_the_report_counts_no_more() {
        let mut load = WorkerLoad::default();
        let (first, second) = (load.book(charge(100), [].into()), load.book(charge(40), [].into()));
        load.started(first);
        // Another balancer's: 7 waiting, 9 running.
        load.report(told(47, 209));
        check(&load, 47, 209);
        load.release(first);
        check(&load, 47, 9);
        load.started(second);
        check(&load, 7, 80 + 9);
        load.release(second);
        check(&load, 7, 9);
    }

    #[test]
    fn a_report_and_a_booking_that_cross_are_set_right_by_the_next_report() {
        let mut load = WorkerLoad::default();
        let id = load.book(charge(100), [].into());
        // It left before the request came; then the request's coming makes another.
        load.report(told(130, 0));
        load.report(told(30, 0));
        check(&load, 100, 0);
        load.report(told(130, 0));
        check(&load, 130, 0);
        // The same at its end.
        load.release(id);
        load.report(told(130, 0));
        check(&load, 130, 0);
        load.report(told(30, 0));
        check(&load, 30, 0);
    }

    #[test]
    fn own_waiting_requests_are_the_floor() {
        let mut load = WorkerLoad::default();
        load.book(charge(100), [].into());
        load.report(told(0, 0));
        check(&load, 100, 0);
    }

    #[test]
    fn blocks_of_its_own_chain_come_off_a_waiting_request() {
        let mut load = WorkerLoad::default();
        // 100 of 200 tokens are to be computed: the first ten blocks are held already.
        let (first, second) = (load.book(charge(100), chain(1)), load.book(charge(100), chain(50)));
        let held = |depth: u32| move |chain: &[SequenceHash], _| if chain[0].0 == 1 { depth } else { 0 };
        load.measure(held(10));
        check(&load, 200, 0);
        load.measure(held(13));
        check(&load, 170, 0);
        load.report(told(205, 0));
        check(&load, 175, 0);
        load.measure(held(20));
        check(&load, 106, 0);
        load.started(first);
        check(&load, 105, 200);
        load.measure(held(0));
        check(&load, 105, 200);
        load.release(second);
        check(&load, 5, 200);
    }

    #[test]
    fn encoding_goes_with_the_prefill_it_stands_in() {
        let mut load = WorkerLoad::default();
        load.book(Charge { encode_tokens: 60, ..charge(100) }, chain(1));
        check(&load, 160, 0);
        load.measure(|_, _| 15);
        check(&load, 80, 0);
        // No sidecar counts it.
        load.report(told(100, 0));
        check(&load, 80, 0);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Book(u64),
        Started(usize),
        Release(usize),
        Report(u64),
        Measure(u32),
    }

    proptest! {
        #[test]
        fn no_booking_outlives_its_release(steps in prop::collection::vec(prop_oneof![
            (0..1000u64).prop_map(Step::Book),
            (0..8usize).prop_map(Step::Started),
            (0..8usize).prop_map(Step::Release),
            (0..1000u64).prop_map(Step::Report),
            (0..200u32).prop_map(Step::Measure),
        ], 0..60)) {
            let (mut load, mut open) = (WorkerLoad::default(), Vec::new());
            for step in steps {
                match step {
                    Step::Book(tokens) => open.push(load.book(charge(tokens), chain(1))),
                    Step::Started(i) => { open.get(i).into_iter().for_each(|id| { load.started(*id); }); }
                    Step::Release(i) if i < open.len() => load.release(open.swap_remove(i)),
                    Step::Release(_) => {}
                    Step::Report(tokens) => load.report(told(tokens, 0)),
                    Step::Measure(blocks) => load.measure(|_, _| blocks),
                }
                prop_assert_eq!(load.booked(), open.len());
            }
            open.drain(..).for_each(|id| load.release(id));
            load.report(Report::default());
            prop_assert_eq!((load.booked(), load.outstanding_tokens()), (0, 0));
        }
    }
}
