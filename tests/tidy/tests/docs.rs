//! Every config field and every metric has its line in docs/operate.

mod common;

use common::{files, read, root, shown};
use syn::{Fields, Item};

/// Fields of every struct that is read from a config file (`derive(Deserialize)` in a `config.rs` or a `config/` folder).
fn config_fields(program: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for path in files(&root().join(program).join("src"), "rs") {
        let inside = path.strip_prefix(root().join(program).join("src")).expect("under src");
        if !(inside.starts_with("config") || inside == std::path::Path::new("config.rs")) {
            continue;
        }
        let file = syn::parse_file(&read(&path)).expect("source that compiles");
        for item in file.items {
            let Item::Struct(item) = item else { continue };
            let derives = item.attrs.iter().filter(|a| a.path().is_ident("derive"));
            let derived: Vec<String> = derives
                .filter_map(|a| {
                    a.parse_args_with(syn::punctuated::Punctuated::<syn::Path, syn::Token![,]>::parse_terminated).ok()
                })
                .flatten()
                .filter_map(|path| path.segments.last().map(|s| s.ident.to_string()))
                .collect();
            if let (true, Fields::Named(fields)) = (derived.iter().any(|d| d == "Deserialize"), &item.fields) {
                found.extend(fields.named.iter().filter_map(|f| Some((shown(&path), f.ident.as_ref()?.to_string()))));
            }
        }
    }
    assert!(!found.is_empty(), "{program} has no config field: the rule would hold for nothing");
    found
}

/// Names given to `register(…)`: `"name", "help"` on one call.
fn metric_names(program: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for path in files(&root().join(program).join("src"), "rs") {
        let text = read(&path);
        for part in text.split(".register").skip(1) {
            if let Some(name) = part.split('"').nth(1).filter(|name| {
                !name.is_empty() && name.chars().all(|c| c.is_ascii_lowercase() || c == '_' || c.is_ascii_digit())
            }) {
                found.push((shown(&path), name.to_owned()));
            }
        }
    }
    assert!(!found.is_empty(), "{program} has no metric: the rule would hold for nothing");
    found
}

#[test]
fn every_config_field_and_metric_is_documented() {
    for program in ["sidecar", "balancer"] {
        let page = read(&root().join(format!("docs/operate/{program}.md")));
        for (file, name) in config_fields(program).into_iter().chain(metric_names(program)) {
            assert!(page.contains(&name), "docs/operate/{program}.md says nothing of `{name}` ({file})");
        }
    }
}
