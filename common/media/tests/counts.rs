//! Every recorded token count, expansion and refusal.

mod rows;

use serde_json::Value;

#[track_caller]
fn check(text: &str, rows: usize) {
    let groups: Vec<Value> = serde_json::from_str(text).expect("a list of groups");
    let tally = rows::check_all(&groups);
    assert_eq!(tally.differences, Vec::<String>::new());
    assert_eq!(tally.unsupported, Vec::<String>::new());
    assert_eq!((tally.rows, tally.equal), (rows, rows));
}

#[test]
fn transformers_processors() {
    check(include_str!("../../../tests/vectors/tokens/image_token_counts.json"), 1702);
}

#[test]
fn vllm_formulas() {
    check(include_str!("../../../tests/vectors/tokens/image_token_counts_vllm.json"), 732);
}

#[test]
fn videos() {
    check(include_str!("../../../tests/vectors/tokens/video_token_counts.json"), 260);
}
