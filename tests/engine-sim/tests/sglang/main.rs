//! Our page tree, pads and hashes, held to captures of SGLang 0.5.16 to 0.5.23: the bytes of every batch.
#![expect(clippy::unwrap_used, reason = "a test fails by panic")]

use engine_sim::blocks::MediaSpan;
use engine_sim::sglang::event::encode_batch;
use engine_sim::sglang::{PageTree, Rules, Version, identity};
use serde_json::Value;
use std::path::PathBuf;

/// Pages of a tree that is never full.
const ROOMY: usize = 10_000;

fn vectors() -> Option<PathBuf> {
    let here = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    let places = [here.join("../vectors/sglang"), here.join("../../../shared/vectors/sglang")];
    places.into_iter().find(|place| place.is_dir())
}

/// `file` of every release, with the release's rules; empty where the captures are not at hand.
fn captures(file: &str) -> Vec<(Rules, String, Value)> {
    let releases = vectors().into_iter().flat_map(|place| std::fs::read_dir(place).unwrap());
    let mut found = Vec::new();
    for folder in releases.map(|entry| entry.unwrap().path()) {
        let Ok(text) = std::fs::read_to_string(folder.join(file)) else { continue };
        let release = folder.file_name().unwrap().to_str().unwrap().to_owned();
        let rules = Rules::of(Version::parse(&release).unwrap());
        found.push((rules, release, serde_json::from_str(&text).unwrap()));
    }
    found.sort_by(|a, b| a.1.cmp(&b.1));
    found
}

fn number(value: &Value) -> usize {
    usize::try_from(value.as_u64().unwrap()).unwrap()
}

fn list(value: &Value) -> &[Value] {
    value.as_array().map(Vec::as_slice).unwrap_or_default()
}

/// The tokens that SGLang keys its tree with, made from the request and the hashes of its images.
fn keyed(request: &Value, rules: &Rules) -> Vec<u64> {
    let ids = list(&request["placeholder_ids"]);
    if ids.iter().any(|id| id.as_u64().unwrap() > u64::from(u32::MAX)) {
        return ids.iter().map(|id| id.as_u64().unwrap()).collect();
    }
    let tokens: Vec<u32> = ids.iter().map(|id| u32::try_from(id.as_u64().unwrap()).unwrap()).collect();
    let span = |image: &Value| {
        let hash = u64::from_str_radix(image["hash_hex"].as_str().unwrap(), 16).unwrap();
        let (start, tokens) = (number(&image["offset"][0]), number(&image["tokens"]));
        MediaSpan { id: identity::span_id(hash), start, tokens }
    };
    let media: Vec<_> = list(&request["images"]).iter().map(span).collect();
    identity::keyed(&tokens, &media, rules)
}

fn apply(tree: &mut PageTree, step: &Value, rules: &Rules, page: usize) {
    match step["op"].as_str().unwrap() {
        "insert" => {
            let request = &step["request"];
            let tokens = keyed(request, rules);
            if let Some(padded) = step["padded_ids"].as_array() {
                assert_eq!(tokens, padded.iter().map(|id| id.as_u64().unwrap()).collect::<Vec<_>>());
            }
            let text = |field: &str| request[field].as_str();
            tree.insert(&tokens, text("cache_salt"), text("extra_key"), text("session_id"));
        }
        "evict" => tree.evict(number(&step["tokens"]).div_ceil(page)),
        "reset" => assert!(tree.reset()),
        _ => {}
    }
}

/// Plays the steps of a scenario in every release that has it; every batch must have the captured bytes.
#[track_caller]
fn check(file: &str, releases: usize) {
    let captures = captures(file);
    assert!(captures.is_empty() || captures.len() == releases, "{file} of {} releases", captures.len());
    for (rules, release, capture) in captures {
        let page = number(&capture["page_size"]);
        let rank = u32::try_from(number(&capture["dp_rank"])).unwrap();
        let mut tree = PageTree::new(page, ROOMY, rules);
        let mut batches = 0;
        for step in list(&capture["steps"]).iter().filter(|step| step["op"] != "replay") {
            apply(&mut tree, step, &rules, page);
            let events = tree.take_events();
            let bytes = |event: &Vec<u8>| event.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
            let sent = (!events.is_empty()).then(|| bytes(&encode_batch(1_700_000_000.25, &events, &rules, rank)));
            let note = format!("{release}/{file}: {} {}: {events:?}", step["op"], step["note"]);
            assert_eq!(sent.as_deref(), step["frame"]["payload_hex"].as_str(), "{note}");
            batches += usize::from(sent.is_some());
        }
        assert!(batches > 3, "{release}/{file}");
    }
}

#[test]
fn pages_of_1_token() {
    check("text_page1.json", 1);
}

#[test]
fn pages_of_4_tokens() {
    check("text_page4.json", 5);
}

#[test]
fn pages_of_16_tokens() {
    check("text_page16_replay.json", 5);
}

#[test]
fn salts_and_extra_keys_of_rank_3() {
    check("namespaces_default_dp3.json", 5);
}

#[test]
fn images_are_pads_inside_the_tokens() {
    check("mm_text_image.json", 5);
}

#[test]
fn sessions_show_in_events() {
    check("mm_sessions_unified_rust.json", 1);
}

#[test]
fn both_unified_trees_are_the_same() {
    check("unified_python.json", 1);
    check("unified_rust.json", 1);
}

#[test]
fn pads_are_those_of_each_release() {
    for (rules, release, capture) in captures("pads.json") {
        for row in list(&capture["by_mm_hash"]) {
            let hex = row["mm_hash_hex"].as_str().unwrap();
            // Only the low 64 bits of a long hash reach the pads.
            let hash = u64::from_str_radix(&hex[hex.len().saturating_sub(16)..], 16).unwrap();
            let expect: Vec<u64> = list(&row["pads"]).iter().map(|pad| pad.as_u64().unwrap()).collect();
            assert_eq!(identity::pads(hash, &rules), expect, "{release}: {hex}");
        }
    }
}

#[test]
fn an_image_s_hash_follows_from_its_artifact_key() {
    for (rules, release, capture) in captures("qwen3vl_identity.json") {
        let text = |field: &str| capture[field].as_str().unwrap();
        assert_eq!(identity::content_hash(text("image_bytes_utf8").as_bytes()), text("content_digest"));
        let hex = text("artifact_key").trim_start_matches("sha256:");
        let key: Vec<u8> = (0..32).map(|i| u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).unwrap()).collect();
        let hash = identity::feature_hash(&key.try_into().unwrap());
        assert_eq!(hash, capture["feature_hash"].as_u64().unwrap(), "{release}");
        let pads: Vec<u64> = list(&capture["pads"]).iter().map(|pad| pad.as_u64().unwrap()).collect();
        assert_eq!(identity::pads(hash, &rules), pads, "{release}");
    }
}
