use std::collections::HashSet;

use super::model::{PLACEHOLDER, Prompt, apply, key, value};
use super::*;

/// A rank whose engine is told what to store.
struct Rig {
    verifier: Verifier,
    shown: Shown,
    held: HashSet<SequenceHash>,
    now: Instant,
}

impl Rig {
    fn new(shown: Shown) -> Self {
        Self { verifier: Verifier::new(Config::default()), shown, held: HashSet::new(), now: Instant::now() }
    }

    fn begin(&mut self, id: u64, prompt: &str, session: Option<&str>) {
        self.verifier.begin(FlightId(id), Prompt::parse(prompt).expected(self.shown, session), self.now);
    }

    fn store(&mut self, prompt: &str, blocks: std::ops::Range<usize>, session: Option<&str>) {
        let prompt = Prompt::parse(prompt);
        self.held.extend(&prompt.chain(self.shown)[blocks.clone()]);
        apply(&mut self.verifier, &prompt.stored(self.shown, blocks, session));
    }

    /// As stored unseen, before anything began.
    fn hold(&mut self, prompt: &str) {
        self.held.extend(Prompt::parse(prompt).chain(self.shown));
    }

    fn remove(&mut self, prompt: &str, block: usize) {
        let hash = Prompt::parse(prompt).chain(self.shown)[block];
        self.verifier.removed(&[Some(hash)]);
        self.held.remove(&hash);
    }

    fn end(&mut self, id: u64, outcome: Outcome) -> Found {
        self.verifier.finished(FlightId(id), outcome, self.now);
        self.now += Duration::from_secs(1);
        let found = self.verifier.settle(|hash| self.held.contains(&hash), self.now);
        self.verifier.check_invariants();
        assert_eq!(found.len(), 1);
        found[0].found
    }

    fn answered(&mut self, id: u64) -> Found {
        self.end(id, Outcome::default())
    }

    /// Positions and value of a key.
    fn learnt(&self, name: u8) -> Option<(u32, LearntValue)> {
        self.verifier.learnt(&key(name))
    }
}

/// One flight alone whose engine stores `actual` whole: the verdict, with and without a session.
#[track_caller]
fn check(expected: &str, actual: &str, found: Found) {
    for shown in [Shown::Spans, Shown::Pads] {
        for session in [None, Some("s")] {
            let mut rig = Rig::new(shown);
            rig.begin(1, expected, session);
            let blocks = Prompt::parse(actual).chain(shown).len();
            rig.store(actual, 0..blocks, session);
            assert_eq!(rig.answered(1), found, "{shown:?} {session:?}");
        }
    }
}

fn diverged(block: u32, cause: Cause) -> Found {
    Found::Diverged { block: Some(block), cause }
}

#[test]
fn a_prediction_that_comes_true_is_exact() {
    check("abcdefgh", "abcdefgh", Found::Exact);
    check("abcdefghi", "abcdefghixyz", Found::Exact);
    check("ab[A=X9]cdefg", "ab[A=X9]cdefg", Found::Exact);
    check("ab[A=X5][B=Y5]cdef", "ab[A=X5][B=Y5]cdefgh", Found::Exact);
}

#[test]
fn the_first_block_that_differs_is_named_with_its_cause() {
    check("abcdefgh", "abcdefxh", diverged(1, Cause::Text));
    check("ab[A=X9]cdefg", "ab[A=Y9]cdefg", diverged(0, Cause::MediaIdentity));
    check("abcdef[A=X9]g", "abcdef[A=Y9]g", diverged(1, Cause::MediaIdentity));
    check("ab[A=X9]cdefg", "ab[A=X8]cdefgh", diverged(2, Cause::MediaCount));
    check("ab[A=X9]cdefg", "ab[A=X10]cdef", diverged(2, Cause::MediaCount));
    check("ab[A9]cdefg", "ab[A=X10]cdef", diverged(2, Cause::MediaCount));
    check("ab[A9]cdefg", "ab[A=X9]cxefg", diverged(3, Cause::Text));
}

#[test]
fn what_cannot_be_checked_says_why() {
    check("abc", "abcd", Found::Unchecked(Reason::NoBlocks));
    check("ab[A9]cdefg", "ab[A=X9]cdefg", Found::Unchecked(Reason::Inexact));
    let mut rig = Rig::new(Shown::Spans);
    rig.begin(1, "abcdefgh", None);
    assert_eq!(rig.end(1, Outcome { failed: true, ..Outcome::default() }), Found::Unchecked(Reason::Failed));
    rig.begin(2, "abcdefgh", None);
    rig.verifier.reset();
    let verdicts = rig.verifier.settle(|_| true, rig.now);
    assert_eq!(verdicts[0].found, Found::Unchecked(Reason::Reset));
}

