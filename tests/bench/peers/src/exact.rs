//! The case that tells exact indexes from others: W0 holds P+X, W1 holds P+Y, W0 loses P. Who holds how much of P+X?

use serde_json::{Value, json};

use crate::subject::Subject;
use crate::workload::chain;

pub fn case<S: Subject>() -> Value {
    let x = chain([1, 2, 3, 4, 11, 12, 13, 14].into_iter());
    let y = chain([1, 2, 3, 4, 21, 22, 23, 24].into_iter());
    let mut subject = S::new(64);
    subject.apply(S::stored(0, None, &x));
    subject.apply(S::stored(1, None, &y));
    subject.apply(S::head_lost(0, &x, 4));
    subject.drain();
    let answer = subject.answer(S::query(&x));
    let held: Vec<_> = answer.iter().filter(|(_, depth)| *depth > 0).copied().collect();
    json!({ "index": S::NAME, "answer": held, "truth": [[1, 4]], "exact": held == [(1, 4)] })
}
