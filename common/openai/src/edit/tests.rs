use std::ops::Range;

use proptest::prelude::*;

use super::{Edits, Splicer};

fn ranges(pairs: &[(usize, usize)]) -> Vec<Range<usize>> {
    pairs.iter().map(|&(start, end)| start..end).collect()
}

#[track_caller]
fn check(body: &str, cuts: &[(usize, usize)], inserts: &[(usize, &str)], expect: &str) {
    let inserts = inserts.iter().map(|(at, text)| (*at, text.as_bytes().to_vec()));
    let edits = Edits::new(ranges(cuts), inserts).unwrap();
    assert_eq!(String::from_utf8(edits.apply(body.as_bytes())).unwrap(), expect);
    assert_eq!(edits.new_len(body.len() as u64), expect.len() as u64);
}

#[test]
fn cuts_and_insertions_apply_in_order_of_place() {
    check("abcdef", &[], &[], "abcdef");
    check("abcdef", &[(1, 3)], &[], "adef");
    check("abcdef", &[(4, 6), (0, 1)], &[(2, "-"), (0, "<"), (6, ">")], "<b-cd>");
}

#[test]
fn at_one_place_insertions_come_first_and_in_order() {
    check("abcdef", &[(2, 4)], &[(2, "1"), (2, "2")], "ab12ef");
    check("abcdef", &[(2, 4), (4, 5)], &[(4, "x")], "abxf");
}

#[test]
fn what_lies_beyond_the_body_is_left_out() {
    check("abc", &[(2, 9)], &[(9, "?")], "ab");
    check("abc", &[], &[(3, "!"), (7, "?")], "abc!");
    check("", &[], &[(0, "!")], "!");
}

#[test]
fn contradictory_edits_are_refused() {
    assert!(Edits::new(ranges(&[(0, 3), (2, 4)]), []).is_err());
    assert!(Edits::new(ranges(&[(0, 3), (0, 2)]), []).is_err());
    assert!(Edits::new(ranges(&[(0, 3)]), [(1, vec![b'x'])]).is_err());
}

prop_compose! {
    /// Edits made without looking at the rules: some of them contradict each other.
    fn any_edits()(
        cuts in prop::collection::vec((0usize..40, 0usize..8), 0..5),
        inserts in prop::collection::vec((0usize..40, prop::collection::vec(any::<u8>(), 0..4)), 0..5),
    ) -> Option<Edits> {
        Edits::new(cuts.into_iter().map(|(start, len)| start..start + len), inserts).ok()
    }
}

proptest! {
    #[test]
    fn the_result_does_not_depend_on_the_chunks(
        edits in any_edits(),
        body in prop::collection::vec(any::<u8>(), 0..40),
        sizes in prop::collection::vec(0usize..7, 0..60),
    ) {
        prop_assume!(edits.is_some());
        let edits = edits.unwrap();
        let whole = edits.apply(&body);
        prop_assert_eq!(edits.new_len(body.len() as u64), whole.len() as u64);
        let (mut splicer, mut rest, mut out) = (Splicer::new(edits), &body[..], Vec::new());
        for size in sizes.into_iter().chain([body.len()]) {
            let (chunk, after) = rest.split_at(size.min(rest.len()));
            rest = after;
            splicer.feed(chunk, |piece| out.extend_from_slice(piece.bytes(chunk)));
        }
        splicer.finish(|inserted| out.extend_from_slice(inserted));
        prop_assert_eq!(out, whole);
    }
}
