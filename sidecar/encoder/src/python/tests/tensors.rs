use std::fs;

use serde_json::json;
use tempfile::TempDir;

use super::super::tensors::{Files, read};

#[track_caller]
fn check(shape: serde_json::Value, bytes: usize, expect: Result<u32, &str>) {
    let folder = TempDir::new().expect("folder");
    let path = folder.path().join("1-0.rows");
    fs::write(&path, vec![0; bytes]).expect("written");
    match (read(&path, &shape), expect) {
        (Ok(embedding), Ok(rows)) => assert_eq!(embedding.rows, rows),
        (Err(error), Err(part)) => assert!(error.contains(part), "{error}"),
        (found, wanted) => panic!("{found:?}, wanted {wanted:?}"),
    }
}

#[test]
fn rows_are_taken_when_the_file_is_as_long_as_the_shape_says() {
    check(json!({"rows": 2, "width": 3, "dtype": "bfloat16", "grid_thw": [1, 2, 4]}), 12, Ok(2));
    check(json!({"rows": 2, "width": 3, "dtype": "torch.float32", "grid_thw": null}), 24, Ok(2));
    check(json!({"rows": 2, "width": 3, "dtype": "float32"}), 23, Err("23 bytes, wanted 24"));
    check(json!({"rows": 2, "width": 3, "dtype": "float64"}), 48, Err("dtype is float64"));
    check(json!({"rows": u32::MAX, "width": u32::MAX, "dtype": "float32"}), 4, Err("more than"));
    check(json!({"rows": -1, "width": 3, "dtype": "float32"}), 4, Err("result:"));
    check(json!("rows"), 4, Err("result:"));
}

#[test]
fn a_link_is_not_followed_and_files_go_with_the_batch() {
    let folder = TempDir::new().expect("folder");
    let [target, link] = ["target", "link"].map(|name| folder.path().join(name));
    fs::write(&target, [0; 4]).expect("written");
    std::os::unix::fs::symlink(&target, &link).expect("linked");
    assert!(read(&link, &json!({"rows": 1, "width": 1, "dtype": "float32"})).is_err());
    drop(Files { paths: vec![link.clone(), folder.path().join("never written")] });
    assert!(!link.exists() && target.exists());
}
