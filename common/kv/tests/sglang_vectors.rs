//! Captured SGLang frames decode to what the recorder says, their hashes follow from their tokens, and views predict them.

#![expect(clippy::unwrap_used, reason = "a test: a vector that cannot be read is a failure")]

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::Arc;

use fovea_kv::event::{Attention, Batch, BlockExtra, KvEvent, Removed, Stored};
use fovea_kv::sglang::pads::Rule;
use fovea_kv::sglang::{self, pair, token};
use fovea_kv::{BlockHasher, BlockSize, EngineHash, RoutingView, SequenceHash, Tier, chain, root};
use serde_json::Value;
use sha2::{Digest, Sha256};

const VERSIONS: [&str; 5] = ["0.5.16", "0.5.19", "0.5.21", "0.5.22", "0.5.23"];

fn folder(version: &str) -> PathBuf {
    PathBuf::from(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/sglang")).join(version)
}

fn read(version: &str, name: &str) -> Option<Value> {
    let text = std::fs::read_to_string(folder(version).join(name).with_extension("json")).ok()?;
    Some(serde_json::from_str(&text).unwrap())
}

/// (version, name, scenario) of all captures with steps.
fn scenarios() -> Vec<(&'static str, String, Value)> {
    let mut found = Vec::new();
    for version in VERSIONS {
        for file in std::fs::read_dir(folder(version)).unwrap() {
            let name = file.unwrap().path().file_stem().unwrap().to_str().unwrap().to_owned();
            let value = read(version, &name).unwrap();
            if value["steps"].is_array() {
                found.push((version, name, value));
            }
        }
    }
    assert!(found.len() > 30, "{} scenarios", found.len());
    found
}

fn hex(text: &Value) -> Vec<u8> {
    let digits = text.as_str().unwrap();
    (0..digits.len() / 2).map(|at| u8::from_str_radix(&digits[2 * at..2 * at + 2], 16).unwrap()).collect()
}

fn frames(scenario: &Value) -> impl Iterator<Item = (&Value, Batch)> {
    let steps = scenario["steps"].as_array().unwrap().iter().filter(|step| step["frame"].is_object());
    steps.map(|step| (step, sglang::decode(&hex(&step["frame"]["payload_hex"])).unwrap()))
}

/// A field of a map event, or of an array event by its position.
fn field<'a>(event: &'a Value, name: &str, position: usize) -> &'a Value {
    if event.is_array() { &event[position] } else { &event[name] }
}

fn name(event: &Value, name: &str) -> Option<Arc<str>> {
    let value = if event.is_array() { &event[7][name] } else { &event[name] };
    value.as_str().map(Arc::from)
}

fn engine_hash(value: &Value) -> EngineHash {
    EngineHash::Int(value.as_i64().unwrap().cast_unsigned())
}

fn hashes(event: &Value) -> Vec<EngineHash> {
    field(event, "block_hashes", 1).as_array().unwrap().iter().map(engine_hash).collect()
}

fn position(id: &Value) -> u32 {
    let half = |id: &Value| token(id.as_u64().unwrap());
    id.as_array().map_or_else(|| half(id), |both| pair(half(&both[0]), half(&both[1])))
}

fn event(event: &Value) -> KvEvent {
    match field(event, "type", 0).as_str().unwrap() {
        "BlockStored" => {
            let parent = field(event, "parent_block_hash", 2);
            let hashes = hashes(event);
            let mut extra = Vec::new();
            if let (true, Some(salt)) = (parent.is_null(), name(event, "cache_salt")) {
                extra = vec![BlockExtra::default(); hashes.len()];
                extra[0].salt = Some(salt);
            }
            KvEvent::Stored(Stored {
                hashes,
                parent: (!parent.is_null()).then(|| engine_hash(parent)),
                tokens: field(event, "token_ids", 3).as_array().unwrap().iter().map(position).collect(),
                block_size: field(event, "block_size", 4).as_u64().unwrap() as u32,
                tier: Tier::Gpu,
                lora: name(event, "lora_name"),
                extra,
                group: 0,
                attention: Attention::Full,
                session: name(event, "session_id"),
            })
        }
        "BlockRemoved" => KvEvent::Removed(Removed { hashes: hashes(event), tier: Tier::Gpu, group: 0 }),
        _ => KvEvent::Cleared,
    }
}

#[test]
fn every_captured_frame_decodes_to_what_the_recorder_says() {
    let mut count = 0;
    for (version, name, scenario) in scenarios() {
        for (step, batch) in frames(&scenario) {
            let decoded = &step["frame"]["decoded"];
            let expect: Vec<_> = decoded[1].as_array().unwrap().iter().map(event).collect();
            assert_eq!(batch.events, expect, "{version}/{name} {}", step["note"]);
            assert_eq!((u64::from(batch.rank), batch.skipped.len()), (decoded[2].as_u64().unwrap(), 0));
            assert_eq!(batch.pairs, name == "eagle_bigram" && step["op"] == "insert");
            count += 1;
        }
    }
    assert!(count > 130, "{count} frames");
}

