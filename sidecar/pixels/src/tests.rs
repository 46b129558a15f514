//! Pixels against those of the engines' own processors (`tests/vectors/encoder`).

use std::path::{Path, PathBuf};

use crate::decode::{DecodeError, Limits, Options, decode};
use crate::processor::Processor;
use crate::resize::resize;
use fovea_media::family::{ModelFiles, PatchRule, Refused, VisionModel};
use proptest::prelude::*;
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors")
}

fn read_json(path: PathBuf) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

fn processor(shortest: &Value, longest: &Value) -> Processor {
    let config = json!({"model_type": "qwen3_vl"});
    let file = json!({"size": {"shortest_edge": shortest, "longest_edge": longest}, "patch_size": 16, "merge_size": 2,
        "temporal_patch_size": 2, "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]});
    let files = ModelFiles { config: &config, preprocessor: Some(&file), processor: None, kwargs: None };
    Processor::from_files(&files).unwrap()
}

/// Elements of a little-endian f32 `.npy`.
fn npy(path: PathBuf) -> Vec<f32> {
    let bytes = std::fs::read(path).unwrap();
    let head = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
    bytes[head..].as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes)).collect()
}

#[test]
fn every_resize_is_that_of_torch_to_the_bit() {
    let folder = root().join("encoder/resize");
    let cases = read_json(folder.join("cases.json"));
    for case in cases["cases"].as_array().unwrap() {
        let name = case["name"].as_str().unwrap();
        let file = std::fs::read(folder.join(format!("{name}.in.png"))).unwrap();
        let image = decode(&file, &Limits::default(), &Options::default()).unwrap();
        assert_eq!(hex(image.data()), case["in_sha256"], "{name}: decoded");
        let processor = processor(&case["shortest"], &case["longest"]);
        let plan = processor.plan(image.width(), image.height()).unwrap();
        let planned = json!([plan.width, plan.height, plan.grid_thw, plan.tokens]);
        assert_eq!(planned, json!([case["out_w"], case["out_h"], case["grid_thw"], case["tokens"]]), "{name}: planned");
        let resized = resize(&image, plan.width, plan.height).unwrap();
        assert_eq!(hex(resized.data()), case["out_sha256"], "{name}: resized");
        if case["pixels"] == true {
            let patches = processor.process(&image).unwrap();
            let wanted = npy(folder.join(format!("{name}.pixel_values.npy")));
            assert_eq!((patches.values.len(), patches.row_length), (wanted.len(), 1536), "{name}");
            let worst = patches.values.iter().zip(&wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            assert!(worst <= 1e-6, "{name}: {worst}");
        }
    }
}

/// What is wrong with the pixels of one file; empty when nothing is.
fn differs(row: &Value) -> String {
    let name = row["file"].as_str().unwrap();
    let file = std::fs::read(root().join("images").join(name)).unwrap();
    let image = match decode(&file, &Limits::default(), &Options::default()) {
        Ok(image) if UNREAD.contains(&name) => return format!("read as {}x{}", image.width(), image.height()),
        Ok(image) => image,
        Err(_) if UNREAD.contains(&name) => return String::new(),
        Err(error) => return format!("{error:?}"),
    };
    if json!([image.width(), image.height()]) != json!([row["width"], row["height"]]) {
        return format!("is {}x{}", image.width(), image.height());
    }
    if row["format"] != "JPEG" && row["format"] != "MPO" {
        return if hex(image.data()) == row["sha256"] { String::new() } else { "other pixels".to_owned() };
    }
    let pixels = image.data().as_chunks::<3>().0;
    let (width, last) = (image.width() as usize, pixels.len() - 1);
    for channel in 0..3 {
        let sum: u64 = pixels.iter().map(|pixel| u64::from(pixel[channel])).sum();
        let off = sum as f64 / pixels.len() as f64 - row["mean"][channel].as_f64().unwrap();
        // Corners tell a wrong turn.
        let corners = [0, width - 1, last + 1 - width, last]
            .into_iter()
            .enumerate()
            .map(|(corner, at)| f64::from(pixels[at][channel]) - row["corners"][corner][channel].as_f64().unwrap());
        let worst = corners.map(f64::abs).fold(0.0, f64::max);
        if off.abs() > 1.0 || worst > 12.0 {
            return format!("mean {off:.2} off, a corner {worst} off");
        }
    }
    String::new()
}

#[test]
fn pixels_are_those_that_vllm_loads() {
    let rows = read_json(root().join("encoder/decode.json"));
    let wrong = rows.as_array().unwrap().iter().map(|row| (&row["file"], differs(row)));
    let wrong: Vec<_> = wrong.filter(|(_, what)| !what.is_empty()).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
}

/// Read by Pillow, refused here.
const UNREAD: &[&str] =
    &["cmyk.jpg", "small_frame.gif", "x.avif", "exif6.avif", "x.ico", "x.jp2", "x.ppm", "x.tga", "x.dds"];

#[test]
fn limits_hold_before_anything_is_decoded() {
    let file = std::fs::read(root().join("images/rgb.png")).unwrap();
    let small = Limits { bytes_max: file.len() - 1, ..Limits::default() };
    let error = decode(&file, &small, &Options::default()).unwrap_err();
    assert!(matches!(error, DecodeError::TooManyBytes { .. }) && error.too_large());
    let few = Limits { pixels_max: 10, ..Limits::default() };
    assert!(matches!(decode(&file, &few, &Options::default()), Err(DecodeError::TooManyPixels { .. })));
    // A header that promises more pixels than the file has bytes.
    let mut bomb = file.clone();
    bomb[16..24].copy_from_slice(&[0, 1, 0x86, 0xa0, 0, 1, 0x86, 0xa0]);
    assert!(decode(&bomb, &Limits::default(), &Options::default()).is_err());
}

#[test]
fn orientation_is_left_alone_when_the_engine_leaves_it() {
    let file = std::fs::read(root().join("images/exif6.jpg")).unwrap();
    let stored = decode(&file, &Limits::default(), &Options { upright: false, ..Options::default() }).unwrap();
    let upright = decode(&file, &Limits::default(), &Options::default()).unwrap();
    assert_eq!((stored.width(), stored.height()), (upright.height(), upright.width()));
    assert_ne!(stored.width(), stored.height());
}

/// `smart_resize` of transformers 5.19, written from its definition: (rows, columns) of tokens.
fn smart_resize(height: u32, width: u32, factor: f64, min: f64, max: f64) -> Option<(u32, u32)> {
    let (h, w) = (f64::from(height), f64::from(width));
    if h.max(w) / h.min(w) > 200.0 {
        return None;
    }
    let (mut rows, mut columns) = ((h / factor).round_ties_even() * factor, (w / factor).round_ties_even() * factor);
    if rows * columns > max {
        let beta = (h * w / max).sqrt();
        rows = ((h / beta / factor).floor() * factor).max(factor);
        columns = ((w / beta / factor).floor() * factor).max(factor);
    } else if rows * columns < min {
        let beta = (min / (h * w)).sqrt();
        rows = (h * beta / factor).ceil() * factor;
        columns = (w * beta / factor).ceil() * factor;
    }
    Some(((rows / factor) as u32, (columns / factor) as u32))
}

fn side() -> impl Strategy<Value = u32> {
    prop_oneof![1_u32..64, 1_u32..3000, 1_u32..20_000]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(10_000))]

    #[test]
    fn tokens_are_those_that_the_balancer_counts(width in side(), height in side()) {
        let config = json!({"model_type": "qwen3_vl", "image_token_id": 7});
        let file = json!({"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16, "merge_size": 2});
        let files = ModelFiles { config: &config, preprocessor: Some(&file), processor: None, kwargs: None };
        let rule = PatchRule::from_files(&files).unwrap();
        let balancer = VisionModel::from_files(&files, |_| Some(vec![7])).unwrap();
        let cells = rule.cells(width, height);
        prop_assert_eq!(cells.map(|(columns, rows)| columns * rows), balancer.image_tokens(width, height));
        let wanted = smart_resize(height, width, 32.0, 65_536.0, 16_777_216.0);
        match cells {
            Ok((columns, rows)) => prop_assert_eq!(Some((rows, columns)), wanted),
            Err(error) => {
                let refused = matches!(error, Refused::AspectRatio { .. });
                prop_assert!(refused && wanted.is_none());
            }
        }
    }

    #[test]
    fn no_bytes_make_the_decoder_panic(at in 0_usize..2000, with in 0_u8.., cut in 0_usize..2000, name in 0_usize..5) {
        let name = ["palette.png", "one.gif", "rgb.bmp", "raw.tiff", "exif6.jpg"][name];
        let mut file = std::fs::read(root().join("images").join(name)).unwrap();
        let length = file.len();
        file[at % length] = with;
        file.truncate(length - cut % length / 2);
        let _ = decode(&file, &Limits { pixels_max: 1_000_000, ..Limits::default() }, &Options::default());
    }
}
