//! The captured event stream of each run, translated, contains every block that the reference predicts for its prompts.

#![expect(clippy::unwrap_used, reason = "a test: a vector that cannot be read is a failure")]

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use fovea_kv::event::KvEvent;
use fovea_kv::vllm;
use fovea_sidecar_core::publish::{Config, Publisher};
use serde_json::Value;

const VECTORS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/vllm");

/// All payloads of all runs: (run, seq) → payload.
fn payloads() -> BTreeMap<(String, u64), Vec<u8>> {
    let mut payloads = BTreeMap::new();
    for file in std::fs::read_dir(VECTORS).unwrap().map(|file| file.unwrap().path()) {
        if file.extension().is_none_or(|extension| extension != "jsonl") {
            continue;
        }
        for line in std::fs::read_to_string(&file).unwrap().lines() {
            let record: Value = serde_json::from_str(line).unwrap();
            for frame in record["frames"].as_array().unwrap_or(&Vec::new()) {
                let base64 =
                    |index: usize| base64_simd::STANDARD.decode_to_vec(frame[index].as_str().unwrap()).unwrap();
                let seq = u64::from_be_bytes(base64(1).try_into().unwrap());
                payloads.insert((record["run"].as_str().unwrap().to_owned(), seq), base64(2));
            }
        }
    }
    payloads
}

#[test]
fn every_golden_hash_is_stored_in_its_run() {
    let golden: BTreeMap<String, Vec<String>> =
        serde_json::from_str(&std::fs::read_to_string(Path::new(VECTORS).join("golden_sequence_hashes.json")).unwrap())
            .unwrap();
    let mut publishers = BTreeMap::<String, (Publisher, HashSet<String>)>::new();
    for ((run, _), payload) in payloads() {
        let (publisher, stored) =
            publishers.entry(run).or_insert_with(|| (Publisher::new(Config::default()), HashSet::new()));
        for event in vllm::decode(&payload).unwrap().events {
            publisher.apply(&event);
            publisher.check_invariants();
            if let KvEvent::Stored(event) = event {
                stored.extend(
                    event.hashes.iter().filter_map(|&hash| publisher.translate(hash, 0)).map(|hash| hash.to_string()),
                );
            }
        }
    }
    let complete = golden.iter().filter(|(name, hashes)| {
        let run = name.split('/').next().unwrap();
        hashes.iter().all(|hash| publishers[run].1.contains(hash))
    });
    assert_eq!((complete.count(), golden.len()), (121, 121));
    for (run, (publisher, _)) in &publishers {
        let gauges = publisher.gauges();
        assert!(gauges.orphans == 0 || gauges.opaque > 0, "{run}: only digests hide a chain");
        assert_eq!((publisher.counters().unknown_removals, publisher.block_size()), (0, Some(32)), "{run}");
    }
}