#[test]
fn blocks_that_never_come_are_counted() {
    let mut rig = Rig::new(Shown::Spans);
    let short = |missing, cause| Found::Short { missing, cause };
    rig.begin(1, "abcdefghijkl", None);
    assert_eq!(rig.answered(1), short(3, ShortCause::NoEvents));
    rig.begin(2, "abcdefghijkl", None);
    rig.store("abcdefghijkl", 0..1, None);
    assert_eq!(rig.answered(2), short(2, ShortCause::Cut));
    rig.held.clear();
    rig.begin(3, "abcdefghijkl", None);
    rig.verifier.cleared();
    assert_eq!(rig.answered(3), short(3, ShortCause::Evicted));
    rig.hold("abcdefghijkl");
    rig.begin(4, "abcdefghijkl", None);
    rig.remove("abcdefghijkl", 2);
    assert_eq!(rig.answered(4), Found::Exact);
}

#[test]
fn a_verdict_waits_for_the_grace_unless_all_is_there() {
    let mut rig = Rig::new(Shown::Spans);
    rig.begin(1, "abcdefgh", None);
    rig.begin(2, "abcdxxxx", None);
    rig.store("abcdefgh", 0..2, None);
    rig.verifier.finished(FlightId(1), Outcome { cached_tokens: Some(3), ..Outcome::default() }, rig.now);
    rig.verifier.finished(FlightId(2), Outcome::default(), rig.now);
    let held = |_| false;
    let early = rig.verifier.settle(held, rig.now);
    assert_eq!(early, [Verdict { flight: FlightId(1), found: Found::Exact, cached: Some((0, 3)) }]);
    assert_eq!(rig.verifier.settle(held, rig.now + Duration::from_millis(499)), []);
    assert_eq!(rig.verifier.settle(held, rig.now + Duration::from_millis(500)).len(), 1);
    assert!(!rig.verifier.is_interested());
}

#[test]
fn a_prompt_of_another_length_diverges_without_events() {
    let mut rig = Rig::new(Shown::Pads);
    for (prompt, cause) in [("abcdefgh", Cause::Text), ("ab[A=X9]c", Cause::MediaCount)] {
        rig.hold(prompt);
        rig.begin(1, prompt, None);
        let outcome = Outcome { prompt_tokens: Some(7), ..Outcome::default() };
        assert_eq!(rig.end(1, outcome), Found::Diverged { block: None, cause });
    }
}

#[test]
fn another_request_that_branches_off_is_no_divergence() {
    for shown in [Shown::Spans, Shown::Pads] {
        let mut rig = Rig::new(shown);
        // Its own prediction explains it.
        rig.hold("abcdefgh");
        rig.begin(1, "abcdefgh", None);
        rig.begin(2, "abcd[B4]", None);
        rig.store("abcd[B=Y4]", 1..2, None);
        assert_eq!(rig.answered(1), Found::Exact);
        // A request of which nothing is known may have caused it.
        rig.begin(3, "ijklmnop", None);
        rig.verifier.begin_blind(FlightId(4));
        rig.store("ijklmnop", 0..1, None);
        rig.store("ijklxxxx", 1..2, None);
        assert_eq!(rig.answered(3), Found::Short { missing: 1, cause: ShortCause::Cut });
        // Nobody can have caused it, and all is held.
        rig.hold("mmmmnnnn");
        rig.verifier.finished(FlightId(4), Outcome::default(), rig.now);
        rig.answered(2);
        rig.begin(5, "mmmmnnnn", None);
        rig.store("mmmmxxxx", 1..2, None);
        assert_eq!(rig.answered(5), Found::Unchecked(Reason::Ambiguous));
    }
}

#[test]
fn two_requests_that_one_block_contradicts_are_not_called_diverged() {
    let mut rig = Rig::new(Shown::Pads);
    rig.store("abcd", 0..1, None);
    rig.begin(1, "abcdefgh", None);
    rig.begin(2, "abcdijkl", None);
    rig.store("abcdxxxx", 1..2, None);
    assert_eq!(rig.answered(1), Found::Short { missing: 1, cause: ShortCause::NoEvents });
    assert_eq!(rig.answered(2), Found::Short { missing: 1, cause: ShortCause::NoEvents });
    assert_eq!(rig.verifier.divergences().count(), 0);
}

