use proptest::prelude::*;

use super::*;

fn id(byte: u8) -> MediaId {
    MediaId([byte; 32])
}

fn sample() -> Preamble {
    Preamble {
        dp_rank: 1,
        prompt_tokens: 300,
        reused_tokens: 16,
        exact: true,
        runs: vec![(5, 1), (151_655, 299)],
        spans: vec![(1, 100, id(1)), (101, 199, id(2))],
        blocks: 18,
        last: u64::MAX,
        identities: vec![
            Identity { insert_at: 10, id: id(1), tokens: 100 },
            Identity { insert_at: 30, id: id(2), tokens: 199 },
        ],
        cuts: vec![(10, 5), (40, 3)],
        root: 77,
        slots: vec![
            Slot { start: 1, len: 100, key: MediaKey([8; 32]), known: true },
            Slot { start: 101, len: 199, key: MediaKey([9; 32]), known: false },
        ],
        session: Some("s".to_owned()),
        body_at: 3,
    }
}

#[track_caller]
fn check(change: impl FnOnce(&mut Preamble), expected: Result<(), PreambleError>) {
    let mut preamble = sample();
    change(&mut preamble);
    let expected = expected.map(|()| preamble.clone());
    assert_eq!(decode(&encode(&preamble)), expected);
}

#[test]
fn a_record_survives() {
    check(|_| {}, Ok(()));
    check(|p| *p = Preamble::default(), Ok(()));
}

#[test]
fn the_bytes_are_those_of_the_reference() {
    let preamble = Preamble {
        dp_rank: 1,
        prompt_tokens: 300,
        runs: vec![(7, 2)],
        cuts: vec![(128, 1)],
        last: 2,
        root: 5,
        slots: vec![Slot { start: 0, len: 2, key: MediaKey([0xab; 32]), known: true }],
        session: Some("s".to_owned()),
        body_at: 1,
        ..Preamble::default()
    };
    let tail = [&[5, 1, 0, 2][..], &[0xab; 32], &[1, 1, 1, b's', 1]].concat();
    assert_eq!(encode(&preamble), [&OLD[..], &tail].concat());
}

/// By hand: the record of a balancer that knows no root, slots, session and place for members.
const OLD: [u8; 17] = [1, 1, 0xac, 2, 0, 0, 1, 7, 2, 0, 0, 2, 0, 1, 0x80, 1, 1];

#[test]
fn a_record_without_the_later_fields_decodes() {
    let decoded = decode(&OLD).unwrap();
    assert_eq!((decoded.last, decoded.cuts, decoded.root), (2, vec![(128, 1)], 0));
    assert_eq!((decoded.slots, decoded.session, decoded.body_at), (vec![], None, 0));
}

#[test]
fn slots_ascend_are_disjoint_and_lie_inside_the_view() {
    let slot = |index| Err(PreambleError::Slot { index });
    check(|p| p.slots[1].start = 100, slot(1));
    check(|p| p.slots[1].len = 200, slot(1));
    check(|p| p.slots[1].len = u32::MAX, slot(1));
    check(|p| p.slots[0].len = 0, slot(0));
    check(|p| p.slots[0].len = 50, Ok(()));
    check(|p| (p.runs, p.spans) = (vec![], vec![]), slot(0));
}

#[test]
fn cuts_ascend_and_are_disjoint() {
    let cut = |index| Err(PreambleError::Cut { index });
    check(|p| p.cuts = vec![(10, 5), (15, 1)], Ok(()));
    check(|p| p.cuts = vec![(10, 5), (14, 1)], cut(1));
    check(|p| p.cuts = vec![(40, 3), (10, 5)], cut(1));
    check(|p| p.cuts = vec![(10, 0)], cut(0));
    check(|p| p.cuts = vec![(u64::MAX, 2)], cut(0));
}

#[test]
fn identities_ascend_and_lie_outside_the_cuts() {
    let identity = |index| Err(PreambleError::Identity { index });
    check(|p| p.identities[1].insert_at = 10, identity(1));
    check(|p| p.identities[1].insert_at = 9, identity(1));
    check(|p| p.identities[0].insert_at = 15, Ok(()));
    check(|p| p.identities[0].insert_at = 12, identity(0));
    check(|p| p.identities[1].insert_at = 42, identity(1));
    check(|p| p.identities[1].insert_at = 43, Ok(()));
}

#[test]
fn spans_lie_inside_the_view() {
    let span = |index| Err(PreambleError::Span { index });
    check(|p| p.spans[1].1 = 200, span(1));
    check(|p| p.spans[1].0 = 0, span(1));
    check(|p| p.spans[0].1 = 0, span(0));
    check(|p| p.runs.clear(), span(0));
    check(|p| p.runs = vec![(1, u32::MAX), (2, 1)], Err(PreambleError::View));
}

#[test]
fn other_versions_and_lengths_are_named() {
    assert_eq!(decode(&[]), Err(PreambleError::Empty));
    assert_eq!(decode(&[2, 0, 0]), Err(PreambleError::Version { version: 2 }));
    assert_eq!(decode(&[1, 0]), Err(PreambleError::Malformed));
    let bytes = MAX_PREAMBLE_BYTES + 1;
    assert_eq!(decode(&vec![1; bytes]), Err(PreambleError::TooLong { bytes }));
}

#[test]
fn fields_behind_the_known_ones_are_ignored() {
    let mut bytes = encode(&sample());
    bytes.extend([1, 2, 3]);
    assert_eq!(decode(&bytes), Ok(sample()));
}

proptest! {
    #[test]
    fn random_bytes_never_panic(mut bytes in prop::collection::vec(any::<u8>(), 1..300), own in any::<bool>()) {
        bytes[0] = if own { VERSION } else { bytes[0] };
        if let Ok(preamble) = decode(&bytes) {
            prop_assert_eq!(decode(&encode(&preamble)), Ok(preamble));
        }
    }

    #[test]
    fn a_cut_record_is_refused(at in any::<prop::sample::Index>()) {
        let bytes = encode(&sample());
        let cut = &bytes[..at.index(bytes.len())];
        // A record that ends where the later fields begin is one of an older balancer.
        let old = Preamble { root: 0, slots: vec![], session: None, body_at: 0, ..sample() };
        prop_assert!(decode(cut).is_err() || decode(cut) == Ok(old));
    }
}
