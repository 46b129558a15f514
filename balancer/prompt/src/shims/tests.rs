use super::float::repr;
use super::generation::rewrite;

#[test]
fn floats_are_written_as_python_writes_them() {
    for (value, text) in [
        (0.0, "0.0"),
        (-0.0, "-0.0"),
        (1.0, "1.0"),
        (0.1, "0.1"),
        (0.0001, "0.0001"),
        (0.00001, "1e-05"),
        (1.5e-7, "1.5e-07"),
        (123456789012345.6, "123456789012345.6"),
        (9999999999999998.0, "9999999999999998.0"),
        (1e16, "1e+16"),
        (1.5e300, "1.5e+300"),
        (f64::INFINITY, "inf"),
        (f64::NEG_INFINITY, "-inf"),
        (f64::NAN, "nan"),
    ] {
        assert_eq!(repr(value), text);
    }
}

#[test]
fn generation_tags_become_a_condition_that_holds() {
    for (source, rewritten) in [
        ("{% generation %}x{% endgeneration %}", "{% if true %}x{% endif %}"),
        ("{%- generation -%}x{%+endgeneration+%}", "{%- if true -%}x{%+ endif +%}"),
        ("{% if generation %}{% endif %}", "{% if generation %}{% endif %}"),
        ("{% unclosed", "{% unclosed"),
        ("plain {{ x }}", "plain {{ x }}"),
    ] {
        assert_eq!(rewrite(source), rewritten);
    }
}
