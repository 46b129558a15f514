use proptest::prelude::*;

use super::Cursor;

/// Whether the cursor takes the text as one whole JSON value.
fn accepts(text: &str) -> bool {
    let mut cursor = Cursor::new(text);
    cursor.skip().and_then(|()| cursor.end()).is_ok()
}

#[track_caller]
fn check(text: &str, valid: bool) {
    assert_eq!(accepts(text), valid, "{text}");
}

#[test]
fn only_json_is_accepted() {
    for text in [
        "0",
        "-0",
        "10",
        "-1.5e+3",
        "1E-2",
        "[]",
        "{}",
        " [1 , {\"a\" : null}] ",
        r#""\u00e9\n\/""#,
        "true",
        "\"\u{7f}ü\"",
    ] {
        check(text, true);
    }
    for text in [
        "",
        "01",
        "-",
        "1.",
        ".5",
        "1e",
        "+1",
        "[1,]",
        "[,]",
        "{\"a\"}",
        "{\"a\":1,}",
        "{a:1}",
        "{1:2}",
        "nul",
        "tru",
        "NaN",
        "'a'",
    ] {
        check(text, false);
    }
    for text in [r#""\x""#, r#""\u12g4""#, r#""\u12"#, "\"a\nb\"", "\"abc", "[1", "{\"a\":", "1 2", "\u{feff}1", "[1}"]
    {
        check(text, false);
    }
}

#[test]
fn nesting_ends_at_a_limit() {
    let nested = |levels: usize| format!("{}{}", "[".repeat(levels), "]".repeat(levels));
    check(&nested(128), true);
    check(&nested(129), false);
    check(&"{\"a\":".repeat(100_000), false);
}

#[test]
fn depth_is_given_back_when_a_value_ends() {
    check(&format!("[{}0]", "[[]],".repeat(1000)), true);
}

#[test]
fn an_error_tells_line_and_column() {
    let error = Cursor::new("{\n \"a\": nope}").skip().unwrap_err();
    assert_eq!((error.offset, error.line, error.column), (8, 2, 7));
}

#[test]
fn long_strings_are_scanned_over_block_ends() {
    for len in [0, 1, 62, 63, 64, 65, 127, 128, 129, 1000] {
        let plain = "a".repeat(len);
        check(&format!("\"{plain}\""), true);
        check(&format!("\"{plain}\\\"b\""), true);
        check(&format!("\"{plain}\u{1}\""), false);
        let text = format!("\"{plain}\"");
        assert!(matches!(Cursor::new(&text).text().unwrap(), std::borrow::Cow::Borrowed(text) if text == plain));
    }
}

proptest! {
    #[test]
    fn the_cursor_and_serde_json_accept_the_same(text in r#"[\[\]{}:,"\\a-c0-2.eEu+\- tnl]{0,12}"#) {
        // A raw value is checked, and nothing is built: numbers out of range and lone surrogates pass on both sides.
        let serde = serde_json::from_str::<&serde_json::value::RawValue>(&text).is_ok();
        prop_assert_eq!(accepts(&text), serde, "{}", text);
    }

    #[test]
    fn any_text_is_read_without_panic(text in ".{0,40}") {
        accepts(&text);
    }
}
