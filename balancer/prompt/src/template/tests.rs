use jiff::civil::date;
use minijinja::value::{Serde, Value};
use serde_json::Value as Json;

use super::{ContentFormat, Template};
use crate::shims;

const MICRO: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/templates/micro_templates.json");

/// Cases in which minijinja is known to differ; no published template uses what they use.
const KNOWN_DIFFERENCES: [&str; 7] =
    ["global_missing", "pprint", "str_methods", "strip_unicode", "urlize", "xmlattr", "attr_items_conflict"];

/// Renders with variables given as they are, as the vectors do.
fn render(template: &str, context: &Json) -> Result<String, String> {
    let template = Template::compile(template.to_owned(), None).map_err(|error| error.to_string())?;
    let variables = context.as_object().expect("variables are an object").iter();
    let now = ("strftime_now".to_owned(), shims::strftime::function(date(2026, 11, 30).at(12, 0, 0, 0)));
    let variables = variables.map(|(key, value)| (key.clone(), Value::from(Serde(value)))).chain([now]);
    template.evaluate(Value::from_pairs(variables)).map_err(|error| error.to_string())
}

#[test]
fn one_feature_templates_render_as_transformers_renders_them() {
    let file: Json = serde_json::from_slice(&std::fs::read(MICRO).unwrap()).unwrap();
    let mut wrong = Vec::new();
    for case in file["cases"].as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let rendered = render(case["template"].as_str().unwrap(), &file["context"]);
        let right = match &case["expected"] {
            Json::Null => rendered.is_err(),
            expected => rendered.as_deref().ok() == expected.as_str(),
        };
        if right == KNOWN_DIFFERENCES.contains(&name) {
            wrong.push(format!("{name}: expected {}, rendered {rendered:?}", case["expected"]));
        }
    }
    assert!(wrong.is_empty(), "differences that are not known, or known ones that are gone:\n{}", wrong.join("\n"));
}

#[test]
fn a_template_that_never_ends_is_stopped() {
    let endless = "{% for a in range(100000) %}{% for b in range(100000) %}{{ b }}{% endfor %}{% endfor %}";
    assert!(render(endless, &serde_json::json!({})).unwrap_err().contains("limit"));
    let doubling =
        "{% set ns = namespace(x='0123456789') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}";
    assert!(render(doubling, &serde_json::json!({})).unwrap_err().contains("limit"));
    let deep = "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}";
    render(deep, &serde_json::json!({})).unwrap_err();
}

/// Published templates are third-party texts, so they stand outside of the repository: set `FOVEA_SHARED` to their folder.
#[test]
fn published_templates_render_as_transformers_renders_them() {
    let path =
        std::env::var_os("FOVEA_SHARED").map(|dir| std::path::Path::new(&dir).join("third-party/template_cases.json"));
    let Some(text) = path.and_then(|path| std::fs::read(path).ok()) else {
        println!("skipped: no third-party/template_cases.json under $FOVEA_SHARED");
        return;
    };
    let file: Json = serde_json::from_slice(&text).unwrap();
    for (template, format) in [("kimi_k25", ContentFormat::String), ("llama4", ContentFormat::OpenAi)] {
        let source = file["templates"][template].as_str().unwrap().to_owned();
        assert_eq!(Template::compile(source, None).unwrap().content_format(), format, "{template}");
    }
    let mut wrong = Vec::new();
    for case in file["cases"].as_array().unwrap() {
        let (template, context) = (case["template"].as_str().unwrap(), case["context"].as_str().unwrap());
        // Where transformers raises we may render: its own limits on inputs are no part of a prompt.
        let Some(expected) = case["expected"].as_str() else { continue };
        let rendered = render_continued(file["templates"][template].as_str().unwrap(), &file["contexts"][context]);
        if rendered.as_deref() != Ok(expected) {
            wrong.push(format!("{template} x {context}\n  expected {expected:?}\n  rendered {rendered:?}"));
        }
    }
    assert!(wrong.is_empty(), "{} differ:\n{}", wrong.len(), wrong.join("\n"));
}

/// As [`render`], with `_continue` in the variables standing for `continue_final_message`.
fn render_continued(template: &str, context: &Json) -> Result<String, String> {
    if context["_continue"] != true {
        return render(template, context);
    }
    let mut context = context.clone();
    let messages = context["messages"].take();
    let mut conversation: Vec<serde_json::Map<String, Json>> = serde_json::from_value(messages).unwrap();
    let continuation = super::Continuation::mark(&mut conversation).map_err(|error| error.to_string())?;
    context["messages"] = conversation.into_iter().map(Json::Object).collect();
    continuation.cut(&render(template, &context)?).map_err(|error| error.to_string())
}

#[test]
fn output_beyond_the_limit_is_refused() {
    use std::io::Write as _;
    let mut out = super::bounded::Writer::new(3);
    out.write_all(b"ab").unwrap();
    out.write_all(b"cd").unwrap_err();
    assert_eq!(out.into_text().unwrap(), "ab");
}
