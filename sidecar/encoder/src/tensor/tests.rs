use super::*;

const EXPECT: Expect = Expect { width: 8, rows: Some(6), merge: Some(2), dtype: None };

/// Six rows of eight columns for a grid of 4 × 6 patches.
fn good(dtype: DType) -> Embedding {
    let data = Bytes::from(vec![1; 6 * 8 * dtype.bytes()]);
    Embedding { rows: 6, width: 8, dtype, data, grid_thw: Some([1, 4, 6]) }
}

#[track_caller]
fn check_says(change: impl FnOnce(&mut Embedding, &mut Expect), wanted: &str) {
    let (mut embedding, mut expect) = (good(DType::Bf16), EXPECT);
    change(&mut embedding, &mut expect);
    let said = check(embedding, &expect).map_or_else(|error| error.to_string(), |_| "ok".to_owned());
    assert!(said.starts_with(wanted), "{said}");
}

#[test]
fn what_fits_passes_in_every_type() {
    for dtype in [DType::F32, DType::F16, DType::Bf16] {
        let checked = check(good(dtype), &EXPECT).unwrap();
        assert_eq!((checked.grid(), checked.bytes()), (Some([1, 4, 6]), 48 * dtype.bytes()));
    }
}

#[test]
fn every_field_is_held_to_what_the_engine_needs() {
    check_says(|_, _| (), "ok");
    check_says(|_, expect| expect.width = 24, "embedding: width is 8, wanted 24");
    check_says(|e, _| e.width = 0, "embedding: width is 0, wanted 8");
    check_says(|e, _| e.rows = 5, "embedding: rows is 5, wanted 6 by its grid");
    check_says(|_, expect| expect.rows = Some(7), "embedding: rows is 6, wanted 7 by the token count");
    check_says(|e, _| e.grid_thw = None, "embedding: grid_thw is missing");
    check_says(|e, _| e.grid_thw = Some([1, 3, 8]), "embedding: grid_thw is [1, 3, 8]");
    check_says(|e, _| e.grid_thw = Some([0, 4, 6]), "embedding: grid_thw is [0, 4, 6]");
    check_says(|e, _| e.grid_thw = Some([u32::MAX, u32::MAX - 1, u32::MAX - 1]), "embedding: grid_thw is [4294967295");
    check_says(|_, expect| expect.dtype = Some(DType::F16), "embedding: dtype is bfloat16, wanted float16");
    check_says(|e, _| e.data = e.data.slice(1..), "embedding: data has 95 bytes, wanted 96");
    check_says(|e, _| (e.rows, e.grid_thw) = (u32::MAX, None), "embedding: grid_thw is missing");
}

#[test]
fn no_row_is_no_embedding() {
    let empty = Embedding { rows: 0, width: 8, dtype: DType::F32, data: Bytes::new(), grid_thw: None };
    let expect = Expect { rows: None, merge: None, ..EXPECT };
    assert!(matches!(check(empty, &expect), Err(CheckError::Rows { found: 0, .. })));
}

#[test]
fn a_value_that_is_not_finite_is_found_wherever_it_stands() {
    let bad: [(DType, &[u8]); 6] = [
        (DType::F32, &f32::NAN.to_le_bytes()),
        (DType::F32, &f32::NEG_INFINITY.to_le_bytes()),
        (DType::F16, &0x7c00_u16.to_le_bytes()),
        (DType::F16, &0xfe01_u16.to_le_bytes()),
        (DType::Bf16, &0xff80_u16.to_le_bytes()),
        (DType::Bf16, &0x7fc0_u16.to_le_bytes()),
    ];
    let (rows, width) = (300_u32, 40_u32);
    let expect = Expect { width, rows: Some(rows), merge: None, dtype: None };
    for (dtype, bytes) in bad {
        for index in [0, 1, 39, 40, 2047, 2048, 5000, 11_999] {
            let mut data = vec![1; (rows * width) as usize * dtype.bytes()];
            data[index * dtype.bytes()..][..dtype.bytes()].copy_from_slice(bytes);
            let embedding = Embedding { rows, width, dtype, data: data.into(), grid_thw: None };
            let wanted = CheckError::NotFinite { row: index as u32 / width, column: index as u32 % width };
            assert_eq!(check(embedding, &expect), Err(wanted));
        }
    }
}

#[test]
fn what_was_checked_for_another_model_does_not_suit() {
    let checked = check(good(DType::F16), &EXPECT).unwrap();
    assert_eq!(checked.suits(&EXPECT), Ok(()));
    assert!(checked.suits(&Expect { width: 16, ..EXPECT }).is_err());
    assert!(checked.suits(&Expect { merge: Some(3), ..EXPECT }).is_err());
}

#[track_caller]
fn model(config: &str, wanted: &str) {
    let said = EngineTensor::from_config(config).map_or_else(
        |error| error.to_string(),
        |model| format!("{} x {}, merge {:?}, {:?}", model.width(), model.levels, model.merge, model.dtype),
    );
    assert!(said.starts_with(wanted), "{said}");
}

#[test]
fn the_width_counts_the_deepstack_levels() {
    let qwen3 = r#"{"model_type": "qwen3_vl", "dtype": "bfloat16", "text_config": {"hidden_size": 32},
        "vision_config": {"out_hidden_size": 32, "deepstack_visual_indexes": [0, 1], "spatial_merge_size": 2}}"#;
    model(qwen3, "96 x 2, merge Some(2), Some(Bf16)");
    model(&qwen3.replace(r#", "deepstack_visual_indexes": [0, 1]"#, ""), "128 x 3, merge Some(2)");
    model(&qwen3.replace("[0, 1]", "[]"), "32 x 0, merge Some(2)");
    model(&qwen3.replace("[0, 1]", "7"), "config.json: /vision_config/deepstack_visual_indexes must be");
    model(
        &qwen3.replace(r#""out_hidden_size": 32"#, r#""out_hidden_size": 64"#),
        "config.json: /vision_config/out_hidden_size is 64",
    );
    model(
        r#"{"model_type": "qwen2_vl", "hidden_size": 1536, "vision_config": {"hidden_size": 1536}}"#,
        "1536 x 0, merge Some(2), None",
    );
    model(r#"{"model_type": "llama", "hidden_size": 64, "torch_dtype": "float16"}"#, "64 x 0, merge None, Some(F16)");
    model(r#"{"model_type": "llama", "hidden_size": 0}"#, "config.json: /hidden_size must be");
    model(r#"{"model_type": "llama"}"#, "config.json: /text_config/hidden_size is missing");
    model("[1]", "config.json is no JSON object");
}