#[test]
fn a_session_tells_whose_a_block_is() {
    let mut rig = Rig::new(Shown::Pads);
    rig.begin(1, "ab[A9]cdefg", Some("one"));
    rig.begin(2, "ab[B9]cdefg", Some("two"));
    rig.store("ab[B=Y9]cdefg", 0..4, Some("two"));
    rig.store("ab[A=X9]cdefg", 0..2, Some("one"));
    rig.store("ab[A=X9]cdefg", 2..4, Some("one"));
    assert_eq!(rig.learnt(b'A'), Some((9, value(Shown::Pads, b'X'))));
    assert_eq!(rig.learnt(b'B'), Some((9, value(Shown::Pads, b'Y'))));
    // Of a name that no flight has: of none of those with a name.
    rig.begin(3, "qr[C9]cdefg", Some("three"));
    rig.store("qr[C=Z9]cdefg", 0..4, Some("four"));
    assert_eq!(rig.learnt(b'C'), None);
    // Its blocks stand on another chain than the predicted one.
    rig.begin(4, "aaaabbbb", Some("five"));
    rig.store("ccccdddd", 1..2, Some("five"));
    assert_eq!(rig.answered(3), Found::Unchecked(Reason::Inexact));
}

#[test]
fn blocks_of_a_request_on_another_chain_are_a_divergence_of_unknown_cause() {
    let mut rig = Rig::new(Shown::Spans);
    rig.begin(1, "aaaabbbb", Some("s"));
    rig.store("ccccdddd", 1..2, Some("s"));
    assert_eq!(rig.answered(1), diverged(0, Cause::Unknown));
    // An answer goes on behind the prompt: no stray, as all of the prompt is there.
    rig.begin(2, "eeeeffff", Some("s"));
    rig.store("eeeeffffgggghhhh", 0..3, Some("s"));
    rig.store("eeeeffffgggghhhh", 3..4, Some("s"));
    assert_eq!(rig.answered(2), Found::Exact);
}

#[test]
fn without_sessions_only_what_is_beyond_doubt_is_learnt() {
    for shown in [Shown::Spans, Shown::Pads] {
        let mut rig = Rig::new(shown);
        rig.begin(1, "ab[A9]cdefg", None);
        rig.begin(2, "ab[B9]cdefg", None);
        rig.store("ab[B=Y9]cdefg", 0..4, None);
        assert_eq!((rig.learnt(b'A'), rig.learnt(b'B')), (None, None));
        assert_eq!(rig.verifier.counters().ambiguous, 1);
        // Equal keys at equal places teach the same.
        rig.begin(3, "qr[C9]cdefg", None);
        rig.begin(4, "qr[C9]cdefghijkl", None);
        rig.store("qr[C=Z9]cdefg", 0..4, None);
        assert_eq!(rig.learnt(b'C'), Some((9, value(shown, b'Z'))));
        // A request of which nothing is known may be the one.
        rig.verifier.begin_blind(FlightId(9));
        rig.begin(5, "st[D9]cdefg", None);
        rig.store("st[D=W9]cdefg", 0..4, None);
        assert_eq!(rig.learnt(b'D'), None);
    }
}

#[test]
fn what_is_learnt_completes_the_requests_that_wait_for_it() {
    for shown in [Shown::Spans, Shown::Pads] {
        let mut rig = Rig::new(shown);
        rig.begin(1, "xy[A9]cdefg", None);
        rig.begin(2, "ab[A9]cdefg[B7]hij", None);
        rig.store("xy[A=X9]cdefg", 0..4, None);
        // Nothing of the first image is stored for the second request: it was there.
        rig.store("ab[A=X9]cdefg[B=Y7]hij", 4..6, None);
        assert_eq!(rig.learnt(b'B'), Some((7, value(shown, b'Y'))));
        rig.hold("ab[A=X9]cdefg[B=Y7]hij");
        rig.begin(3, "ab[A9]cdefg[B7]hij", None);
        assert_eq!(rig.answered(1), Found::Unchecked(Reason::Inexact));
        assert_eq!(rig.answered(2), Found::Unchecked(Reason::Inexact));
        assert_eq!(rig.answered(3), Found::Exact);
    }
}

#[test]
fn late_events_of_a_request_that_has_its_verdict_teach_nothing_of_others() {
    let mut rig = Rig::new(Shown::Pads);
    rig.hold("ab[A=X9]cdefg");
    rig.begin(1, "ab[A=X9]cdefg", None);
    rig.verifier.finished(FlightId(1), Outcome::default(), rig.now);
    let early = rig.verifier.settle(|hash| rig.held.contains(&hash), rig.now);
    assert_eq!(early[0].found, Found::Exact);
    rig.begin(2, "ab[B9]cdefg", None);
    rig.store("ab[A=X9]cdefg", 0..4, None);
    assert_eq!(rig.learnt(b'B'), None);
}

