use std::path::PathBuf;

use super::pickle::{Modality, Outcome, Part};
use super::*;
use crate::tensor::DType;

const SHAPE: [u32; 2] = [6, 8];
const PART: Part<'_> = Part { req_id: "req-1", num_parts: 1, part_idx: 0, modality: Modality::Image };

fn golden(name: &str) -> Vec<u8> {
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/vectors/encoder/formats");
    std::fs::read(folder.join(name)).unwrap()
}

/// The payload of all golden files: value[i] = i/4 − 5, exact in every type.
fn payload(dtype: DType) -> Vec<u8> {
    let values = (0..48).map(|i| i as f32 / 4.0 - 5.0);
    match dtype {
        DType::F32 => values.flat_map(f32::to_le_bytes).collect(),
        DType::Bf16 => values.flat_map(|v| ((v.to_bits() >> 16) as u16).to_le_bytes()).collect(),
        // Exact: no rounding and no subnormal among these values.
        DType::F16 => values
            .flat_map(|v| {
                let (sign, exponent, fraction) =
                    (v.to_bits() >> 31, v.to_bits() >> 23 & 0xff, v.to_bits() >> 13 & 0x3ff);
                let exponent = if exponent == 0 { 0 } else { exponent - 112 };
                ((sign << 15 | exponent << 10 | fraction) as u16).to_le_bytes()
            })
            .collect(),
    }
}

fn whole(head: Vec<u8>, data: &[u8], tail: &[u8]) -> Vec<u8> {
    [&head, data, tail].concat()
}

#[test]
fn torch_archives_are_those_that_torch_loads() {
    for (dtype, name) in [(DType::Bf16, "bf16"), (DType::F16, "f16"), (DType::F32, "f32")] {
        let data = payload(dtype);
        let torch::Archive { head, tail } = torch::archive(SHAPE, dtype, &data).unwrap();
        assert_eq!(whole(head, &data, &tail), golden(&format!("embeds_6x8_{name}.pt")), "{name}");
    }
    assert_eq!(payload(DType::Bf16), golden("embeds_6x8_bf16.raw"));
    assert_eq!(torch::int64(&[1, 4, 6]).unwrap(), golden("grid_thw.pt"));
}

#[test]
fn npy_is_that_of_numpy_and_knows_no_bf16() {
    let head = npy::head(SHAPE, DType::F16).unwrap();
    assert_eq!(whole(head, &payload(DType::F16), b""), golden("embeds_6x8_f16.npy"));
    assert_eq!(npy::head(SHAPE, DType::Bf16), Err(FormatError::NoBf16InNpy));
    assert_eq!(npy::head([u32::MAX; 2], DType::F32).unwrap().len() % 64, 0);
}

#[test]
fn the_ec_file_is_that_of_safetensors() {
    let head = safetensors::ec_head(SHAPE, DType::Bf16);
    assert_eq!(whole(head, &payload(DType::Bf16), b""), golden("encoder_cache.safetensors"));
}

#[test]
fn the_kwargs_item_is_what_vllm_decodes() {
    let item = msgpack::image_item(SHAPE, DType::Bf16, &payload(DType::Bf16), [1, 4, 6]).unwrap();
    assert_eq!(item, golden("mm_kwargs_item.msgpack"));
}

#[test]
fn the_pickles_are_what_sglang_takes() {
    let embedding = Outcome::Embedding { grid: &[[1, 4, 6]], shape: SHAPE, dtype: DType::Bf16 };
    assert_eq!(pickle::embedding_data(PART, embedding), golden("sglang_embedding_data.pkl"));
    let failed = Outcome::Failed { message: "bad image", code: 400 };
    assert_eq!(pickle::embedding_data(PART, failed), golden("sglang_embedding_error.pkl"));
}

#[test]
fn integers_take_the_shortest_opcode_that_holds_them() {
    let of = |value: u64| pickle::Pickle::new().integer(value).op(b'.').bytes()[2..].to_vec();
    assert_eq!(of(255), b"K\xff.");
    assert_eq!(of(256), b"M\x00\x01.");
    assert_eq!(of(0xffff), b"M\xff\xff.");
    assert_eq!(of(0x7fff_ffff), b"J\xff\xff\xff\x7f.");
    assert_eq!(of(1 << 31), b"\x8a\x09\0\0\0\x80\0\0\0\0\0.");
}

proptest::proptest! {
    #[test]
    fn base64_of_pieces_is_that_of_the_whole(pieces in proptest::collection::vec(proptest::collection::vec(0_u8.., 0..40), 0..8)) {
        let mut out = Vec::new();
        let mut encoder = base64::Encoder::new(&mut out);
        pieces.iter().for_each(|piece| encoder.push(piece));
        encoder.finish();
        let all = pieces.concat();
        proptest::prop_assert_eq!(out.len(), base64::encoded_length(all.len()));
        proptest::prop_assert_eq!(String::from_utf8(out).unwrap(), base64_simd::STANDARD.encode_to_string(&all));
    }
}
