//! TensorRT-LLM samples (`tests/vectors/trtllm/README.md`): one prompt must have the same sequence hashes whichever cache manager wrote
//! its events and whichever way they came.

use anyhow::{Context, ensure};
use serde_json::Value;

use super::{Args, Tally, decode_file};

const REFERENCE: &str = "buffered_events_v1_manager";
const OTHERS: [&str; 2] = ["buffered_events_v2_manager", "zmq_push_wire"];

pub fn check(args: &Args, tally: &mut Tally) -> anyhow::Result<()> {
    let text = std::fs::read_to_string(args.dir.join("events.json")).context("events.json")?;
    let samples: Value = serde_json::from_str(&text)?;
    let own = args.dir.join("config.json").exists();
    let lines = decode_file(args, if own { &args.dir } else { &args.base }, &text)?;
    for line in &lines {
        for note in line["notes"].as_array().into_iter().flatten().filter_map(Value::as_str) {
            ensure!(!note.contains("stored") && !note.contains("events are"), "{}: {note}", line["name"]);
        }
    }
    let chains = |section: &str| -> Vec<&Value> {
        let of_section =
            |line: &&Value| line["name"].as_str().is_some_and(|name| name.starts_with(&format!("{section}/")));
        lines.iter().filter(of_section).map(|line| &line["stored"]).filter(|stored| is_full(stored)).collect()
    };
    let reference = chains(REFERENCE);
    ensure!(!reference.is_empty(), "{REFERENCE} stores nothing");
    for section in OTHERS {
        for chain in chains(section) {
            tally.supported += 1;
            if reference.contains(&chain) {
                tally.exact += 1;
            } else {
                eprintln!("differs: {section} has a chain that {REFERENCE} has not");
            }
        }
    }
    let uuids = samples[REFERENCE].as_array().into_iter().flatten().filter(|event| has_uuid(event)).count();
    if uuids > 0 {
        tally.unsupported.insert("a uuid in place of the digest", uuids as u64);
    }
    Ok(())
}

fn is_full(list: &Value) -> bool {
    list.as_array().is_some_and(|list| !list.is_empty())
}

/// Whether a key of the event is no digest.
fn has_uuid(event: &Value) -> bool {
    let blocks = event["data"]["blocks"].as_array().into_iter().flatten();
    let keys = blocks.flat_map(|block| block["mm_keys"].as_array().into_iter().flatten());
    keys.filter_map(|key| key["hash"].as_str()).any(|hash| hash.len() != 64)
}
