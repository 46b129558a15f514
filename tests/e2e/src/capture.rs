//! Captures of real engines (format of tests/vectors/vllm/README.md), in the order in which the engine saw them.

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use anyhow::Context;
use serde_json::Value;

/// One line of a capture file.
#[derive(Clone, Debug)]
pub struct Record {
    pub run: String,
    /// `run/group/name`.
    pub name: String,
    pub path: String,
    /// (body, status, prompt tokens by the engine) of each request.
    pub requests: Vec<(Value, u64, Option<u64>)>,
    /// Asked for, not only there to give the history of its run.
    pub wanted: bool,
    pub line: String,
    order: (i64, usize),
}

/// Facts of one run, from engines.json.
#[derive(Clone, Debug, Default)]
pub struct Engine {
    pub engine_model: String,
    pub loras: Vec<String>,
}

/// Records of both folders by run, each run in order of seq. A record of `dir` wins over the same one of `base`.
///
/// # Errors
/// When a folder or a line cannot be read.
pub fn load(dir: &Path, base: &Path) -> anyhow::Result<BTreeMap<String, Vec<Record>>> {
    let mut all: HashMap<String, Record> = HashMap::new();
    for (folder, wanted) in [(base, dir == base), (dir, true)] {
        for record in read_folder(folder, wanted)? {
            all.insert(record.name.clone(), record);
        }
    }
    let mut runs: BTreeMap<String, Vec<Record>> = BTreeMap::new();
    for record in all.into_values() {
        runs.entry(record.run.clone()).or_default().push(record);
    }
    for records in runs.values_mut() {
        records.sort_by(|a, b| a.order.cmp(&b.order).then_with(|| a.name.cmp(&b.name)));
    }
    Ok(runs)
}

fn read_folder(folder: &Path, wanted: bool) -> anyhow::Result<Vec<Record>> {
    let mut paths: Vec<_> = fs::read_dir(folder)
        .with_context(|| folder.display().to_string())?
        .map(|e| Ok(e?.path()))
        .collect::<anyhow::Result<_>>()?;
    paths.sort();
    let mut records = Vec::new();
    for path in paths.iter().filter(|path| path.extension().is_some_and(|e| e == "jsonl")) {
        let text = fs::read_to_string(path)?;
        let mut in_file = Vec::new();
        for (index, line) in text.lines().enumerate() {
            let value: Value =
                serde_json::from_str(line).with_context(|| format!("{} line {}", path.display(), index + 1))?;
            if value["frames"].is_array() && value["run"].is_string() {
                in_file.push(record(line, &value, index, wanted)?);
            }
        }
        // A request that was a whole hit caused no event: it stands where its neighbours in the file stand.
        let mut before = in_file.iter().find_map(|r| (r.order.0 >= 0).then_some(r.order.0 - 1)).unwrap_or(-1);
        for record in &mut in_file {
            if record.order.0 < 0 {
                record.order.0 = before;
            }
            before = record.order.0;
        }
        records.extend(in_file);
    }
    Ok(records)
}

fn record(line: &str, value: &Value, index: usize, wanted: bool) -> anyhow::Result<Record> {
    let text = |key: &str| value[key].as_str().unwrap_or_default().to_owned();
    let seq = value["frames"].as_array().and_then(|frames| frames.first()).and_then(|frame| frame[1].as_str());
    let seq = seq.map(|seq| {
        let bytes = base64_simd::STANDARD.decode_to_vec(seq)?;
        anyhow::Ok(i64::from_be_bytes(bytes.as_slice().try_into().context("a seq has 8 bytes")?))
    });
    let requests = match value["requests"].as_array() {
        Some(bodies) => {
            let usage = |i: usize| value["responses"][i]["usage"]["prompt_tokens"].as_u64();
            bodies
                .iter()
                .enumerate()
                .map(|(i, body)| (body.clone(), value["statuses"][i].as_u64().unwrap_or(200), usage(i)))
                .collect()
        }
        None => vec![(
            value["request"].clone(),
            value["status"].as_u64().unwrap_or(0),
            value["usage"]["prompt_tokens"].as_u64(),
        )],
    };
    Ok(Record {
        run: text("run"),
        name: format!("{}/{}/{}", text("run"), text("group"), text("name")),
        path: text("path"),
        requests,
        wanted,
        line: line.to_owned(),
        order: (seq.transpose()?.unwrap_or(-1), index),
    })
}

/// Block size of a run, as its decoded events show it.
pub fn block_size(records: &[Record]) -> Option<u64> {
    records.iter().find_map(|record| {
        let value: Value = serde_json::from_str(&record.line).ok()?;
        let batches = value["decoded"].as_array()?;
        batches
            .iter()
            .flat_map(|batch| batch["events"].as_array())
            .flatten()
            .find_map(|event| event["block_size"].as_u64())
    })
}

/// engines.json: run → facts.
///
/// # Errors
/// When the file cannot be read.
pub fn engines(base: &Path) -> anyhow::Result<HashMap<String, Engine>> {
    let path = base.join("engines.json");
    let list: Value = serde_json::from_str(&fs::read_to_string(&path).with_context(|| path.display().to_string())?)?;
    let mut engines = HashMap::new();
    for entry in list.as_array().context("engines.json is a list")? {
        let mut engine = Engine::default();
        for model in entry["models"]["data"].as_array().into_iter().flatten() {
            let text = |key: &str| model[key].as_str().unwrap_or_default().to_owned();
            if model["parent"].is_string() { engine.loras.push(text("id")) } else { engine.engine_model = text("root") }
        }
        engines.entry(entry["run"].as_str().unwrap_or_default().to_owned()).or_insert(engine);
    }
    Ok(engines)
}
