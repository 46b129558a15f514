use std::path::PathBuf;

use proptest::prelude::*;
use serde_json::Value;

use super::*;

mod modes;
mod turns;

fn images() -> PathBuf {
    concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/images").into()
}

fn rows() -> Vec<Value> {
    serde_json::from_slice(&std::fs::read(images().join("expected.json")).unwrap()).unwrap()
}

fn file(row: &Value) -> Vec<u8> {
    std::fs::read(images().join(row["file"].as_str().unwrap())).unwrap()
}

fn pair(width: &Value, height: &Value) -> (u64, u64) {
    (width.as_u64().unwrap(), height.as_u64().unwrap())
}

#[test]
fn every_file_that_vllm_accepts_has_its_size() {
    for row in rows().iter().filter(|row| row["vllm"]["accepted"] == true) {
        let header = read(&file(row)).unwrap_or_else(|error| panic!("{row}: {error}"));
        let (width, height) = header.upright();
        let vllm = &row["vllm"];
        assert_eq!((width.into(), height.into()), pair(&vllm["width"], &vllm["height"]), "{row}");
        let stored = (header.width.into(), header.height.into());
        assert_eq!(stored, pair(&row["stored"][0], &row["stored"][1]), "{row}");
    }
}

#[test]
fn a_refused_file_has_no_size_or_its_own() {
    for row in rows().iter().filter(|row| row["vllm"]["accepted"] == false) {
        if let Ok(header) = read(&file(row)) {
            let stored = (header.width.into(), header.height.into());
            assert_eq!(stored, pair(&row["stored"][0], &row["stored"][1]), "{row}");
        }
    }
}

#[test]
fn bytes_that_no_engine_reads_are_told_from_those_not_known_here() {
    let refused = |bytes: &[u8]| read(bytes).unwrap_err().engine_refuses();
    for row in rows() {
        if read(&file(&row)).is_err_and(|error| error.engine_refuses()) {
            assert_eq!((&row["vllm"]["accepted"], &row["stored"]), (&Value::Bool(false), &Value::Null), "{row}");
        }
    }
    for file in ["bad_crc.png", "empty.bin", "x.svg", "x.heic", "truncated_header.jpg"] {
        assert!(refused(&std::fs::read(images().join(file)).unwrap()), "{file}");
    }
    // 60000x60000 pixels under a wrong checksum: refused for what it is, not for its size.
    let mut bomb = b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR\0\0\xea\x60\0\0\xea\x60\x08\x02\0\0\0".to_vec();
    bomb.extend([1, 2, 3, 4]);
    let error = read(&bomb).unwrap_err();
    assert_eq!(error, HeaderError::NoImage { problem: "header checksum of a PNG" });
    assert!(error.engine_refuses());
    for unknown in [&b"\x00\x00\x00\x0cftypcrx "[..], b"icns\0\0", b"%!PS-Adobe", b"\x01\x02\x03\x04"] {
        assert!(!refused(unknown), "{unknown:?}");
    }
}

#[test]
fn a_bomb_of_text_is_refused_without_inflating_it() {
    let png = std::fs::read(images().join("rgb.png")).unwrap();
    let bomb = miniz_oxide::deflate::compress_to_vec_zlib(&vec![b'0'; 8 << 20], 9);
    let mut body = b"Raw profile type exif\0\0".to_vec();
    body.extend(bomb);
    let mut chunk = u32::try_from(body.len()).unwrap().to_be_bytes().to_vec();
    chunk.extend(b"zTXt");
    chunk.extend(body);
    chunk.extend([0; 4]);
    let file = [&png[..33], &chunk, &png[33..]].concat();
    assert_eq!(read(&file), Err(HeaderError::Invalid { format: Format::Png, field: "text size" }));
}

#[test]
fn huge_sizes_are_refused() {
    let mut gif = b"GIF89a\xff\xff\xff\xff\0\0\0,\0\0\0\0\x01\0\x01\0\0".to_vec();
    gif.extend([2, 0, b';']);
    assert_eq!(read(&gif), Err(HeaderError::TooManyPixels { width: 65535, height: 65535 }));
}

proptest! {
    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = read(&bytes);
    }

    #[test]
    fn random_bytes_after_a_magic_never_panic(which in 0..MAGICS.len(), tail in proptest::collection::vec(any::<u8>(), 0..400)) {
        let _ = read(&[MAGICS[which], &tail].concat());
    }

    #[test]
    fn damaged_files_never_panic(
        which in any::<prop::sample::Index>(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..8),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let files = samples();
        let mut bytes = files[which.index(files.len())].clone();
        // Most changes hit the first bytes, where headers are.
        for (at, value) in changes {
            let reach = if value & 1 == 0 { bytes.len() } else { bytes.len().min(200) };
            if reach > 0 {
                let at = at.index(reach);
                bytes[at] = value;
            }
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len() + 1));
        }
        let _ = read(&bytes);
    }
}

const MAGICS: [&[u8]; 16] = [
    b"\xff\xd8\xff",
    b"\x89PNG\r\n\x1a\n\0\0\0\x0dIHDR",
    b"RIFF\0\0\0\0WEBPVP8X\x0a\0\0\0",
    b"GIF89a",
    b"BM",
    b"\x28\0\0\0",
    b"II\x2a\0\x08\0\0\0",
    b"II\x2b\0\x08\0\0\0\x10\0\0\0\0\0\0\0",
    b"\0\0\0\x08ftypavif",
    b"\0\0\0\x0cftypavif\0\0\0\0\0\0\0\x90meta\0\0\0\0",
    jp2::BOX_MAGIC,
    jp2::STREAM_MAGIC,
    b"P6 ",
    b"DDS \x7c\0\0\0",
    ico::MAGIC,
    b"\0\0\x02",
];

fn samples() -> &'static [Vec<u8>] {
    static SAMPLES: std::sync::OnceLock<Vec<Vec<u8>>> = std::sync::OnceLock::new();
    SAMPLES.get_or_init(|| rows().iter().map(file).filter(|bytes| bytes.len() < 20_000).collect())
}
