//! The behaviours that the tests of Dynamo 1.6's batcher hold, and ours beyond them.

use std::num::NonZeroU32;

use super::*;

type Queue = Batcher<&'static str, String>;

fn queue(max_batch_cost: u32) -> Queue {
    Batcher::new(Limits::new(NonZeroU32::new(max_batch_cost), None, 1000, vec![]).expect("limits"))
}

fn work(item: &'static str, cost: u32) -> Work<&'static str> {
    Work { item, cost, key: 0 }
}

fn submit(queue: &mut Queue, works: &[(&'static str, u32)]) -> RequestId {
    queue.submit(works.iter().map(|&(item, cost)| work(item, cost)).collect()).expect("accepted")
}

fn echo(batch: &Batch<&'static str>) -> Outcome<String> {
    Ok(batch.items().iter().map(|item| Ok(format!("{item}'"))).collect())
}

/// Runs all batches through `forward` and says which items went together and what came out, request by request.
fn drain(queue: &mut Queue, mut forward: impl FnMut(&Batch<&'static str>) -> Outcome<String>) -> (String, String) {
    let (mut batches, mut answers) = (Vec::new(), Vec::new());
    while let Some(batch) = queue.next_batch() {
        batches.push(batch.items().join("+"));
        let outcome = forward(&batch);
        for done in queue.finish(batch, outcome) {
            let text = done.result.map_or_else(|error| error.detail(), |results| results.join(","));
            answers.push(format!("{}:{text}", done.request.0));
        }
        queue.check_invariants();
    }
    (batches.join(" "), answers.join(" | "))
}

#[track_caller]
fn check(
    queue: &mut Queue,
    forward: impl FnMut(&Batch<&'static str>) -> Outcome<String>,
    batches: &str,
    answers: &str,
) {
    let found = drain(queue, forward);
    assert_eq!((found.0.as_str(), found.1.as_str()), (batches, answers));
}

#[test]
fn all_that_waits_goes_in_order_and_each_item_gets_its_result() {
    let mut q = queue(100);
    submit(&mut q, &[("a", 1), ("b", 1)]);
    submit(&mut q, &[("c", 1)]);
    check(&mut q, echo, "a+b+c", "0:a',b' | 1:c'");
    assert!(q.is_idle() && q.queued_cost() == 0);
}

#[test]
fn a_batch_is_closed_by_the_first_image_over_the_budget() {
    let mut q = queue(5);
    submit(&mut q, &[("a", 3), ("b", 3), ("c", 1)]);
    check(&mut q, echo, "a b+c", "0:a',b',c'");
}

#[test]
fn without_a_budget_all_is_one_batch_whatever_the_costs() {
    let mut q = queue(0);
    submit(&mut q, &[("a", 300), ("b", 300)]);
    submit(&mut q, &[("c", 400)]);
    check(&mut q, echo, "a+b+c", "0:a',b' | 1:c'");
}

#[test]
fn a_batch_holds_no_more_items_than_allowed() {
    let mut q: Queue = Batcher::new(Limits::new(None, NonZeroU32::new(2), 1000, vec![]).expect("limits"));
    submit(&mut q, &[("a", 1), ("b", 1), ("c", 1)]);
    assert!(q.is_full());
    check(&mut q, echo, "a+b c", "0:a',b',c'");
}

#[test]
fn keys_take_turns_and_never_share_a_batch() {
    let mut q: Queue = Batcher::new(Limits::new(None, NonZeroU32::new(2), 1000, vec![]).expect("limits"));
    for (item, key) in [("a", 7), ("b", 7), ("c", 7), ("x", 9), ("d", 7)] {
        q.submit(vec![Work { item, cost: 1, key }]).expect("accepted");
    }
    check(&mut q, echo, "a+b x c+d", "0:a' | 1:b' | 3:x' | 2:c' | 4:d'");
}

#[test]
fn the_smallest_bucket_that_holds_the_cost_is_the_target() {
    let bucket = |cost| {
        let limits = Limits::new(NonZeroU32::new(64), None, 1000, vec![4, 16]).expect("limits");
        let mut q: Queue = Batcher::new(limits);
        submit(&mut q, &[("a", cost)]);
        q.next_batch().and_then(|batch| batch.bucket())
    };
    assert_eq!([1, 4, 5, 16, 17].map(bucket), [Some(4), Some(4), Some(16), Some(16), None]);
    assert_eq!(Limits::new(None, None, 9, vec![4, 4]), Err(LimitsError::Buckets));
}

#[test]
fn a_cost_of_zero_or_over_the_budget_is_refused_whole() {
    let mut q = queue(5);
    let error = q.submit(vec![work("a", 1), work("b", 6)]).expect_err("over budget");
    assert_eq!((error.status(), q.queued_cost(), q.is_idle()), (413, 0, true));
    assert_eq!(q.submit(vec![work("a", 0)]).expect_err("no cost").status(), 500);
}

#[test]
fn a_full_queue_answers_busy_and_an_impossible_request_too_large() {
    let mut q: Queue = Batcher::new(Limits::new(None, None, 10, vec![]).expect("limits"));
    submit(&mut q, &[("a", 8)]);
    assert_eq!(q.submit(vec![work("b", 3)]), Err(EncodeError::Busy { queued: 8, max: 10 }));
    assert_eq!(q.submit(vec![work("b", 11)]).expect_err("never fits").status(), 413);
    let _in_flight = q.next_batch();
    submit(&mut q, &[("b", 10)]);
}

#[test]
fn one_bad_image_fails_its_request_and_no_other() {
    let mut q = queue(2);
    submit(&mut q, &[("bad", 1), ("b", 1), ("c", 1)]);
    submit(&mut q, &[("d", 1)]);
    let forward = |batch: &Batch<&'static str>| {
        let one = |item: &&str| match *item {
            "bad" => Err(ItemError::Invalid("torn".into())),
            item => Ok(format!("{item}'")),
        };
        Ok(batch.items().iter().map(one).collect())
    };
    check(&mut q, forward, "bad+b d", "0:image 0: torn | 1:d'");
}

#[test]
fn a_failed_batch_is_halved_until_strangers_are_apart() {
    let mut q = queue(8);
    for item in ["a", "bad", "c"] {
        submit(&mut q, &[(item, 1)]);
    }
    let forward = |batch: &Batch<&'static str>| match batch.items().contains(&"bad") {
        true => Err(BatchError::Internal("boom".into())),
        false => echo(batch),
    };
    check(&mut q, forward, "a+bad+c a bad+c bad c", "0:a' | 1:image 0: boom | 2:c'");
}

#[test]
fn a_failed_batch_of_one_request_is_not_tried_again() {
    let mut q = queue(8);
    submit(&mut q, &[("a", 1), ("b", 1)]);
    check(&mut q, |_| Err(BatchError::Invalid("odd".into())), "a+b", "0:images: odd");
}

#[test]
fn out_of_memory_is_met_with_smaller_batches() {
    let mut q = queue(100);
    submit(&mut q, &[("a", 2), ("b", 2), ("c", 2), ("d", 2)]);
    let forward = |max| {
        move |batch: &Batch<&'static str>| if batch.cost() > max { Err(BatchError::OutOfMemory) } else { echo(batch) }
    };
    check(&mut q, forward(4), "a+b+c+d a+b c+d", "0:a',b',c',d'");
    submit(&mut q, &[("big", 9)]);
    let memory = ItemError::OutOfMemory;
    check(&mut q, forward(4), "big", &format!("1:image 0: {memory}"));
}

#[test]
fn a_wrong_number_of_results_fails_that_batch_alone() {
    let mut q = queue(1);
    submit(&mut q, &[("a", 1)]);
    submit(&mut q, &[("b", 1)]);
    let mut first = true;
    let forward = |batch: &Batch<&'static str>| if std::mem::take(&mut first) { Ok(vec![]) } else { echo(batch) };
    check(&mut q, forward, "a b", "0:images: forward_batch gave 0 results for 1 images | 1:b'");
}

#[test]
fn a_lost_encoder_fails_the_batch_without_another_try() {
    let mut q = queue(9);
    submit(&mut q, &[("a", 1)]);
    submit(&mut q, &[("b", 1)]);
    let lost = EncodeError::Unavailable;
    check(&mut q, |_| Err(BatchError::Unavailable("died".into())), "a+b", &format!("0:{lost} | 1:{lost}"));
}

#[test]
fn a_cancelled_request_leaves_the_queue_and_poisons_nobody() {
    let mut q = queue(9);
    let dead = submit(&mut q, &[("bad", 5)]);
    submit(&mut q, &[("b", 1)]);
    assert!(q.cancel(dead) && !q.cancel(dead));
    assert_eq!(q.queued_cost(), 1);
    check(&mut q, echo, "b", "1:b'");
}

#[test]
fn cancelling_after_part_was_dispatched_drops_the_siblings() {
    let mut q = queue(1);
    let dead = submit(&mut q, &[("a", 1), ("b", 1)]);
    submit(&mut q, &[("c", 1)]);
    let batch = q.next_batch().expect("a");
    assert!(q.cancel(dead));
    let outcome = echo(&batch);
    assert_eq!(q.finish(batch, outcome), vec![]);
    check(&mut q, echo, "c", "1:c'");
}

#[test]
fn closing_fails_what_waits_and_lets_what_is_in_flight_finish() {
    let mut q = queue(1);
    submit(&mut q, &[("a", 1)]);
    submit(&mut q, &[("b", 1)]);
    let batch = q.next_batch().expect("a");
    assert_eq!(q.close(), vec![Done { request: RequestId(1), result: Err(EncodeError::Closed) }]);
    assert_eq!(q.submit(vec![work("c", 1)]), Err(EncodeError::Closed));
    assert!(q.next_batch().is_none());
    let outcome = echo(&batch);
    assert_eq!(q.finish(batch, outcome), vec![Done { request: RequestId(0), result: Ok(vec!["a'".into()]) }]);
    assert!(q.is_idle());
}

#[test]
fn a_cancel_racing_with_close_is_answered_by_neither_twice() {
    let mut q = queue(1);
    let a = submit(&mut q, &[("a", 1)]);
    assert!(q.cancel(a));
    assert_eq!(q.close(), vec![]);
    let mut q = queue(1);
    let a = submit(&mut q, &[("a", 1)]);
    assert_eq!(q.close().len(), 1);
    assert!(!q.cancel(a));
}

#[test]
fn a_crash_fails_every_live_request() {
    let mut q = queue(1);
    submit(&mut q, &[("a", 1)]);
    submit(&mut q, &[("b", 1)]);
    let batch = q.next_batch().expect("a");
    assert_eq!(q.abort(&EncodeError::Unavailable).len(), 2);
    let outcome = echo(&batch);
    assert_eq!(q.finish(batch, outcome), vec![]);
    assert!(q.is_idle());
}

#[test]
fn a_flood_of_cancelled_requests_leaves_nothing_behind() {
    let mut q = queue(9);
    for _ in 0..100_000 {
        let id = submit(&mut q, &[("a", 9), ("b", 9)]);
        assert!(q.cancel(id));
    }
    q.check_invariants();
    assert!(q.is_idle() && q.slots <= STALE_MAX);
    assert!(q.next_batch().is_none());
}