#[test]
fn a_chain_that_became_known_late_is_no_evidence() {
    let mut rig = Rig::new(Shown::Spans);
    rig.begin(1, "ab[A9]cdefghij", Some("one"));
    // What comes before is there, unseen, and goes before it gets a name.
    rig.store("ab[A=X9]cdefghij", 3..4, Some("one"));
    rig.begin(2, "xy[A9]cdefg", Some("two"));
    rig.store("xy[A=X9]cdefg", 0..4, Some("two"));
    assert!(rig.learnt(b'A').is_some());
    assert_eq!(rig.answered(1), Found::Unchecked(Reason::Inexact));
}

#[test]
fn evidence_that_later_blocks_refute_is_dropped() {
    let mut rig = Rig::new(Shown::Spans);
    rig.begin(1, "ab[A9]cdefg", None);
    rig.store("uvwxyz", 0..1, None);
    rig.store("ab[A=X10]cdef", 0..4, None);
    assert_eq!(rig.answered(1), diverged(2, Cause::MediaCount));
}

#[test]
fn a_fact_comes_in_pieces_and_is_told_once_it_is_whole() {
    let mut rig = Rig::new(Shown::Pads);
    rig.begin(1, "abc[A9]cdef", None);
    rig.store("abc[A=X9]cdef", 0..1, None);
    assert_eq!((rig.learnt(b'A'), rig.verifier.drain_learnt()), (None, vec![]));
    rig.store("abc[A=X9]cdef", 1..2, None);
    let fact = |tokens| vec![Learnt { key: key(b'A'), tokens, value: value(Shown::Pads, b'X') }];
    assert_eq!(rig.verifier.drain_learnt(), fact(0));
    rig.store("abc[A=X9]cdef", 2..4, None);
    assert_eq!(rig.verifier.drain_learnt(), fact(9));
    assert_eq!(rig.verifier.drain_learnt(), []);
    assert_eq!(rig.verifier.all_learnt(), fact(9));
}

#[test]
fn a_count_that_was_seen_is_learnt_with_the_divergence() {
    for shown in [Shown::Spans, Shown::Pads] {
        let mut rig = Rig::new(shown);
        rig.begin(1, "ab[A9]cdefg", None);
        rig.store("ab[A=X11]cdefg", 0..4, None);
        assert_eq!(rig.answered(1), diverged(2, Cause::MediaCount));
        assert_eq!(rig.learnt(b'A'), Some((11, value(shown, b'X'))));
        assert_eq!(rig.verifier.counters().token_count, 1);
        // The next prediction of the old count cannot be checked, one of the new can.
        rig.begin(2, "ab[A9]cdefg", None);
        rig.begin(3, "ab[A11]cdefg", None);
        assert_eq!(rig.answered(2), Found::Unchecked(Reason::Inexact));
        assert_eq!(rig.answered(3), Found::Exact);
    }
}

#[test]
fn a_contradiction_drops_both_values() {
    for shown in [Shown::Spans, Shown::Pads] {
        let mut rig = Rig::new(shown);
        for (id, expected, actual) in [(1, "ab[A9]cdefg", "ab[A=X9]cdefg"), (2, "cd[A9]cdefg", "cd[A=Y9]cdefg")] {
            rig.begin(id, expected, Some("s"));
            rig.store(actual, 0..4, Some("s"));
            rig.answered(id);
        }
        assert_eq!((rig.learnt(b'A'), rig.verifier.counters().conflicts), (None, 1));
        let nothing = Learnt { key: key(b'A'), tokens: 0, value: LearntValue::Nothing };
        assert_eq!(rig.verifier.drain_learnt(), [nothing]);
    }
}

#[test]
fn pads_that_follow_no_cycle_teach_nothing() {
    let mut rig = Rig::new(Shown::Pads);
    rig.begin(1, "ab[A9]cdefg", None);
    // Two images stand where one was expected.
    rig.store("ab[A=X5][B=Y4]cdefg", 0..4, None);
    assert_eq!((rig.learnt(b'A'), rig.verifier.counters().irregular), (None, 1));
    assert_eq!(rig.answered(1), Found::Unchecked(Reason::Inexact));
}

