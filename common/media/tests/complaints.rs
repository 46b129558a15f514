//! Complaints about identities and sizes of images (docs/operate/complaints.md) that their bytes alone must answer.

use std::path::Path;

use fovea_media::data_url;
use fovea_media::family::{ModelFiles, VisionModel};
use fovea_media::header::{self, HeaderError};
use fovea_media::identity::{Options, Source, vllm_image_id, vllm_item_id};
use serde_json::{Value, json};

const MODEL: &str = "m";

fn vector(name: &str) -> Vec<u8> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/vllm").join(name);
    std::fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// Qwen3-VL with the pixel bounds of the published models.
fn qwen3_vl() -> VisionModel {
    let read = |name: &str| -> Value { serde_json::from_slice(&vector(name)).expect("json") };
    let mut preprocessor = read("tiny-qwen3-vl/preprocessor_config.json");
    preprocessor["size"] = json!({"shortest_edge": 65_536, "longest_edge": 16_777_216});
    let config = read("tiny-qwen3-vl/config.json");
    let files = ModelFiles { config: &config, preprocessor: Some(&preprocessor), processor: None, kwargs: None };
    VisionModel::from_files(&files, |_| None).expect("a known family")
}

/// The bit-by-bit CRC of PNG chunks.
fn crc(bytes: &[u8]) -> u32 {
    !bytes.iter().fold(u32::MAX, |sum, &byte| {
        (0..8).fold(sum ^ u32::from(byte), |sum, _| if sum & 1 == 1 { sum >> 1 ^ 0xedb8_8320 } else { sum >> 1 })
    })
}

/// The 33 bytes in front of an RGB PNG's data.
fn png_head(width: u32, height: u32, sound: bool) -> Vec<u8> {
    let mut header = b"IHDR".to_vec();
    header.extend_from_slice(&width.to_be_bytes());
    header.extend_from_slice(&height.to_be_bytes());
    header.extend_from_slice(&[8, 2, 0, 0, 0]);
    let sum = crc(&header) ^ u32::from(!sound);
    [b"\x89PNG\r\n\x1a\n\0\0\0\x0d".as_slice(), &header, &sum.to_be_bytes()].concat()
}

/// IDN-04: one file under other spellings of its data URL.
#[test]
fn spellings_of_a_data_url_do_not_change_the_image() {
    let bytes = vector("images/a_96x64.png");
    let url = data_url::encode(&bytes);
    let (_, data) = url.split_once(',').expect("a data URL");
    for head in ["data:image/png;base64", "data:image/PNG;base64", "DATA:image/png;name=a.png;base64", "data:;base64"] {
        let decoded = data_url::decode(&format!("{head},{data}")).expect("base64");
        assert_eq!(vllm_image_id(&decoded, false, MODEL), vllm_image_id(&bytes, false, MODEL), "{head}");
    }
}

/// IDN-06: 30×150 and 150×30 raw pixels with the same bytes.
#[test]
fn equal_pixel_bytes_of_other_sides_are_other_images() {
    let pixels = vec![0x40; 30 * 150 * 3];
    let [tall, wide] = ["30 150", "150 30"].map(|sides| [format!("P6 {sides} 255\n").as_bytes(), &pixels].concat());
    let [one, other] = [&tall, &wide].map(|file| header::read(file).expect("a PPM"));
    assert_eq!(((one.width, one.height), (other.width, other.height)), ((30, 150), (150, 30)));
    assert_eq!(tall.len(), wide.len());
    assert_ne!(vllm_image_id(&tall, false, MODEL), vllm_image_id(&wide, false, MODEL));
}

/// IDN-13: the same image without options, and with options twice.
#[test]
fn options_make_an_image_of_their_own_that_meets_itself() {
    let bytes = vector("images/a_96x64.png");
    let options = json!({"max_pixels": 200_000});
    let other = json!({"max_pixels": 300_000});
    let id = |options: Option<&Value>| {
        let options = Options { mm_processor: options.and_then(Value::as_object), media_io: None };
        vllm_item_id(Source::File { bytes: &bytes, converted: false }, options, MODEL)
    };
    assert_eq!(id(Some(&options)), id(Some(&options.clone())));
    assert_ne!(id(Some(&options)), id(None));
    assert_ne!(id(Some(&options)), id(Some(&other)));
    assert_eq!(id(Some(&json!({}))), id(None), "no option is none");
}

/// TOK-03: 1280×720 is 40 × 22 merged patches.
#[test]
fn a_720p_frame_has_880_tokens_on_qwen3_vl() {
    assert_eq!(qwen3_vl().image_tokens(1280, 720).expect("a size that is taken"), 880);
}

/// TOK-04: sides in a ratio of 199, 200 and 201.
#[test]
fn a_ratio_that_the_processor_refuses_is_refused_and_not_counted() {
    let model = qwen3_vl();
    for (ratio, taken) in [(199, true), (200, true), (201, false), (250, false)] {
        assert_eq!(model.image_tokens(32 * ratio, 32).is_ok(), taken, "{ratio}");
        assert_eq!(model.image_tokens(32, 32 * ratio).is_ok(), taken, "1/{ratio}");
    }
}

/// TOK-08, MED-05: headers of 33 bytes that claim giant images, with right and wrong checksums.
#[test]
fn a_short_header_with_giant_sides_is_refused_before_anything_is_sized_by_it() {
    for side in [60_000, 65_535, 1_000_000, u32::MAX >> 1] {
        let sound = header::read(&png_head(side, side, true));
        assert_eq!(sound, Err(HeaderError::TooManyPixels { width: side, height: side }));
        header::read(&png_head(side, side, false)).expect_err("a wrong checksum does not make it small");
    }
    let small = header::read(&png_head(640, 360, true));
    assert!(small.is_err() || small.is_ok_and(|header| header.width == 640), "the head alone is well formed");
}
