use serde_json::{Value, json};

use super::*;

/// A tokenizer to which anything in angle brackets is a token, named by its length; everything else is characters.
fn brackets(text: &str) -> Option<Vec<u32>> {
    let (mut ids, mut rest) = (Vec::new(), text);
    while let Some(first) = rest.chars().next() {
        let end = rest.find('>').filter(|_| first == '<').map_or(first.len_utf8(), |at| at + 1);
        ids.push(if end > 1 { end as u32 } else { first.into() });
        rest = &rest[end..];
    }
    Some(ids)
}

fn load(config: &Value, preprocessor: &Value, options: &Value) -> Result<VisionModel, ConfigError> {
    let files = ModelFiles { config, preprocessor: Some(preprocessor), processor: None, kwargs: Some(options) };
    VisionModel::from_files(&files, brackets)
}

#[track_caller]
fn check_with(config: Value, preprocessor: Value, options: Value, size: (u32, u32), expect: Result<u32, &str>) {
    let got = load(&config, &preprocessor, &options)
        .map_err(|error| error.to_string())
        .and_then(|model| model.image_tokens(size.0, size.1).map_err(|error| error.to_string()));
    assert_eq!(got.as_ref().map_err(String::as_str), expect.as_ref().map_err(|text| *text));
}

#[track_caller]
fn check(model_type: &str, preprocessor: Value, size: (u32, u32), expect: Result<u32, &str>) {
    check_with(json!({ "model_type": model_type, "image_token_id": 7 }), preprocessor, json!({}), size, expect);
}

