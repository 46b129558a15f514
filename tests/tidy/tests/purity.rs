//! Pure crates: plain data in, decisions out. No clock, socket, file, environment, randomness, thread or log.

mod common;

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

#[test]
fn pure_crates_name_nothing_impure() {
    for crate_dir in PURE {
        for path in files(&root().join(crate_dir).join("src"), "rs") {
            if path.file_name().is_some_and(|name| name == "tests.rs")
                || path.iter().any(|part| part == "tests") && !path.starts_with(root().join("tests"))
            {
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
