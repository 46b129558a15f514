//! Who may depend on whom. A new arrow is a new line here, with its reason in docs/decisions.

mod common;

use std::collections::BTreeMap;

use common::{files, read, root, shown};

/// Crate → what of ours it may import (tests/engine-sim as a dev-dependency is open to the programs).
const ARROWS: &[(&str, &[&str])] = &[
    ("fovea-kv", &[]),
    ("fovea-openai", &[]),
    ("fovea-service", &[]),
    ("fovea-prompt", &[]),
    ("fovea-media", &["fovea-kv"]),
    ("fovea-gossip", &["fovea-kv"]),
    ("fovea-sidecar-core", &["fovea-kv", "fovea-gossip"]),
    ("fovea-balancer-core", &["fovea-kv"]),
    ("fovea-pixels", &["fovea-media"]),
    ("fovea-encoder", &["fovea-kv", "fovea-media"]),
    (
        "fovea-sidecar",
        &[
            "fovea-kv",
            "fovea-media",
            "fovea-openai",
            "fovea-gossip",
            "fovea-service",
            "fovea-sidecar-core",
            "fovea-encoder",
        ],
    ),
    (
        "fovea-balancer",
        &[
            "fovea-kv",
            "fovea-media",
            "fovea-openai",
            "fovea-gossip",
            "fovea-service",
            "fovea-balancer-core",
            "fovea-prompt",
        ],
    ),
    ("engine-sim", &[]),
    ("tidy", &[]),
    ("bench", &["e2e", "fovea-kv", "fovea-sidecar-core", "fovea-encoder", "fovea-balancer-core"]),
    ("peers", &["fovea-kv", "fovea-balancer-core"]),
    ("fleet", &["fovea-kv", "fovea-gossip", "fovea-sidecar-core", "fovea-balancer-core"]),
    ("e2e", &["fovea-kv", "fovea-gossip", "fovea-sidecar-core"]),
    ("fuzz", &["fovea-kv", "fovea-media", "fovea-openai", "fovea-gossip", "fovea-prompt"]),
];

/// Outside crate → the crates of ours that may use it.
const FENCED: &[(&str, &[&str])] = &[
    ("pingora-core", &["fovea-balancer"]),
    ("pingora-http", &["fovea-balancer"]),
    ("tokenizers", &["fovea-prompt", "engine-sim"]),
    ("fastokens", &["fovea-prompt"]),
    ("minijinja", &["fovea-prompt", "engine-sim"]),
    ("minijinja-contrib", &["fovea-prompt", "engine-sim"]),
    ("zeromq", &["fovea-sidecar", "fovea-encoder", "engine-sim"]),
    ("serde-saphyr", &["fovea-service"]),
    ("kube", &["fovea-sidecar"]),
    ("k8s-openapi", &["fovea-sidecar"]),
    ("rustls-webpki", &["fovea-service"]),
];

fn manifests() -> BTreeMap<String, (Vec<String>, Vec<String>)> {
    let mut found = BTreeMap::new();
    for path in files(&root(), "toml") {
        if path.file_name().is_none_or(|name| name != "Cargo.toml") {
            continue;
        }
        let manifest: toml::Table = read(&path).parse().unwrap_or_else(|error| panic!("{}: {error}", shown(&path)));
        let Some(name) = manifest.get("package").and_then(|p| p.get("name")).and_then(|n| n.as_str()) else { continue };
        let names = |section: &str| -> Vec<String> {
            manifest.get(section).and_then(|s| s.as_table()).map(|s| s.keys().cloned().collect()).unwrap_or_default()
        };
        found.insert(name.to_owned(), (names("dependencies"), names("dev-dependencies")));
    }
    found
}

#[test]
fn crates_import_only_along_the_arrows() {
    let manifests = manifests();
    let ours: Vec<&str> = ARROWS.iter().map(|(name, _)| *name).collect();
    for (name, (normal, dev)) in &manifests {
        let allowed = ARROWS.iter().find(|(crate_name, _)| crate_name == name);
        let (_, allowed) = allowed.unwrap_or_else(|| panic!("{name} has no line in ARROWS"));
        for dependency in normal.iter().filter(|d| ours.contains(&d.as_str())) {
            assert!(allowed.contains(&dependency.as_str()), "{name} must not depend on {dependency}");
        }
        for dependency in dev.iter().filter(|d| ours.contains(&d.as_str())) {
            let program_test = matches!(name.as_str(), "fovea-sidecar" | "fovea-balancer" | "e2e");
            let simulated = dependency == "engine-sim" && program_test;
            assert!(simulated || allowed.contains(&dependency.as_str()), "{name} must not test with {dependency}");
        }
    }
}

#[test]
fn fenced_crates_stay_behind_their_fence() {
    for (name, (normal, dev)) in manifests() {
        for dependency in normal.iter().chain(&dev) {
            if let Some((_, allowed)) = FENCED.iter().find(|(fenced, _)| fenced == dependency) {
                assert!(allowed.contains(&name.as_str()), "{name} must not use {dependency}");
            }
        }
    }
}

#[test]
fn pingora_is_known_to_the_front_and_the_app_alone() {
    let source = root().join("balancer/src");
    for path in files(&source, "rs") {
        let inside = path.strip_prefix(&source).expect("under the source folder");
        if inside.starts_with("front") || inside == std::path::Path::new("app.rs") {
            continue;
        }
        assert!(!read(&path).contains("pingora"), "{} must not know pingora", shown(&path));
    }
}
