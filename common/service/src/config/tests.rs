use std::io::Write;
use std::time::Duration;

use serde::Deserialize;

use super::*;

#[derive(Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Sample {
    #[serde(with = "human_duration")]
    stale_after: Duration,
    body_max: ByteSize,
    nested: Nested,
}

#[derive(Debug, Default, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
struct Nested {
    port: u16,
}

impl Default for Sample {
    fn default() -> Self {
        Self { stale_after: Duration::from_secs(1), body_max: ByteSize::mib(64), nested: Nested::default() }
    }
}

impl Validate for Sample {
    fn validate(&self) -> Result<(), Invalid> {
        if self.stale_after.is_zero() {
            return Err(Invalid::new("stale_after", "is 0", "write a time such as `1s`"));
        }
        Ok(())
    }
}

#[track_caller]
fn check(text: &str, parts: &[&str]) {
    let error = parse::<Sample>(text, "x.yaml").unwrap_err().to_string();
    for part in parts {
        assert!(error.contains(part), "{part:?} is not in: {error}");
    }
}

#[test]
fn values_carry_their_units() {
    let sample: Sample = parse("stale_after: 250ms\nbody_max: 2KiB\nnested: {port: 7}\n", "x.yaml").unwrap();
    let expected =
        Sample { stale_after: Duration::from_millis(250), body_max: ByteSize(2048), nested: Nested { port: 7 } };
    assert_eq!(sample, expected);
}

#[test]
fn an_empty_file_gives_the_defaults() {
    for text in ["", "\n", "# nothing\n  # more\n", "{}"] {
        assert_eq!(parse::<Sample>(text, "x.yaml").unwrap(), Sample::default());
    }
}

#[test]
fn an_unknown_key_is_named_with_line_and_column() {
    check("body_max: 1MiB\nnested:\n  prot: 7\n", &["x.yaml:3:3", "prot"]);
}

#[test]
fn a_wrong_type_is_named_with_line() {
    check("nested:\n  port: many\n", &["x.yaml:2:9"]);
}

#[test]
fn a_duration_without_unit_is_told_how_to_write_it() {
    check("stale_after: 5\n", &["x.yaml:1:", "250ms"]);
}

#[test]
fn broken_yaml_has_a_place() {
    check("nested:\n  port: [1,\n}\n", &["x.yaml:"]);
}

#[test]
fn a_value_that_cannot_work_is_named_with_its_remedy() {
    check("stale_after: 0s\n", &["stale_after: is 0; write a time such as `1s`"]);
    assert_eq!(Invalid::new("b", "", "").within("a").field, "a.b");
}

#[test]
fn a_file_is_read_and_an_absent_one_named() {
    let path = std::env::temp_dir().join(format!("fovea-config-{}.yaml", std::process::id()));
    File::create(&path).unwrap().write_all(b"nested: {port: 9}").unwrap();
    assert_eq!(load::<Sample>(&path).unwrap().nested.port, 9);
    std::fs::remove_file(&path).unwrap();
    assert!(load::<Sample>(&path).unwrap_err().to_string().contains("cannot read"));
}

#[test]
fn the_key_file_wins_and_is_trimmed() {
    let dir = std::env::temp_dir().join(format!("fovea-key-{}", std::process::id()));
    std::fs::write(&dir, " secret\n").unwrap();
    let read = |file: Option<&Path>| read_key("trust.shared_key_file", "other", file);
    assert_eq!(read(Some(&dir)).unwrap().as_deref(), Some(&b"secret"[..]));
    assert_eq!(read(None).unwrap().as_deref(), Some(&b"other"[..]));
    assert_eq!(read_key("k", "", None).unwrap(), None);
    std::fs::write(&dir, "\n").unwrap();
    assert!(matches!(read(Some(&dir)), Err(KeyError::Empty { .. })));
    std::fs::remove_file(&dir).unwrap();
    assert!(matches!(read(Some(&dir)), Err(KeyError::Read { .. })));
}
