use fovea_kv::MediaId;
use fovea_media::family::ModelFiles;
use serde_json::json;

use super::*;
use crate::tensor::{Expect, check};

fn config(rows: Rows, dtype: DType) -> PassThroughConfig {
    PassThroughConfig { width: 24, dtype, rows, seed: 1, max_batch_cost: None, faults: FaultSwitch::default() }
}

fn grid_rule() -> PatchRule {
    let config = json!({"model_type": "qwen3_vl", "vision_config": {"patch_size": 16, "spatial_merge_size": 2}});
    let preprocessor = json!({"size": {"shortest_edge": 65536, "longest_edge": 16777216}});
    let files = ModelFiles { config: &config, preprocessor: Some(&preprocessor), processor: None, kwargs: None };
    PatchRule::from_files(&files).expect("a rule")
}

/// A PPM header and as many pixels as it says.
pub(crate) fn picture(width: u32, height: u32) -> Bytes {
    let mut bytes = format!("P6 {width} {height} 255\n").into_bytes();
    bytes.resize(bytes.len() + (width * height * 3) as usize, 7);
    bytes.into()
}

fn encode(config: PassThroughConfig, bytes: Bytes) -> Result<Embedding, ItemError> {
    let mut built = PassThrough::build(config).expect("built");
    let raw = RawImage { bytes, mime: None, id: MediaId([0; 32]), index: 0 };
    let item = built.preprocess.preprocess(raw)?;
    assert_eq!(item.cost, item.item.rows);
    built.encoder.forward_batch(&[item.item], None).expect("a batch").remove(0)
}

#[test]
fn rows_follow_the_grid_and_every_type_is_finite() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        let embedding = encode(config(Rows::Grid(grid_rule()), dtype), picture(320, 256)).expect("embedded");
        // 320x256 → 20x16 patches → 80 rows: what vLLM 0.32 counts for it.
        assert_eq!((embedding.rows, embedding.grid_thw), (80, Some([1, 16, 20])));
        let expect = Expect { width: 24, rows: Some(80), merge: Some(2), dtype: Some(dtype) };
        check(embedding, &expect).expect("an engine survives it");
    }
}

#[test]
fn equal_bytes_give_equal_rows_and_other_bytes_others() {
    let rows = |bytes| encode(config(Rows::Fixed(3), DType::Bf16), bytes).expect("embedded").data;
    assert_eq!(rows(picture(2, 2)), rows(picture(2, 2)));
    assert_ne!(rows(picture(2, 2)), rows(picture(2, 3)));
}

#[test]
fn no_image_is_the_clients_fault() {
    let error =
        encode(config(Rows::Grid(grid_rule()), DType::F32), Bytes::from_static(b"<html>")).expect_err("no image");
    assert!(matches!(error, ItemError::Invalid(_)), "{error:?}");
}

#[test]
fn another_seed_is_another_encoder() {
    let built = |seed| PassThrough::build(PassThroughConfig { seed, ..config(Rows::Fixed(1), DType::F32) });
    let fingerprint = |seed| built(seed).map(|built| built.spec.fingerprint).expect("built");
    assert_ne!(fingerprint(1), fingerprint(2));
}
