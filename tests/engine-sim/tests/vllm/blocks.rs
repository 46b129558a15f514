//! Block hashes and the block pool, held to captures of vLLM 0.32.

use crate::support::{is_published, records, tag, tokens};
use engine_sim::blocks::{BlockPool, Sequence};
use engine_sim::events::{KvEvent, Stored};
use engine_sim::hash::{Algorithm, BlockHasher, Digest};
use serde_json::Value;
use std::collections::HashMap;

/// Recomputes every block hash of a run; returns how many.
fn check_hashes(run: &str, algorithm: Algorithm) -> usize {
    let hasher = BlockHasher::new(algorithm);
    let mut known: HashMap<String, Digest> = HashMap::new();
    let mut count = 0;
    for record in records(run) {
        let batches = record["decoded"].as_array().into_iter().flatten();
        for event in batches.flat_map(|batch| batch["events"].as_array().unwrap()) {
            if event["type"] != "BlockStored" {
                continue;
            }
            let size = usize::try_from(event["block_size"].as_u64().unwrap()).unwrap();
            let ids = tokens(&event["token_ids"]);
            let parent = &event["parent_block_hash"];
            let mut parent = (!parent.is_null()).then(|| known[&parent.to_string()]);
            for (i, published) in event["block_hashes"].as_array().unwrap().iter().enumerate() {
                let extra = tag(&event["extra_keys"][i], event["lora_name"].as_str());
                let digest = hasher.block(parent, &ids[i * size..(i + 1) * size], &extra);
                assert!(is_published(&digest, published), "{}: block {i} of {event}", record["name"]);
                known.insert(published.to_string(), digest);
                parent = Some(digest);
                count += 1;
            }
        }
    }
    count
}

#[test]
fn hashes_of_pickle_are_those_of_vllm() {
    let count = check_hashes("main", Algorithm::Sha256) + check_hashes("pool", Algorithm::Sha256);
    assert!(count > 400, "{count}");
}

#[test]
fn hashes_of_cbor_are_those_of_vllm() {
    assert!(check_hashes("bytes", Algorithm::Sha256Cbor) > 40);
}

/// An event of a capture and ours, in one comparable form.
fn captured(event: &Value) -> String {
    match event["type"].as_str().unwrap() {
        "BlockStored" => format!("+ {} after {}", event["block_hashes"], event["parent_block_hash"]),
        "BlockRemoved" => format!("- {}", event["block_hashes"][0]),
        _ => "clear".to_owned(),
    }
}

fn ours(event: &KvEvent) -> String {
    match event {
        KvEvent::Stored(Stored { hashes, parent, .. }) => {
            let hashes: Value = hashes.iter().map(Digest::low64).collect();
            format!("+ {hashes} after {}", Value::from(parent.map(|parent| parent.low64())))
        }
        KvEvent::Removed(hash) => format!("- {}", hash.low64()),
        KvEvent::Offloaded(_) | KvEvent::OffloadRemoved(_) => panic!("no CPU tier here"),
        KvEvent::Cleared => "clear".to_owned(),
    }
}

/// The 79-block engine of run `pool`: every store, duplicate, eviction and clear in the same order.
#[test]
fn pool_under_pressure_behaves_as_vllm() {
    let mut pool = BlockPool::new(32, 80, BlockHasher::new(Algorithm::Sha256));
    let mut compared = 0;
    for record in records("pool") {
        if record["name"] == "same_prompt_4" {
            break; // from here on several requests ran at the same time
        }
        if record["path"].as_str().is_some_and(|path| !path.starts_with("/v1/")) {
            continue;
        }
        let usage = &record["usage"];
        let mut sequence = Sequence::default();
        let prompt = usize::try_from(usage["prompt_tokens"].as_u64().unwrap()).unwrap();
        let total = usize::try_from(usage["total_tokens"].as_u64().unwrap()).unwrap();
        let (full, media) = whole_sequence(&record, prompt);
        sequence.tokens = full[..prompt].to_vec();
        sequence.media = media;
        let hits = pool.hit_blocks(&mut sequence);
        assert_eq!(hits * 32, usize::try_from(record["cached_tokens"].as_u64().unwrap()).unwrap());
        assert!(pool.admit(&mut sequence, hits, prompt - hits * 32, false));
        sequence.computed = prompt;
        for at in prompt..total - 1 {
            sequence.tokens.push(full.get(at).copied().unwrap_or(0));
            assert!(pool.grow(&mut sequence, 1));
            sequence.computed += 1;
        }
        pool.release(&mut sequence);
        let events: Vec<_> = pool.take_events().iter().map(ours).collect();
        let batches = record["decoded"].as_array().unwrap();
        let expect: Vec<_> = batches.iter().flat_map(|b| b["events"].as_array().unwrap()).map(captured).collect();
        assert_eq!(events, expect, "{}", record["name"]);
        compared += events.len();
    }
    assert!(compared > 170, "{compared}");
}

/// Prompt, then as much of the answer as the events show.
fn whole_sequence(record: &Value, prompt: usize) -> (Vec<u32>, Vec<engine_sim::blocks::MediaSpan>) {
    let mut full = match &record["request"]["prompt"] {
        Value::Array(_) => tokens(&record["request"]["prompt"]),
        _ => tokens(&record["render"]["token_ids"]),
    };
    let stored = record["decoded"].as_array().unwrap().iter().flat_map(|batch| batch["events"].as_array().unwrap());
    let ids = stored.filter(|e| e["type"] == "BlockStored").flat_map(|e| tokens(&e["token_ids"]));
    full.extend(ids.collect::<Vec<_>>().into_iter().skip(prompt));
    let places = record["render"]["mm_placeholders"]["image"].as_array().into_iter().flatten();
    let number = |value: &Value| usize::try_from(value.as_u64().unwrap()).unwrap();
    let spans = places.enumerate().map(|(i, place)| engine_sim::blocks::MediaSpan {
        id: record["render"]["mm_hashes"]["image"][i].as_str().unwrap().to_owned(),
        start: number(&place["offset"]),
        tokens: number(&place["length"]),
    });
    (full, spans.collect())
}
