use std::collections::HashSet;
use std::io::Cursor;

use serde_json::Value;

use super::*;

const VECTORS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors");

fn vectors(engine: &str) -> std::path::PathBuf {
    Path::new(VECTORS).join(engine)
}

fn translate(engine: &str, model_dir: &Path, input: String) -> Vec<Value> {
    let mut out = Vec::new();
    run(engine, model_dir, Cursor::new(input), &mut out, std::io::sink()).unwrap();
    String::from_utf8(out).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

/// All captures, one file after another, in the order of their names: not the order of the stream.
fn translated() -> Vec<Value> {
    let mut files: Vec<_> = std::fs::read_dir(vectors("vllm")).unwrap().map(|file| file.unwrap().path()).collect();
    files.retain(|file| file.extension().is_some_and(|extension| extension == "jsonl"));
    files.sort();
    let input = files.iter().map(|file| std::fs::read_to_string(file).unwrap()).collect();
    translate("vllm", &vectors("vllm"), input)
}

#[test]
fn every_golden_hash_is_stored_up_to_its_request() {
    let golden = std::fs::read_to_string(vectors("vllm").join("golden_sequence_hashes.json")).unwrap();
    let golden: HashMap<String, Vec<String>> = serde_json::from_str(&golden).unwrap();
    let mut stored = HashMap::<String, HashSet<String>>::new();
    let mut exact = 0;
    for line in translated() {
        let name = line["name"].as_str().unwrap();
        let run = stored.entry(name.split('/').next().unwrap().to_owned()).or_default();
        run.extend(strings(&line["stored"]));
        if let Some(hashes) = golden.get(name) {
            assert!(hashes.iter().all(|hash| run.contains(hash)), "{name}");
            exact += 1;
        }
    }
    assert_eq!((exact, golden.len()), (121, 121));
}

fn strings(list: &Value) -> Vec<String> {
    list.as_array().unwrap().iter().map(|hash| hash.as_str().unwrap().to_owned()).collect()
}

#[test]
fn clears_removals_and_what_cannot_be_told_are_reported() {
    let lines = translated();
    let find = |name: &str| lines.iter().find(|line| line["name"] == name).unwrap();
    assert_eq!(find("pool/reset/after_reset")["cleared"], true);
    assert_eq!(find("pool/reset/reset_prefix_cache")["stored"], Value::Array(Vec::new()));
    assert!(lines.iter().map(|line| line["removed"].as_array().unwrap().len()).sum::<usize>() > 100);
    let embeds = lines.iter().filter(|line| line["name"].as_str().unwrap().contains("prompt_embeds"));
    assert!(embeds.map(|line| line["notes"].as_array().unwrap().len()).sum::<usize>() > 0);
    let gaps = lines.iter().filter(|line| line["notes"].to_string().contains("not in the capture"));
    assert_eq!(gaps.count(), 0);
}

#[test]
fn scenarios_give_a_line_per_step_and_follow_each_other() {
    let read = |name: &str| std::fs::read_to_string(vectors("sglang").join(name)).unwrap();
    let lines = translate("sglang", Path::new(""), read("0.5.16/text_page4.json") + &read("0.5.23/text_page4.json"));
    assert_eq!(lines.len(), 14);
    for (old, new) in lines[..7].iter().zip(&lines[7..]) {
        assert_eq!(
            (&old["stored"], &old["removed"], &old["cleared"]),
            (&new["stored"], &new["removed"], &new["cleared"])
        );
        assert_eq!(old["notes"].to_string() + &new["notes"].to_string(), "[][]");
    }
    let counts: Vec<_> =
        lines[..7].iter().map(|line| (strings(&line["stored"]).len(), strings(&line["removed"]).len())).collect();
    assert_eq!(counts, [(0, 0), (4, 0), (0, 0), (2, 0), (2, 0), (0, 2), (0, 0)]);
    assert_eq!(
        (&lines[0]["name"], &lines[13]["name"], &lines[6]["cleared"]),
        (&"0/0".into(), &"1/6".into(), &true.into())
    );
}

#[test]
fn samples_of_all_writers_agree_when_placeholder_and_vocabulary_are_known() {
    let text = std::fs::read_to_string(vectors("trtllm").join("events.json")).unwrap();
    let lines = translate("trtllm", &vectors("trtllm"), text.clone());
    let stored =
        |lines: &[Value], name: &str| strings(&lines.iter().find(|line| line["name"] == name).unwrap()["stored"]);
    let (one, two) = (stored(&lines, "buffered_events_v1_manager/1"), stored(&lines, "buffered_events_v1_manager/2"));
    assert_eq!((one.len(), two.len()), (3, 2));
    assert_eq!(stored(&lines, "buffered_events_v2_manager/1"), one);
    assert_eq!(stored(&lines, "buffered_events_v2_manager/2"), two);
    assert_eq!(stored(&lines, "zmq_push_wire/0"), two);
    assert!(lines.iter().all(|line| !line["notes"].to_string().contains("stored")));
    let blind = translate("trtllm", Path::new(""), text);
    assert_eq!(stored(&blind, "buffered_events_v2_manager/1"), one);
    assert!(stored(&blind, "buffered_events_v2_manager/2").is_empty());
}

#[test]
fn input_of_no_known_form_is_named() {
    let error = |engine: &str, input: &str| {
        let input = Cursor::new(input.to_owned());
        format!("{:#}", run(engine, Path::new(""), input, std::io::sink(), std::io::sink()).unwrap_err())
    };
    assert!(error("vllm", "{}\n{").contains("line 2 of the capture"));
    assert!(error("vllm", r#"{"name":"a","frames":[["!"]]}"#).contains("[topic, seq, payload]"));
    assert!(error("sglang", "{\n}\n{").contains("document 2 of the capture"));
    assert!(error("sglang", r#"{"steps":[{"frame":{"seq_hex":"00"}}]}"#).contains("payload_hex"));
    assert!(error("sglang", r#"{"steps":[{"frame":{"seq_hex":"00","payload_hex":"x"}}]}"#).contains("hex"));
    assert!(error("other", "").contains("vllm, sglang or trtllm"));
}
