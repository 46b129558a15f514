use std::path::Path;

use serde_json::{Value, json};

use super::*;

fn config(value: Value) -> Estimate {
    serde_json::from_value(value).unwrap()
}

fn hints(headers: &Value) -> VideoHints {
    VideoHints::read(|name| headers.get(name).and_then(Value::as_str))
}

/// What llm-d's own code answered; this tree holds no copy, so the test runs only beside them.
#[test]
fn every_recorded_answer_of_llm_d() {
    let path = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../../shared/vectors/llm-d/estimates.json"));
    let Ok(text) = std::fs::read(path) else { return };
    let cases: Value = serde_json::from_slice(&text).unwrap();
    let mut seen = 0;
    for case in cases["cases"].as_array().unwrap() {
        let (input, expect) = (&case["input"], &case["expect"]);
        let text = |key: &str| input[key].as_str().unwrap_or_default();
        let estimate = || config(input["estimate"].clone());
        let got = match case["kind"].as_str().unwrap() {
            "image_tokens" => json!({ "tokens": estimate().image_tokens(text("url")) }),
            "video_tokens" => json!({ "tokens": estimate().video_tokens(&hints(&input["headers"])) }),
            "audio_tokens" => {
                let repeated = text("data_repeat").repeat(input["data_len"].as_u64().unwrap_or(0) as usize);
                let data = if repeated.is_empty() { text("data") } else { &repeated };
                json!({ "tokens": audio_tokens(data, text("format")) })
            }
            "float_header" => {
                let value = positive_float(text("value"));
                let wanted = expect["value"].as_str().map(|text| text.trim_start_matches('+').parse::<f64>().unwrap());
                assert_eq!(value, wanted, "{case}");
                json!({ "accepted": value.is_some() })
            }
            "resolution_header" => {
                let (width, height) = resolution(text("value")).unwrap_or((0, 0));
                json!({ "width": width, "height": height })
            }
            _ => continue,
        };
        seen += 1;
        for (key, got) in got.as_object().unwrap() {
            // Infinity is no length: the default of 10 s stands.
            let wanted = if case["id"] == "vid-inf" { &json!(4500) } else { &expect[key] };
            let bounded = wanted.as_u64().map(|wanted| json!(wanted.min(TOKENS_MAX.into())));
            assert_eq!(Some(got), bounded.as_ref().or(Some(wanted)), "{case}");
        }
    }
    assert_eq!(seen, 67 + 62 + 6 + 19 + 14);
}

#[track_caller]
fn check_video(estimate: Value, headers: Value, tokens: u32) {
    assert_eq!(config(json!({ "video": estimate })).video_tokens(&hints(&headers)), tokens);
}

#[test]
fn frames_are_sampled_or_strided() {
    // 20 frames of 225 tokens.
    check_video(json!({}), json!({}), 4500);
    check_video(json!({}), json!({ VIDEO_DURATION: "1", VIDEO_RESOLUTION: "1280x720", VIDEO_FPS: "60" }), 1800);
    let one = json!({ "mode": "static" });
    let patches = json!({ "minFrames": 4, "sampled": { "temporalPatchSize": 2 } });
    check_video(json!({ "tokensPerFrame": one, "frames": patches }), json!({ VIDEO_DURATION: "1" }), 2);
    let strided = json!({ "mode": "strided", "strided": { "frameStride": 3 } });
    let headers = json!({ VIDEO_DURATION: "1.04", VIDEO_FPS: "29" });
    check_video(json!({ "tokensPerFrame": one, "frames": strided }), headers, 10);
    check_video(json!({ "frames": { "minFrames": 20, "maxFrames": 5 } }), json!({ VIDEO_DURATION: "1" }), 1125);
    check_video(json!({ "maxVideoTokens": 500 }), json!({}), 500);
}

#[test]
fn nothing_that_a_client_writes_makes_more_than_the_limit() {
    for huge in ["1e9", "1e300", "0x1p1023"] {
        check_video(json!({}), json!({ VIDEO_DURATION: huge }), TOKENS_MAX);
    }
    check_video(json!({}), json!({ VIDEO_RESOLUTION: "9223372036854775807x9223372036854775807" }), TOKENS_MAX);
    check_video(json!({}), json!({ VIDEO_DURATION: "Inf" }), 4500);
    check_video(json!({ "maxVideoTokens": i64::MAX }), json!({ VIDEO_DURATION: "1e300" }), TOKENS_MAX);
    let estimate = config(json!({ "image": { "dynamic": { "factor": 1 } } }));
    assert_eq!(estimate.image_tokens_of(Some((u32::MAX, u32::MAX))), TOKENS_MAX);
}

#[test]
fn numbers_are_read_as_go_reads_them() {
    let accepted =
        [("5", 5.0), (".5", 0.5), ("5.", 5.0), ("+1e-3", 0.001), ("1_0", 10.0), ("0x1.8p1", 3.0), ("0X_10p-4", 1.0)];
    for (text, value) in accepted {
        assert_eq!(positive_float(text), Some(value), "{text}");
    }
    let refused = [
        "", "NaN", "-1", "0", " 5", "5 ", "0x10", "1e400", "1,5", "2s", "1__0", "_1", "1_", "1_.5", "e5", ".", "--1",
        "+-1", "é", "0x", "0xp1",
    ];
    for text in refused {
        assert_eq!(positive_float(text), None, "{text}");
    }
    assert_eq!(resolution(" +640 X 360\t"), Some((640, 360)));
    for text in ["640", "x360", "640x", "-1x5", "0x5", "640x360x2", "640\u{d7}360"] {
        assert_eq!(resolution(text), None, "{text}");
    }
}

#[test]
fn the_size_in_a_data_url_needs_only_the_header() {
    let png = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAoAAAAKACAIAAACDr150";
    assert_eq!(size_of_data_url(png), Some((640, 640)));
    assert_eq!(size_of_data_url(&png.replace("Koo", "K\r\noo").replace("AAAA", "AA\nAA")), Some((640, 640)));
    // Another checksum, a space, another scheme.
    assert_eq!(size_of_data_url(&png.replace("150", "151")), None);
    assert_eq!(size_of_data_url(&png.replace("AAAA", "AA AA")), None);
    assert_eq!(size_of_data_url(&png.replace("data:", "DATA:")), None);
    assert_eq!(size_of_data_url("data:image/gif;base64,R0lGODlhIQNZAgAAAA=="), Some((801, 601)));
}

#[test]
fn an_unknown_key_is_an_error() {
    let error = serde_json::from_value::<Estimate>(json!({ "image": { "dynamic": { "facktor": 1 } } })).unwrap_err();
    assert!(error.to_string().contains("unknown field `facktor`"), "{error}");
}

proptest::proptest! {
    #[test]
    fn no_text_panics(text in "\\PC{0,40}", ascii in "[0-9a-fxXpPeE_.+-]{0,12}") {
        for text in [&text, &ascii] {
            let _ = (positive_float(text), resolution(text), size_of_data_url(&format!("data:image/;base64,{text}")));
            let _ = size_of_data_url(&format!("data:image/;base64,/9j/{text}"));
        }
    }
}