#[test]
fn one_pad_value_is_a_cycle_of_one() {
    let mut rig = Rig::new(Shown::Pads);
    rig.begin(1, "ab[A9]cdefg", None);
    let mut stored = Prompt::parse("ab[A=X9]cdefg").stored(Shown::Pads, 0..4, None);
    stored.tokens.iter_mut().filter(|token| **token >= 1_000_000).for_each(|token| *token = 1_234_567);
    apply(&mut rig.verifier, &stored);
    assert_eq!(rig.learnt(b'A'), Some((9, LearntValue::Pads(vec![1_234_567]))));
}

#[test]
fn facts_flights_and_divergences_are_bounded() {
    let mut rig = Rig::new(Shown::Spans);
    let bytes_max = 3000;
    rig.verifier =
        Verifier::new(Config { flights_max: 3, bytes_max, facts_max: 2, divergences_max: 2, ..Config::default() });
    for id in 0..5 {
        rig.begin(id, "abcdefgh", None);
    }
    assert_eq!(rig.verifier.counters().over_limit, 2);
    rig.verifier.reset();
    rig.verifier.settle(|_| false, rig.now);
    rig.begin(9, &"a".repeat(300), None);
    assert_eq!(rig.verifier.counters().over_limit, 3);
    rig.verifier.finished(FlightId(9), Outcome::default(), rig.now);
    for (id, name) in (10..).zip(["A", "B", "C", "D"]) {
        rig.now += Duration::from_secs(1);
        rig.verifier.settle(|_| false, rig.now);
        rig.begin(id, &format!("{name}b[{name}9]cdefg"), None);
        rig.store(&format!("{name}b[{name}=X9]cxefg"), 0..4, None);
        assert_eq!(rig.answered(id), diverged(3, Cause::Text));
    }
    assert_eq!(rig.verifier.divergences().map(|divergence| divergence.flight.0).collect::<Vec<_>>(), [12, 13]);
    assert_eq!((rig.learnt(b'B'), rig.learnt(b'D').is_some()), (None, true));
}

#[test]
fn a_divergence_shows_both_sides() {
    let mut rig = Rig::new(Shown::Spans);
    rig.begin(1, "abcdef[A=X9]g", Some("s"));
    rig.store("abcdef[A=Y9]g", 0..4, Some("s"));
    rig.end(1, Outcome { prompt_tokens: Some(16), ..Outcome::default() });
    let shown: Vec<_> =
        rig.verifier.divergences().map(|divergence| serde_json::to_value(divergence).unwrap()).collect();
    let expected = serde_json::json!([{
        "flight": 1, "session": "s", "cause": "media_identity", "block": 1, "first": 4,
        "expected": [101, 102, PLACEHOLDER, PLACEHOLDER], "actual": [101, 102, PLACEHOLDER, PLACEHOLDER],
        "expected_media": [{ "offset": 2, "id": "58".repeat(32) }], "actual_media": [{ "offset": 2, "id": "59".repeat(32) }],
        "prompt_tokens": [16, 16],
    }]);
    assert_eq!(serde_json::Value::from(shown), expected);
}

#[test]
fn media_that_diverge_again_and_again_are_not_trusted() {
    let mut rig = Rig::new(Shown::Spans);
    for id in 0..5 {
        assert!(rig.verifier.media_trusted());
        rig.begin(id, "ab[A=X9]cdefg", Some("s"));
        rig.store("ab[A=Y9]cdefg", 0..4, Some("s"));
        assert_eq!(rig.answered(id), diverged(0, Cause::MediaIdentity));
    }
    assert!(!rig.verifier.media_trusted());
    // Predictions of text say nothing of media.
    rig.hold("ab[A=Y9]cdefg");
    rig.hold("abcdefgh");
    for id in 10..50 {
        rig.begin(id, if id % 2 == 0 { "abcdefgh" } else { "ab[A=Y9]cdefg" }, Some("s"));
        assert_eq!(rig.answered(id), Found::Exact);
        assert_eq!(rig.verifier.media_trusted(), id == 49, "{id}");
    }
}

#[test]
fn pairs_are_checked_and_teach_nothing() {
    let mut rig = Rig::new(Shown::Pairs);
    rig.begin(1, "abcdefgh", None);
    rig.store("abcdefgh", 0..2, None);
    assert_eq!(rig.answered(1), Found::Exact);
    rig.begin(2, "ijklm[A9]cdefg", None);
    rig.store("ijklm[A9]cdefg", 0..4, None);
    assert_eq!((rig.learnt(b'A'), rig.answered(2)), (None, Found::Unchecked(Reason::Inexact)));
}
