//! Pure crates: plain data in, decisions out. No clock, socket, file, environment, randomness, thread or log.

mod common;

use std::collections::HashSet;
use std::path::PathBuf;

use common::{files, read, root, shown};

const PURE: &[&str] = &["common/kv", "common/media", "common/openai", "common/gossip", "sidecar/core", "balancer/core"];

const FORBIDDEN_WORDS: &[&str] = &[
    "std::net",
    "std::fs",
    "std::env",
    "std::process",
    "std::thread",
    "std::io::std",
    "Instant::now",
    "SystemTime",
    "tokio",
    "hyper::",
    "tracing::",
    "println!",
    "eprintln!",
    "rand::",
    "RandomState::new",
];

const FORBIDDEN_CRATES: &[&str] = &[
    "tokio",
    "tokio-util",
    "hyper",
    "hyper-util",
    "tower",
    "zeromq",
    "reqwest",
    "rand",
    "fastrand",
    "tracing",
    "pingora-core",
    "async-trait",
];

/// The part of a file that is not test code: everything before the first `#[cfg(test)]`.
fn shipped(text: &str) -> &str {
    text.split("#[cfg(test)]").next().unwrap_or_default()
}

/// Names of modules that are compiled for tests alone: `#[cfg(test)]` on the line before `mod name;`.
fn test_modules(sources: &[PathBuf]) -> HashSet<String> {
    let texts = sources.iter().map(|path| read(path));
    let names = texts.flat_map(|text| {
        let after =
            text.split("#[cfg(test)]\nmod ").skip(1).map(|rest| rest.split(';').next().unwrap_or_default().to_owned());
        after.collect::<Vec<_>>()
    });
    names.collect()
}

#[test]
fn pure_crates_name_nothing_impure() {
    for crate_dir in PURE {
        let sources = files(&root().join(crate_dir).join("src"), "rs");
        let tests = test_modules(&sources);
        for path in sources {
            let inside = path.strip_prefix(root().join(crate_dir)).unwrap_or(&path).with_extension("");
            if inside.iter().any(|part| tests.contains(part.to_string_lossy().as_ref())) {
                continue;
            }
            let text = read(&path);
            for line in shipped(&text).lines().filter(|line| !line.trim_start().starts_with("//")) {
                for word in FORBIDDEN_WORDS {
                    assert!(!line.contains(word), "{}: `{word}` in a pure crate: {line}", shown(&path));
                }
            }
        }
    }
}

#[test]
fn pure_crates_depend_on_nothing_impure() {
    for crate_dir in PURE {
        let path = root().join(crate_dir).join("Cargo.toml");
        let manifest: toml::Table = read(&path).parse().expect("a manifest");
        let dependencies = manifest.get("dependencies").and_then(|d| d.as_table()).cloned().unwrap_or_default();
        for name in FORBIDDEN_CRATES {
            assert!(!dependencies.contains_key(*name), "{} must not depend on {name}", shown(&path));
        }
    }
}
