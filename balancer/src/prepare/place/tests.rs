use fovea_kv::sglang::token;
use serde_json::{Value, json};

use super::super::dialect::Keyed;
use super::*;

/// Prompts as SGLang's own code padded them come out of prompts before expansion and the images' pads.
#[test]
fn sglang_prompts_are_padded_as_captured() {
    let captures = [
        include_str!("../../../../tests/vectors/sglang/0.5.16/mm_text_image.json"),
        include_str!("../../../../tests/vectors/sglang/0.5.22/mm_text_image.json"),
        include_str!("../../../../tests/vectors/sglang/0.5.23/mm_text_image.json"),
        include_str!("../../../../tests/vectors/sglang/0.5.23/mm_sessions_unified_rust.json"),
    ];
    let mut compared = 0;
    for capture in captures {
        let capture: Value = serde_json::from_str(capture).unwrap();
        let id = |value: &Value| u32::try_from(value.as_u64().unwrap()).unwrap();
        let pad = id(&capture["image_token_id"]);
        let placeholders = Placeholders::new(&json!({"image_token_id": pad}));
        for step in capture["steps"].as_array().unwrap() {
            let (request, padded) = (&step["request"], &step["padded_ids"]);
            let Some(images) = request["images"].as_array().filter(|_| padded.is_array()) else { continue };
            let offset = |image: &Value, at: usize| usize::try_from(id(&image["offset"][at])).unwrap();
            let inside = |at: usize| images.iter().any(|image| (offset(image, 0) + 1..=offset(image, 1)).contains(&at));
            let expanded = request["placeholder_ids"].as_array().unwrap().iter().map(id).enumerate();
            let tokens: Vec<u32> = expanded.filter(|(at, _)| !inside(*at)).map(|(_, token)| token).collect();
            let items: Vec<_> = images
                .iter()
                .map(|image| {
                    let pads = image["pads"].as_array().unwrap().iter().map(|pad| token(pad.as_u64().unwrap()));
                    item(Keyed { form: Form::Pads(pads.collect()), tokens: id(&image["tokens"]), learnt: true })
                })
                .collect();
            let placer = Placer {
                vision: None,
                video: None,
                encode: &|_| None,
                placeholders: &placeholders,
                pad: Some(pad),
                whole: false,
            };
            let placed = placer.place(&tokens, &items).unwrap();
            let told: Vec<_> =
                placed.told.runs().iter().flat_map(|run| std::iter::repeat_n(run.token, run.count as usize)).collect();
            let expect: Vec<_> = padded.as_array().unwrap().iter().map(|id| token(id.as_u64().unwrap())).collect();
            assert_eq!(
                (told, placed.kind),
                (expect, if items.is_empty() { ViewKind::Exact } else { ViewKind::Learnt }),
                "{step}"
            );
            compared += items.len();
        }
    }
    assert!(compared >= 16, "{compared} images");
}

fn item(keyed: Keyed) -> Item {
    Item {
        kind: MediaKind::Image,
        key: None,
        affinity: None,
        set: None,
        size: (0, 0),
        shape: Err("no rule"),
        keyed: Ok(keyed),
        by_name: false,
        unreadable: None,
        fault: None,
    }
}
