//! docs/operate/complaints.md: it has every known complaint once, and the tests it names exist in the crates it names.

mod common;

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use common::{files, read, root, shown};

/// (family, number of complaints): ids are `FAMILY-01` and up.
const FAMILIES: [(&str, usize); 10] = [
    ("IDN", 13),
    ("TOK", 9),
    ("EVT", 16),
    ("IDX", 10),
    ("LOD", 10),
    ("MED", 9),
    ("REQ", 10),
    ("ENC", 8),
    ("DIS", 4),
    ("OPS", 8),
];

/// Names of crates as the page writes them, and their folders.
const CRATES: [(&str, &str); 14] = [
    ("fovea-kv", "common/kv"),
    ("fovea-media", "common/media"),
    ("fovea-openai", "common/openai"),
    ("fovea-gossip", "common/gossip"),
    ("fovea-service", "common/service"),
    ("fovea-prompt", "balancer/prompt"),
    ("fovea-balancer-core", "balancer/core"),
    ("fovea-balancer", "balancer"),
    ("fovea-sidecar-core", "sidecar/core"),
    ("fovea-encoder", "sidecar/encoder"),
    ("fovea-pixels", "sidecar/pixels"),
    ("fovea-sidecar", "sidecar"),
    ("fleet", "tests/fleet"),
    ("e2e", "tests/e2e"),
];

struct Row {
    id: String,
    symptom: String,
    /// (crate, test), of the third cell.
    tests: Vec<(String, String)>,
    /// Under a heading whose rows need a test.
    held: bool,
}

fn page() -> PathBuf {
    root().join("docs/operate/complaints.md")
}

/// Rows of all tables of the page. A row whose first cell is no id is the table's head.
fn rows() -> Vec<Row> {
    let page = read(&page());
    let (mut found, mut held) = (Vec::new(), true);
    for line in page.lines() {
        if let Some(heading) = line.strip_prefix("## ") {
            held = !["Not ours", "Known limits", "No test yet"].contains(&heading);
        }
        let cells: Vec<_> = line.trim().trim_matches('|').split('|').map(str::trim).collect();
        let [id, symptom, rest, ..] = cells[..] else { continue };
        if !line.starts_with('|') || id == "id" || id.starts_with('-') {
            continue;
        }
        let quoted = rest.split('`').skip(1).step_by(2).filter(|text| text.contains("::"));
        let tests = quoted.map(|text| {
            let (named, path) = text.split_once("::").expect("filtered");
            (named.to_owned(), path.rsplit("::").next().unwrap_or(path).to_owned())
        });
        found.push(Row { id: id.to_owned(), symptom: symptom.to_owned(), tests: tests.collect(), held });
    }
    found
}

/// Functions under `#[test]` and `#[tokio::test…]`, with other attributes between.
fn tests_of(text: &str) -> BTreeSet<String> {
    let (mut found, mut marked) = (BTreeSet::new(), false);
    for line in text.lines().map(str::trim_start) {
        marked |= line.starts_with("#[test]") || line.starts_with("#[tokio::test");
        let named = line.strip_prefix("fn ").or_else(|| line.strip_prefix("async fn "));
        if let (true, Some(named)) = (marked, named) {
            found.extend(named.split('(').next().map(str::to_owned));
            marked = false;
        }
    }
    found
}

fn tests_by_crate() -> BTreeMap<&'static str, BTreeSet<String>> {
    let folders: Vec<_> = CRATES.iter().map(|(name, folder)| (*name, root().join(folder))).collect();
    let inner = |path: &PathBuf, folder: &PathBuf| {
        let deeper = |(_, other): &&(&str, PathBuf)| other != folder && other.starts_with(folder);
        folders.iter().filter(deeper).any(|(_, other)| path.starts_with(other))
    };
    let all = folders.iter().map(|(name, folder)| {
        let own = files(folder, "rs").into_iter().filter(|path| !inner(path, folder));
        (*name, own.flat_map(|path| tests_of(&read(&path))).collect())
    });
    all.collect()
}

#[test]
fn every_complaint_has_one_row() {
    let mut rows: Vec<_> = rows().into_iter().map(|row| row.id).collect();
    rows.sort();
    let mut ids: Vec<_> =
        FAMILIES.iter().flat_map(|(family, count)| (1..=*count).map(move |n| format!("{family}-{n:02}"))).collect();
    ids.sort();
    let missing: Vec<_> = ids.iter().filter(|id| !rows.contains(id)).collect();
    assert!(missing.is_empty(), "{} has no row for {missing:?}", shown(&page()));
    assert_eq!(rows, ids, "a row comes twice, or its id is none");
}

#[test]
fn every_row_names_tests_that_exist() {
    let tests = tests_by_crate();
    for row in rows() {
        assert!(!row.symptom.is_empty(), "{} has no symptom", row.id);
        assert!(!row.held || !row.tests.is_empty(), "{} names no test: move it under \"No test yet\"", row.id);
        for (named, test) in row.tests {
            let of_crate = tests.get(named.as_str()).unwrap_or_else(|| panic!("{}: no crate `{named}`", row.id));
            assert!(of_crate.contains(&test), "{}: `{named}` has no test `{test}`", row.id);
        }
    }
}
