use minijinja::syntax::SyntaxConfig;

use super::ContentFormat::{self, OpenAi, String};

#[track_caller]
fn check(template: &str, expect: ContentFormat) {
    assert_eq!(ContentFormat::detect(template, &SyntaxConfig::default()), expect, "{template}");
}

fn in_loop(body: &str) -> std::string::String {
    format!("{{% for m in messages %}}{body}{{% endfor %}}")
}

#[test]
fn a_loop_over_the_content_of_a_message_means_parts() {
    check(&in_loop("{% for p in m.content %}x{% endfor %}"), OpenAi);
    check(&in_loop("{% for p in m['content'] %}x{% endfor %}"), OpenAi);
    check(&in_loop("{% for p in m['content'] | selectattr('type') %}x{% endfor %}"), OpenAi);
    check(
        &in_loop("{% if m.content is string %}{% else %}{% for p in m.content[1:] %}x{% endfor %}{% endif %}"),
        OpenAi,
    );
    check("{% for p in content %}x{% endfor %}", OpenAi);
}

#[test]
fn anything_else_means_text() {
    check(&in_loop("{{ m.content }}"), String);
    check(&in_loop("{% for c in m.tool_calls %}x{% endfor %}"), String);
    check(&in_loop("{% set c = m.content %}{% for p in c %}x{% endfor %}"), String);
    check("{% for p in content | list %}x{% endfor %}", String);
    check("{% for m in history %}{% for p in m.content %}x{% endfor %}{% endfor %}", String);
    check("{% this does not parse", String);
    check("", String);
}

#[test]
fn copies_of_the_messages_are_followed() {
    let over = |name: &str| format!("{{% for m in {name} %}}{{% for p in m.content %}}x{{% endfor %}}{{% endfor %}}");
    check(&format!("{{% set a = messages[1:] %}}{{% set b = a | list %}}{}", over("b")), OpenAi);
    check(&format!("{{% set b = a %}}{{% set a = messages %}}{}", over("b[::-1]")), OpenAi);
    check(&format!("{{% set ns = namespace(all=messages) %}}{}", over("ns.all")), OpenAi);
    check(&format!("{{% set ns = namespace(all=[]) %}}{{% set ns.all = messages %}}{}", over("ns.all")), OpenAi);
    check(&format!("{{% set a = a %}}{}", over("a")), String);
    check(&format!("{{% set a = messages[0] %}}{}", over("a")), String);
}

#[test]
fn macro_parameters_count_where_a_call_binds_them_to_content() {
    let declared = "{% macro show(skip, body) %}{% for p in body %}x{% endfor %}{% endmacro %}";
    check(&format!("{declared}{}", in_loop("{{ show(1, m.content) }}")), OpenAi);
    check(&format!("{declared}{}", in_loop("{{ show(1, body=m['content'] | list) ~ 'x' }}")), OpenAi);
    check(&format!("{declared}{}", in_loop("{{ show(m.content, 1) }}")), String);
    check(&format!("{declared}{}", in_loop("{{ show(1, m.role) }}")), String);
    check("{% macro show(content) %}{% for p in content %}x{% endfor %}{% endmacro %}{{ show('a') }}", String);
}
