//! How busy one worker is: what its sidecar reported last, plus what this balancer sent since then.
//!
//! A report says nothing of requests still on their way to the sidecar, so each routed request is booked until a later
//! report covers it; and it still counts requests that this balancer has seen begin or end since, so these are taken off until a
//! later report leaves them out. A worker is at least as busy as the requests this balancer waits for: their sum is a floor.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// What happened this long before a report arrived is counted in that report.
const ON_ITS_WAY: Duration = Duration::from_millis(10);

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
    /// Prompt tokens expected to be computed.
    pub prefill_tokens: u64,
    /// Length of the whole prompt.
    pub prompt_tokens: u64,
}

/// Names one booking of one worker; never used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BookingId(u64);

#[derive(Clone, Copy, Debug)]
struct Booking {
    charge: Charge,
    sent_at: Instant,
    /// As what the last report counted it; `None` = not yet.
    reported: Option<Stage>,
    /// Its first response byte was seen.
    started: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    Waiting,
    Running,
}

/// What the last report still counts though it is over.
#[derive(Clone, Copy, Debug)]
struct Over {
    at: Instant,
    prefill_tokens: u64,
    decode_tokens: u64,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Sums {
    prefill_waiting: u64,
    prefill_unreported: u64,
    decode_running: u64,
    /// Of the report, over by now.
    prefill_over: u64,
    decode_over: u64,
}

/// The load of one worker as this balancer sees it.
#[derive(Debug, Default)]
pub struct WorkerLoad {
    report: Report,
    bookings: BTreeMap<BookingId, Booking>,
    /// Since the last report; as many as requests end between two of them.
    over: Vec<Over>,
    next: u64,
    sums: Sums,
}

impl WorkerLoad {
    /// Takes the place of the report before.
    pub fn report(&mut self, report: Report, now: Instant) {
        self.report = report;
        let is_told = |at: Instant| now.saturating_duration_since(at) >= ON_ITS_WAY;
        for booking in self.bookings.values_mut().filter(|booking| is_told(booking.sent_at)) {
            booking.reported = Some(if booking.started { Stage::Running } else { Stage::Waiting });
        }
        self.over.retain(|over| !is_told(over.at));
        self.add_up();
    }

    /// Books a request that is about to be sent. Every booking must be given back to [`Self::release`].
    pub fn book(&mut self, charge: Charge, now: Instant) -> BookingId {
        let id = BookingId(self.next);
        self.next += 1;
        self.bookings.insert(id, Booking { charge, sent_at: now, reported: None, started: false });
        self.add_up();
        id
    }

    /// The request's first response byte came: its prefill is done.
    pub fn started(&mut self, id: BookingId, now: Instant) {
        if let Some(booking) = self.bookings.get_mut(&id)
            && !std::mem::replace(&mut booking.started, true)
            && booking.reported == Some(Stage::Waiting)
        {
            self.over.push(Over { at: now, prefill_tokens: booking.charge.prefill_tokens, decode_tokens: 0 });
        }
        self.add_up();
    }

    /// The request is over, however it ended. An unknown booking is ignored: its worker was replaced.
    pub fn release(&mut self, id: BookingId, now: Instant) {
        if let Some(Booking { charge, reported, started, .. }) = self.bookings.remove(&id) {
            let over = match (reported, started) {
                (Some(Stage::Running), _) => Some((0, charge.prompt_tokens)),
                (Some(Stage::Waiting), false) => Some((charge.prefill_tokens, 0)),
                // Taken off when it started, or never counted.
                (Some(Stage::Waiting), true) | (None, _) => None,
            };
            let over = over.map(|(prefill_tokens, decode_tokens)| Over { at: now, prefill_tokens, decode_tokens });
            self.over.extend(over);
        }
        self.add_up();
    }

    /// Prompt tokens to compute before a new request gets its turn.
    pub fn waiting_tokens(&self) -> u64 {
        let reported = self.report.prefill_tokens.saturating_sub(self.sums.prefill_over);
        (reported + self.sums.prefill_unreported).max(self.sums.prefill_waiting)
    }

