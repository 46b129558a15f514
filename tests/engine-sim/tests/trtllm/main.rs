//! Our block key and stored events, held to samples of TensorRT-LLM's V1 manager (written from its source, not recorded).
#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use engine_sim::blocks::{MediaSpan, Sequence};
use engine_sim::trtllm::{BlockTree, Rules, key};
use serde_json::Value;
use std::path::PathBuf;

fn samples() -> Option<Value> {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let places = [here.join("../vectors/trtllm"), here.join("../../../shared/vectors/trtllm")];
    let text = places.iter().find_map(|place| std::fs::read_to_string(place.join("events.json")).ok())?;
    Some(serde_json::from_str(&text).unwrap())
}

fn numbers(list: &Value) -> Vec<u64> {
    list.as_array().unwrap().iter().map(|n| n.as_u64().unwrap()).collect()
}

fn digest(hex: &str) -> [u8; 32] {
    let bytes: Vec<u8> = (0..32).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap()).collect();
    bytes.try_into().unwrap()
}

#[test]
fn keys_are_those_of_the_samples() {
    let Some(samples) = samples() else { return };
    let mut compared = 0;
    for row in samples["v1_hash_vectors"].as_array().unwrap() {
        if row["lora_task_id"].is_u64() {
            continue; // adapters are not simulated
        }
        let media = row["mm"].as_array().into_iter().flatten();
        let media: Vec<_> = media.map(|key| (digest(key[0].as_str().unwrap()), key[1].as_u64().unwrap())).collect();
        let got = key::block(
            row["parent"].as_u64().unwrap(),
            &numbers(&row["tokens"]),
            row["cache_salt_id"].as_u64(),
            &media,
        );
        assert_eq!(got, row["hash"].as_u64().unwrap(), "{row}");
        compared += 1;
    }
    assert!(compared >= 4, "{compared}");
}

/// Computes a prompt and compares the one event that it causes with `data` of sample `at`.
#[track_caller]
fn check(at: usize, tokens: &[u32], media: Vec<MediaSpan>) {
    let Some(samples) = samples() else { return };
    let mut tree = BlockTree::new(4, 64, Rules);
    tree.take_events();
    let mut sequence = Sequence::default();
    (sequence.tokens, sequence.media) = (tokens.to_vec(), media);
    assert!(tree.admit(&mut sequence, 0, tokens.len()));
    sequence.computed = tokens.len();
    tree.commit(&mut sequence);
    assert_eq!(tree.take_events(), [samples["buffered_events_v1_manager"][at]["data"].clone()]);
}

#[test]
fn text_blocks_are_told_as_in_the_samples() {
    check(1, &(100..112).collect::<Vec<_>>(), Vec::new());
}

#[test]
fn image_blocks_carry_key_and_offset_as_in_the_samples() {
    let id: String = (0..32).map(|byte| format!("{byte:02x}")).collect();
    check(2, &[1, 2, 151_655, 151_655, 151_655, 151_655, 7, 9], vec![MediaSpan { id, start: 2, tokens: 4 }]);
}