#[track_caller]
fn check_options(model_type: &str, preprocessor: Value, options: Value, size: (u32, u32), expect: Result<u32, &str>) {
    check_with(json!({ "model_type": model_type, "image_token_id": 7 }), preprocessor, options, size, expect);
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
fn options_override_the_files() {
    let file = json!({ "min_pixels": 65536, "max_pixels": 16777216 });
    check_options("qwen3_vl", file.clone(), json!({ "min_pixels": 4096 }), (1, 1), Ok(4));
    let size = json!({ "size": { "shortest_edge": 4096, "longest_edge": 4194304 } });
    check_options("qwen3_vl", file.clone(), size.clone(), (1, 1), Ok(4));
    check_options("qwen3_vl", file.clone(), size, (9000, 9000), Ok(4096));
    let gemma = json!({ "model_type": "gemma4" });
    check_with(gemma, json!({}), json!({ "max_soft_tokens": 70 }), (1000, 1000), Ok(64));
    let unknown = "mm_processor_kwargs: effect of `fps` is not known: leave it out to have images predicted";
    check_options("qwen3_vl", file.clone(), json!({ "fps": 2 }), (1, 1), Err(unknown));
    let unread = "mm_processor_kwargs: effect of `max_soft_tokens` is not known: leave it out to have images predicted";
    check_options("qwen3_vl", file, json!({ "max_soft_tokens": 70 }), (1, 1), Err(unread));
    check_options("qwen3_vl", json!({}), json!([1]), (1, 1), Err("mm_processor_kwargs: / must be an object"));
}

#[test]
fn files_that_give_no_rule_are_named() {
    let config = |config: Value| load(&config, &json!({}), &json!({})).unwrap_err();
    let unknown = config(json!({ "model_type": "opera_vl" }));
    assert_eq!(unknown, ConfigError::UnknownModelType { model_type: "opera_vl".into() });
    assert!(unknown.to_string().contains("`opera_vl`"));
    assert_eq!(config(json!([])), ConfigError::Missing { file: "config.json", field: "/model_type" });
    let other = json!({ "model_type": "deepseek_vl_v2", "architectures": ["DeepseekVLV2ForCausalLM"] });
    assert!(matches!(config(other), ConfigError::UnknownModelType { .. }));
    let size = "preprocessor_config.json: /size/shortest_edge is missing: take the file from the model's publisher";
    check("qwen3_vl", json!({ "size": {} }), (1, 1), Err(size));
    let patch = "preprocessor_config.json: /patch_size must be a whole number in range";
    check("qwen3_vl", json!({ "patch_size": 0 }), (1, 1), Err(patch));
    check("qwen3_vl", json!({ "patch_size": -1.5 }), (1, 1), Err(patch));
    let resize = "preprocessor_config.json: /do_resize must be true or absent";
    check("qwen2_vl", json!({ "do_resize": false }), (1, 1), Err(resize));
    let budget = "preprocessor_config.json: /max_soft_tokens must be 70, 140, 280, 560 or 1120";
    check("gemma4", json!({ "max_soft_tokens": 71 }), (1, 1), Err(budget));
}

#[test]
fn numbers_that_contradict_each_other_are_named() {
    let config = json!({ "model_type": "mistral3", "vision_config": { "image_size": 1540 } });
    let conflict = "size.longest_edge differs from vision_config.image_size: engines would not agree with themselves";
    check_with(config, json!({ "size": { "longest_edge": 1024 } }), json!({}), (1, 1), Err(conflict));
}

#[test]
fn a_tower_is_read_from_the_config() {
    let config = |model_type: &str, tower: Value| {
        let config = json!({ "model_type": model_type, "image_token_index": 7, "vision_config": tower });
        load(&config, &json!({}), &json!({})).map(|model| model.image_tokens(336, 336).unwrap())
    };
    let clip = json!({ "image_size": 336, "patch_size": 14 });
    assert_eq!(config("llava", clip.clone()), Ok(576));
    // SigLIP has no class feature, of which the default selection still takes the first away.
    let siglip = json!({ "model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14 });
    assert_eq!(config("llava", siglip), Ok(728));
    let missing = ConfigError::Missing { file: "config.json", field: "/patch_size" };
    assert_eq!(config("llava", json!({ "image_size": 336 })), Err(missing));
    let other = config("llava_next", json!({ "model_type": "eva", "image_size": 336, "patch_size": 14 }));
    assert!(matches!(other, Err(ConfigError::Invalid { .. })));
}

#[test]
fn a_published_kimi_file_nests_its_numbers() {
    let nested =
        json!({ "patch_size": 14, "merge_kernel_size": 2, "in_patch_limit": 64, "patch_limit_on_one_side": 512 });
    check("kimi_k25", json!({ "media_proc_cfg": nested }), (1000, 1000), Ok(16));
    check("kimi_k25", json!({}), (1000, 1000), Ok(1296));
    let missing =
        "preprocessor_config.json: /media_proc_cfg/patch_size is missing: take the file from the model's publisher";
    check("kimi_k25", json!({ "media_proc_cfg": {} }), (1000, 1000), Err(missing));
}

#[test]
fn odd_sizes_are_refused_with_a_reason() {
    check("qwen2_vl", json!({}), (0, 5), Err("image has no pixels (0x5)"));
    check("qwen2_vl", json!({}), (200, 1), Ok(29));
    let text = "image of 201x1 is more than 200 times as long as wide: crop or pad it";
    check("qwen2_vl", json!({}), (201, 1), Err(text));
    check("glm4v", json!({}), (201, 1), Err(text));
    let thin = "image of 447x4294967294 is too thin to be scaled: crop or pad it";
    check("kimi_vl", json!({}), (447, 4_294_967_294), Err(thin));
    let greedy = json!({ "patch_size": 1, "merge_size": 1, "min_pixels": 1_u64 << 40 });
    check("qwen2_vl", greedy, (10, 10), Err("image of 10x10 would fill too many tokens: scale it down"));
}

#[test]
fn the_placeholder_is_the_config_s_own_else_the_vocabulary_s() {
    let place = |config: Value, token: u32| {
        let model = load(&config, &json!({}), &json!({})).unwrap();
        model.place(&[1, token], 0, 1)
    };
    assert_eq!(place(json!({ "model_type": "qwen3_vl", "image_token_id": 593 }), 593), Some(1));
    assert_eq!(place(json!({ "model_type": "qwen2_vl" }), "<|image_pad|>".len() as u32), Some(1));
    assert_eq!(place(json!({ "model_type": "llava", "image_token_index": 9 }), 9), Some(1));
    // Kimi's tokenizer counts more than its config.
    assert_eq!(place(json!({ "model_type": "kimi_k25", "image_token_id": 593 }), 593), None);
    let nowhere = json!({ "model_type": "paligemma", "vision_config": { "image_size": 448, "patch_size": 14 } });
    assert_eq!(place(nowhere, 7), None);
}

#[test]
fn a_tokenizer_that_does_not_fit_is_an_error() {
    let config = json!({ "model_type": "pixtral" });
    let files = ModelFiles { config: &config, preprocessor: None, processor: None, kwargs: None };
    let error = VisionModel::from_files(&files, brackets).unwrap_err();
    assert_eq!(error, ConfigError::NotOneToken { text: "[IMG]".into() });
    // Every text is one token, also that of a whole image, so the parts do not add up to it.
    let one = |text: &str| Some(vec![text.len() as u32]);
    assert!(matches!(VisionModel::from_files(&files, one).unwrap_err(), ConfigError::Vocabulary { .. }));
}

#[test]
fn no_family_panics_on_odd_sizes() {
    let sides = [1, 2, 13, 447, 448, 65_535, 65_536, u32::MAX - 1, u32::MAX];
    for (model_type, build) in FAMILIES {
        let vision = json!({ "image_size": 448, "patch_size": 14, "model_type": "clip_vision_model" });
        let mut config = json!({ "model_type": model_type, "architectures": ["DeepseekOCRForCausalLM"] });
        if matches!(*model_type, "paligemma" | "internvl_chat") {
            config["vision_config"] = vision;
        }
        let files = ModelFiles { config: &config, preprocessor: None, processor: None, kwargs: None };
        let fields = Fields::new(&files).unwrap();
        let family = build(&fields, &mut Words::default()).unwrap();
        for (width, height) in sides.iter().flat_map(|width| sides.map(|height| (*width, height))) {
            let mut shape = Shape::default();
            let _ = (family.rule)(Size { width, height }, &mut shape);
            assert!(shape.pieces().len() < 5000, "{model_type} {width}x{height}");
        }
    }
}