    /// Prompt tokens of the requests that are being decoded.
    pub fn decode_tokens(&self) -> u64 {
        self.report.decode_tokens.saturating_sub(self.sums.decode_over).max(self.sums.decode_running)
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
                continue;
            }
            sums.prefill_waiting += booking.charge.prefill_tokens;
            if booking.reported.is_none() {
                sums.prefill_unreported += booking.charge.prefill_tokens;
            }
        }
        sums.prefill_over = self.over.iter().map(|over| over.prefill_tokens).sum();
        sums.decode_over = self.over.iter().map(|over| over.decode_tokens).sum();
        self.sums = sums;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn charge(tokens: u64) -> Charge {
        Charge { prefill_tokens: tokens, prompt_tokens: 2 * tokens }
    }

    fn waits(prefill_tokens: u64) -> Report {
        Report { prefill_tokens, ..Report::default() }
    }

    #[track_caller]
    fn check(load: &WorkerLoad, waiting: u64, decode: u64) {
        assert_eq!((load.waiting_tokens(), load.decode_tokens()), (waiting, decode));
    }

    #[test]
    fn a_request_counts_from_its_booking_to_its_release() {
        let (mut load, now) = (WorkerLoad::default(), Instant::now());
        let id = load.book(charge(100), now);
        check(&load, 100, 0);
        load.started(id, now);
        check(&load, 0, 200);
        load.release(id, now);
        check(&load, 0, 0);
    }

    #[test]
    fn a_request_that_ended_since_the_report_counts_no_more() {
        let (mut load, now) = (WorkerLoad::default(), Instant::now());
        let at = |millis| now + Duration::from_millis(millis);
        let (first, second) = (load.book(charge(100), now), load.book(charge(40), now));
        load.started(first, at(1));
        // Another balancer's: 7 waiting, 9 running.
        let told = Report { prefill_tokens: 47, decode_tokens: 209, ..Report::default() };
        load.report(told, at(20));
        check(&load, 47, 209);
        load.release(first, at(21));
        check(&load, 47, 9);
        load.started(second, at(22));
        check(&load, 7, 80);
        load.release(second, at(23));
        check(&load, 7, 9);
        // A report that left before the end was known still counts it; the next one does not.
        load.report(told, at(25));
        check(&load, 7, 9);
        load.report(Report { prefill_tokens: 7, decode_tokens: 9, ..Report::default() }, at(75));
        check(&load, 7, 9);
    }

    #[test]
    fn a_later_report_replaces_the_booking() {
        let (mut load, now) = (WorkerLoad::default(), Instant::now());
        load.book(charge(100), now);
        load.report(waits(30), now + Duration::from_millis(1));
        check(&load, 130, 0);
        load.report(waits(130), now + Duration::from_millis(20));
        check(&load, 130, 0);
    }

    #[test]
    fn own_waiting_requests_are_the_floor() {
        let (mut load, now) = (WorkerLoad::default(), Instant::now());
        load.book(charge(100), now);
        load.report(waits(0), now + Duration::from_millis(20));
        check(&load, 100, 0);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Book(u64),
        Started(usize),
        Release(usize),
        Report(u64),
    }

    proptest! {
        #[test]
        fn no_booking_outlives_its_release(steps in prop::collection::vec(prop_oneof![
            (0..1000u64).prop_map(Step::Book),
            (0..8usize).prop_map(Step::Started),
            (0..8usize).prop_map(Step::Release),
            (0..1000u64).prop_map(Step::Report),
        ], 0..60)) {
            let (mut load, mut now, mut open) = (WorkerLoad::default(), Instant::now(), Vec::new());
            for step in steps {
                now += Duration::from_millis(3);
                match step {
                    Step::Book(tokens) => open.push(load.book(charge(tokens), now)),
                    Step::Started(i) => { open.get(i).into_iter().for_each(|id| load.started(*id, now)); }
                    Step::Release(i) if i < open.len() => load.release(open.swap_remove(i), now),
                    Step::Release(_) => {}
                    Step::Report(tokens) => load.report(waits(tokens), now),
                }
                prop_assert_eq!(load.booked(), open.len());
            }
            open.drain(..).for_each(|id| load.release(id, now));
            load.report(Report::default(), now + ON_ITS_WAY);
            prop_assert_eq!((load.booked(), load.outstanding_tokens()), (0, 0));
        }
    }
}
