//! Captured and re-encoded vLLM frames decode to what the capture itself says they contain.

#![expect(clippy::unwrap_used, reason = "a test: a vector that cannot be read is a failure")]

use std::path::Path;
use std::sync::Arc;

use fovea_kv::event::{Attention, BlockExtra, KvEvent, Removed, Stored};
use fovea_kv::{EngineHash, MediaId, Tier, vllm};
use serde_json::Value;

const VECTORS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/vllm");

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn base64(text: &Value) -> Vec<u8> {
    base64_simd::STANDARD.decode_to_vec(text.as_str().unwrap()).unwrap()
}

fn hash(value: &Value) -> EngineHash {
    let Some(hex) = value.get("bytes").and_then(Value::as_str) else { return EngineHash::Int(value.as_u64().unwrap()) };
    let mut bytes = [0; 32];
    for (index, byte) in bytes.iter_mut().enumerate().take(hex.len() / 2) {
        *byte = u8::from_str_radix(&hex[2 * index..2 * index + 2], 16).unwrap();
    }
    EngineHash::Digest { bytes, len: (hex.len() / 2) as u8 }
}

fn hashes(event: &Value) -> Vec<EngineHash> {
    event["block_hashes"].as_array().unwrap().iter().map(hash).collect()
}

fn tier(event: &Value) -> Tier {
    match event["medium"].as_str() {
        None | Some("GPU") => Tier::Gpu,
        Some("CPU") => Tier::Cpu,
        Some(_) => Tier::Storage,
    }
}

fn extra(keys: &Value, has_lora: bool, starts_chain: bool) -> BlockExtra {
    let mut extra = BlockExtra::default();
    for (index, key) in keys.as_array().unwrap_or(&Vec::new()).iter().enumerate() {
        match key {
            Value::String(_) if index == 0 && has_lora => {}
            Value::String(salt) if starts_chain && extra.salt.is_none() => extra.salt = Some(Arc::from(salt.as_str())),
            Value::Array(pair) => {
                let offset = i32::try_from(pair[1].as_i64().unwrap()).unwrap();
                extra.media.push((MediaId::from_engine_id(pair[0].as_str().unwrap()), offset));
            }
            _ => extra.opaque = true,
        }
    }
    extra
}

fn event(event: &Value) -> KvEvent {
    match event["type"].as_str().unwrap() {
        "BlockStored" => {
            let hashes = hashes(event);
            let parent = (!event["parent_block_hash"].is_null()).then(|| hash(&event["parent_block_hash"]));
            let lora = event["lora_name"].as_str().map(Arc::from);
            let keys = event["extra_keys"].as_array();
            let block = |(index, keys)| extra(keys, lora.is_some(), index == 0 && parent.is_none());
            let unnamed = lora.is_none() && event["lora_id"].is_number();
            let opaque = BlockExtra { opaque: true, ..BlockExtra::default() };
            KvEvent::Stored(Stored {
                extra: if unnamed {
                    vec![opaque; hashes.len()]
                } else {
                    keys.map_or(Vec::new(), |keys| keys.iter().enumerate().map(block).collect())
                },
                hashes,
                parent,
                tokens: event["token_ids"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect(),
                block_size: event["block_size"].as_u64().unwrap() as u32,
                tier: tier(event),
                lora,
                group: event["group_idx"].as_u64().unwrap_or(0) as u32,
                attention: Attention::Full,
                session: event["session_id"].as_str().map(Arc::from),
            })
        }
        "BlockRemoved" => KvEvent::Removed(Removed {
            hashes: hashes(event),
            tier: tier(event),
            group: event["group_idx"].as_u64().unwrap_or(0) as u32,
        }),
        _ => KvEvent::Cleared,
    }
}

fn events(list: &Value) -> Vec<KvEvent> {
    list.as_array().unwrap().iter().map(event).collect()
}

#[test]
fn every_captured_frame_decodes_to_what_the_record_says() {
    let mut frames = 0;
    for file in std::fs::read_dir(VECTORS).unwrap().map(|file| file.unwrap().path()) {
        if file.extension().is_none_or(|extension| extension != "jsonl") {
            continue;
        }
        for record in lines(&file) {
            for (index, frame) in record["frames"].as_array().unwrap_or(&Vec::new()).iter().enumerate() {
                let batch = vllm::decode(&base64(&frame[2])).unwrap();
                let decoded = &record["decoded"][index];
                assert_eq!(batch.events, events(&decoded["events"]), "{}", record["name"]);
                assert_eq!(u64::from(batch.rank), decoded["data_parallel_rank"].as_u64().unwrap());
                assert_eq!(batch.skipped, []);
                frames += 1;
            }
        }
    }
    assert!(frames > 150, "{frames} frames");
}

#[test]
fn every_older_layout_decodes_to_its_events() {
    let records = lines(&Path::new(VECTORS).join("legacy_encodings.jsonl"));
    assert!(records.len() > 100);
    for record in records {
        let batch = vllm::decode(&base64(&record["payload"])).unwrap();
        assert_eq!(batch.events, events(&record["events"]), "{} of {}", record["form"], record["source"]);
        assert_eq!((batch.rank, batch.skipped.len()), (0, 0));
    }
}

#[test]
fn a_frame_cut_anywhere_is_an_error() {
    for record in lines(&Path::new(VECTORS).join("image_single.jsonl")) {
        for frame in record["frames"].as_array().unwrap() {
            let payload = base64(&frame[2]);
            assert!((0..payload.len()).all(|len| vllm::decode(&payload[..len]).is_err()));
        }
    }
}