#[test]
fn replayed_payloads_are_those_of_the_frames() {
    let mut count = 0;
    for (_, _, scenario) in scenarios() {
        let live: HashMap<_, _> =
            frames(&scenario).map(|(step, batch)| (hex(&step["frame"]["seq_hex"]), batch)).collect();
        for step in scenario["steps"].as_array().unwrap().iter().filter(|step| step["replay"].is_object()) {
            let replies = step["replay"]["reply_frames"].as_array().unwrap();
            for reply in &replies[..replies.len() - 1] {
                let [.., seq, payload] = reply.as_array().unwrap().as_slice() else { panic!("{reply}") };
                assert_eq!(sglang::decode(&hex(payload)).unwrap(), live[&hex(seq)]);
                count += 1;
            }
        }
    }
    assert!(count > 25, "{count} replies");
}

#[test]
fn a_frame_cut_anywhere_is_an_error() {
    for version in VERSIONS {
        let scenario = read(version, "mm_text_image").unwrap();
        for (step, _) in frames(&scenario) {
            let payload = hex(&step["frame"]["payload_hex"]);
            assert!((0..payload.len()).all(|len| sglang::decode(&payload[..len]).is_err()));
        }
    }
}

/// Bytes of one page in SGLang's hash: every id in 4 bytes, or all in 8 behind a mark once one needs more.
fn page_bytes(ids: &[Value]) -> Vec<u8> {
    let flat = ids.iter().flat_map(|id| id.as_array().cloned().unwrap_or_else(|| vec![id.clone()]));
    let flat: Vec<u64> = flat.map(|id| id.as_u64().unwrap()).collect();
    if flat.iter().any(|&id| id > u64::from(u32::MAX)) {
        std::iter::once(0xff).chain(flat.iter().flat_map(|id| id.to_le_bytes())).collect()
    } else {
        flat.iter().flat_map(|&id| (id as u32).to_le_bytes()).collect()
    }
}

/// The hash that the `dynamo` format shows for `inner` in a namespace.
fn namespaced(inner: [u8; 8], request: &Value) -> [u8; 8] {
    let parts = [request["extra_key"].as_str(), request["cache_salt"].as_str()];
    if parts == [None, None] {
        return inner;
    }
    let mut seed = Sha256::new().chain_update(b"sglang-kv-event-namespace-v1");
    for part in parts {
        seed = match part {
            None => seed.chain_update([0]),
            Some(text) => seed.chain_update([1]).chain_update((text.len() as u64).to_le_bytes()).chain_update(text),
        };
    }
    first(&Sha256::new().chain_update(seed.finalize()).chain_update(inner).finalize())
}

fn first(digest: &[u8]) -> [u8; 8] {
    digest[..8].try_into().unwrap()
}

#[test]
fn block_hashes_follow_from_the_tokens() {
    let mut count = 0;
    for (version, name, scenario) in scenarios() {
        let dynamo = scenario["kv_events_config"]["format"] == "dynamo";
        let mut digests = HashMap::new();
        for step in scenario["steps"].as_array().unwrap().iter().filter(|step| step["frame"].is_object()) {
            for event in step["frame"]["decoded"][1].as_array().unwrap() {
                if field(event, "type", 0) != "BlockStored" {
                    continue;
                }
                let salt = self::name(event, "cache_salt");
                let salted =
                    |salt: Arc<str>| Sha256::digest([b"sglang-cache-salt-v1\0", salt.as_bytes()].concat()).to_vec();
                let mut before = match field(event, "parent_block_hash", 2) {
                    Value::Null => salt.map(salted).unwrap_or_default(),
                    parent => Vec::clone(&digests[&engine_hash(parent)]),
                };
                let size = field(event, "block_size", 4).as_u64().unwrap() as usize;
                let pages = field(event, "token_ids", 3).as_array().unwrap().chunks(size);
                for (hash, page) in hashes(event).into_iter().zip(pages) {
                    before = Sha256::digest([before, page_bytes(page)].concat()).to_vec();
                    let shown = if dynamo { namespaced(first(&before), &step["request"]) } else { first(&before) };
                    assert_eq!(hash, EngineHash::Int(u64::from_be_bytes(shown)), "{version}/{name} {}", step["note"]);
                    digests.insert(hash, before.clone());
                    count += 1;
                }
            }
        }
    }
    assert!(count > 250, "{count} blocks");
}

