use serde_json::{Value, json};

use super::*;

const COUNTS: [&str; 2] = [
    include_str!("../../../../tests/vectors/tokens/image_token_counts.json"),
    include_str!("../../../../tests/vectors/tokens/image_token_counts_vllm.json"),
];

/// Groups whose family has a rule here, by `model_type` before the `:`.
fn groups() -> Vec<Value> {
    let all = COUNTS.iter().flat_map(|text| serde_json::from_str::<Vec<Value>>(text).unwrap());
    all.filter(|group| group["family"].as_str().unwrap().starts_with("qwen")).collect()
}

#[test]
fn every_recorded_count_and_refusal_is_exact() {
    let mut cases = 0;
    for group in groups() {
        let family = group["family"].as_str().unwrap();
        let config = json!({ "model_type": family.split(':').next().unwrap() });
        let model = VisionModel::from_config(&config, Some(&group["preprocessor_config"])).unwrap();
        for case in group["cases"].as_array().unwrap() {
            let side = |key: &str| u32::try_from(case[key].as_u64().unwrap()).unwrap();
            let got = model.image_tokens(side("w"), side("h"));
            assert_eq!(got.ok().map(u64::from), case["tokens"].as_u64(), "{family} {case}");
            assert_eq!(got.is_err(), case.get("error").is_some(), "{family} {case}");
            cases += 1;
        }
    }
    assert!(cases >= 366, "{cases} cases");
}

#[track_caller]
fn check(model_type: &str, preprocessor: Value, size: (u32, u32), expect: Result<u32, &str>) {
    let config = json!({ "model_type": model_type, "image_token_id": 7 });
    let got = VisionModel::from_config(&config, Some(&preprocessor))
        .map_err(|error| error.to_string())
        .and_then(|model| model.image_tokens(size.0, size.1).map_err(|error| error.to_string()));
    assert_eq!(got.as_ref().map_err(String::as_str), expect.as_ref().map_err(|text| *text));
}

#[test]
fn pixel_bounds_override_size() {
    let size = json!({ "shortest_edge": 65536, "longest_edge": 16777216 });
    check("qwen3_vl", json!({ "size": size }), (1, 1), Ok(64));
    check("qwen3_vl", json!({ "size": size, "min_pixels": 4096 }), (1, 1), Ok(4));
    check("qwen3_vl_moe", json!({ "size": size, "max_pixels": 4194304, "min_pixels": null }), (9000, 9000), Ok(4096));
    check("qwen3_5", json!({ "image_processor": { "size": size, "min_pixels": 4096 } }), (1, 1), Ok(4));
}

#[test]
fn files_that_give_no_rule_are_named() {
    let config = |model_type: &str| VisionModel::from_config(&json!({ "model_type": model_type }), None);
    assert_eq!(config("opera_vl"), Err(ConfigError::UnknownModelType { model_type: "opera_vl".into() }));
    assert!(config("opera_vl").unwrap_err().to_string().contains("`opera_vl`"));
    let missing = ConfigError::Missing { file: "config.json", field: "model_type" };
    assert_eq!(VisionModel::from_config(&json!([]), None), Err(missing));
    let size = "preprocessor_config.json: /size/shortest_edge is missing: take the file from the model's publisher";
    check("qwen3_vl", json!({ "size": {} }), (1, 1), Err(size));
    let patch = "preprocessor_config.json: /patch_size must be a whole number in range";
    check("qwen3_vl", json!({ "patch_size": 0 }), (1, 1), Err(patch));
    check("qwen3_vl", json!({ "patch_size": -1.5 }), (1, 1), Err(patch));
    let resize = "preprocessor_config.json: /do_resize must be true or absent";
    check("qwen2_vl", json!({ "do_resize": false }), (1, 1), Err(resize));
}

#[test]
fn odd_sizes_are_refused_with_a_reason() {
    check("qwen2_vl", json!({}), (0, 5), Err("image has no pixels (0x5)"));
    check("qwen2_vl", json!({}), (200, 1), Ok(29));
    let text = "image of 201x1 is more than 200 times as long as wide: crop or pad it";
    check("qwen2_vl", json!({}), (201, 1), Err(text));
    let greedy = json!({ "patch_size": 1, "merge_size": 1, "min_pixels": 1_u64 << 40 });
    check("qwen2_vl", greedy, (10, 10), Err("image of 10x10 would fill too many tokens: scale it down"));
}

#[test]
fn the_placeholder_is_the_config_s_own() {
    let token = |config: Value| VisionModel::from_config(&config, None).unwrap().image_token();
    assert_eq!(token(json!({ "model_type": "qwen3_vl", "image_token_id": 593 })), 593);
    assert_eq!(token(json!({ "model_type": "qwen2_vl" })), 151_655);
    assert_eq!(token(json!({ "model_type": "qwen3_5_moe" })), 248_056);
}