/// Our hashes of the blocks that each step stores.
fn translated(scenario: &Value) -> Vec<Vec<SequenceHash>> {
    let (mut known, mut hasher) = (HashMap::new(), BlockHasher::default());
    let mut step = |batch: Batch| {
        let mut stored = Vec::new();
        for event in batch.events {
            let KvEvent::Stored(event) = event else { continue };
            let salt = event.extra.first().and_then(|extra| extra.salt.as_deref()).unwrap_or("");
            let start = || root(event.lora.as_deref().unwrap_or(""), salt);
            let mut before = event.parent.map_or_else(start, |parent| known[&parent]);
            for (hash, tokens) in event.hashes.iter().zip(event.tokens.chunks(event.block_size as usize)) {
                hasher.begin();
                hasher.push_tokens(tokens);
                before = chain(before, hasher.finish());
                known.insert(*hash, before);
                stored.push(before);
            }
        }
        stored
    };
    frames(scenario).map(|(_, batch)| step(batch)).collect()
}

#[test]
fn one_scenario_is_one_chain_in_every_version() {
    for name in ["text_page4", "text_page16_replay", "eagle_bigram", "namespaces_default_dp3", "mm_text_image"] {
        let chains: BTreeMap<_, _> =
            VERSIONS.map(|version| (version, translated(&read(version, name).unwrap()))).into();
        for (version, steps) in &chains {
            // A salt is not shown up to 0.5.17, and pads are others from 0.5.23 on.
            let steps_equal = match (name, *version) {
                ("namespaces_default_dp3", "0.5.16") => 2,
                ("mm_text_image", "0.5.23") => 1,
                _ => steps.len(),
            };
            assert_eq!(steps.len(), chains["0.5.22"].len());
            assert_eq!(steps[..steps_equal], chains["0.5.22"][..steps_equal], "{name} of {version}");
        }
    }
}

/// The view of a request whose pads are made by the rule of its version.
fn view(request: &Value, rule: Rule) -> RoutingView {
    let mut view = RoutingView::default();
    let mut ids = request["placeholder_ids"].as_array().unwrap().iter().map(|id| token(id.as_u64().unwrap()));
    for image in request["images"].as_array().unwrap() {
        let (start, count) = (image["offset"][0].as_u64().unwrap() as u32, image["tokens"].as_u64().unwrap() as u32);
        ids.by_ref().take((start - view.len()) as usize).for_each(|token| view.push(token, 1));
        view.push_cycle(&rule.pads(u64::from_str_radix(image["hash_hex"].as_str().unwrap(), 16).unwrap()), count);
        ids.nth(count as usize - 1);
    }
    ids.for_each(|token| view.push(token, 1));
    view
}

#[test]
fn a_view_with_the_pads_of_the_version_predicts_what_is_stored() {
    let mut requests = 0;
    for (version, name, scenario) in scenarios() {
        let rule = if version == "0.5.23" { Rule::Wide } else { Rule::Single };
        let stored: Vec<_> = translated(&scenario).concat();
        for step in scenario["steps"].as_array().unwrap().iter().filter(|step| step["request"].is_object()) {
            let request = &step["request"];
            if version == "0.5.16" && request["cache_salt"].is_string() {
                continue;
            }
            let mut view = view(request, rule);
            if name == "eagle_bigram" {
                view = view.to_pairs();
            }
            let size = BlockSize::new(scenario["page_size"].as_u64().unwrap() as u32).unwrap();
            let mut predicted = Vec::new();
            view.sequence_hashes(size, root("", request["cache_salt"].as_str().unwrap_or("")), &mut predicted);
            assert_eq!(predicted.len() as u32, view.len() / size.get());
            assert!(predicted.iter().all(|hash| stored.contains(hash)), "{version}/{name} {}", step["note"]);
            requests += 1;
        }
    }
    assert!(requests > 90, "{requests} requests");
}

#[test]
fn pads_follow_from_the_hash() {
    for version in VERSIONS {
        let rule = if version == "0.5.23" { Rule::Wide } else { Rule::Single };
        let file = read(version, "pads").unwrap();
        let ids =
            |item: &Value| item["pads"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect::<Vec<_>>();
        for item in file["by_mm_hash"].as_array().unwrap() {
            let digits = item["mm_hash_hex"].as_str().unwrap();
            let hash = u64::from_str_radix(&digits[digits.len().saturating_sub(16)..], 16).unwrap();
            assert_eq!(rule.ids(hash), ids(item), "{version} {digits}");
            assert_eq!(rule.pads(hash), ids(item).into_iter().map(token).collect::<Vec<_>>());
        }
        let tensor = &file["by_feature_tensor_cpu"];
        assert_eq!(rule.ids(tensor["hash_feature"].as_u64().unwrap()), ids(tensor));
        if let Some(item) = file.get("by_identity_32_bytes") {
            let identity = hex(&item["identity_hex"]).try_into().unwrap();
            assert_eq!(rule.ids_of_identity(&identity), ids(item));
            assert_eq!(Rule::Single.ids_of_identity(&identity), Rule::Single.ids(item["item_hash"].as_u64().unwrap()));
        }
    }
    let image = read("0.5.23", "qwen3vl_identity").unwrap();
    let ids: Vec<_> = image["pads"].as_array().unwrap().iter().map(|id| id.as_u64().unwrap()).collect();
    assert_eq!(Rule::Wide.ids(image["feature_hash"].as_u64().unwrap()), ids);
}
