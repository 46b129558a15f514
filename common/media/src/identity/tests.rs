use std::path::Path;

use serde_json::Value;

use super::*;
use crate::family::{ModelFiles, VisionModel};
use crate::{data_url, header};

fn vectors() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/vectors/vllm"))
}

fn json(path: &Path) -> Value {
    serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap()
}

#[test]
fn every_sample_has_vllm_s_id_size_mode_and_count() {
    let samples = json(&vectors().join("image_ids.json"));
    let model_string = samples["model_string"].as_str().unwrap();
    let dir = vectors().join("tiny-qwen3-vl");
    let (config, preprocessor) = (json(&dir.join("config.json")), json(&dir.join("preprocessor_config.json")));
    let files = ModelFiles { config: &config, preprocessor: Some(&preprocessor), processor: None, kwargs: None };
    let model = VisionModel::from_files(&files, |_| None).unwrap();
    for sample in samples["images"].as_array().unwrap() {
        let bytes = std::fs::read(vectors().join("images").join(sample["file"].as_str().unwrap())).unwrap();
        let header = header::read(&bytes).unwrap();
        assert_eq!(
            (u64::from(header.width), u64::from(header.height)),
            (sample["width"].as_u64().unwrap(), sample["height"].as_u64().unwrap())
        );
        assert_eq!(header.converted, sample["decoded_mode"] != "RGB", "{sample}");
        assert_eq!(u64::from(header.orientation), sample["exif_orientation"].as_u64().unwrap_or(1), "{sample}");
        let id = vllm_image_id(&bytes, header.converted, model_string);
        assert_eq!(id.to_string(), sample["vllm_default_id"].as_str().unwrap(), "{sample}");
        let (width, height) = header.upright();
        assert_eq!(
            u64::from(model.image_tokens(width, height).unwrap()),
            sample["image_tokens"].as_u64().unwrap(),
            "{sample}"
        );
    }
}

/// Media parts of a chat request, in order: (data URL, whether a uuid is set).
fn parts(request: &Value) -> Vec<(Option<&str>, bool)> {
    let contents =
        request["messages"].as_array().into_iter().flatten().filter_map(|message| message["content"].as_array());
    let media = contents
        .flatten()
        .filter(|part| !["text", "input_text", "refusal"].contains(&part["type"].as_str().unwrap_or("text")));
    media.map(|part| (part["image_url"]["url"].as_str(), !part["uuid"].is_null())).collect()
}

#[test]
fn every_id_captured_from_vllm_is_reproduced() {
    let mut ids = 0;
    let files = std::fs::read_dir(vectors()).unwrap().map(|entry| entry.unwrap().path());
    for file in files.filter(|path| path.extension().is_some_and(|extension| extension == "jsonl")) {
        for line in std::fs::read_to_string(&file).unwrap().lines() {
            let record: Value = serde_json::from_str(line).unwrap();
            let request = &record["request"];
            let options = |key: &str| request.get(key).is_some_and(|value| !value.is_null());
            if options("mm_processor_kwargs") || options("media_io_kwargs") {
                continue;
            }
            let hashes = record["render"]["mm_hashes"]["image"].as_array().map_or(&[][..], Vec::as_slice);
            for (hash, (url, named)) in hashes.iter().zip(parts(request)) {
                let Some(bytes) = url.and_then(|url| data_url::decode(url).ok()).filter(|_| !named) else { continue };
                let header = header::read(&bytes).unwrap();
                let id = vllm_image_id(&bytes, header.converted, "./tiny-qwen3-vl");
                assert_eq!(id.to_string(), hash.as_str().unwrap(), "{}", record["name"]);
                ids += 1;
            }
        }
    }
    assert_eq!(ids, 51, "images with bytes and without uuid or options");
}

#[test]
fn ids_under_request_options_are_those_of_the_capture() {
    let capture = std::fs::read_to_string(vectors().join("bytes_kwargs.jsonl")).unwrap();
    let mut compared = 0;
    for line in capture.lines() {
        let record: Value = serde_json::from_str(line).unwrap();
        let request = &record["request"];
        let part = request["messages"].as_array().unwrap().iter().filter_map(|m| m["content"].as_array()).flatten();
        let part = part.clone().find(|part| part["type"] == "image_url").unwrap();
        let bytes = data_url::decode(part["image_url"]["url"].as_str().unwrap()).unwrap();
        let converted = header::read(&bytes).unwrap().converted;
        let source = part["uuid"].as_str().map_or(Source::File { bytes: &bytes, converted }, Source::Uuid);
        let options = Options {
            mm_processor: request["mm_processor_kwargs"].as_object(),
            media_io: request["media_io_kwargs"]["image"].as_object(),
        };
        let id = vllm_item_id(source, options, "./tiny-qwen3-vl");
        assert_eq!(id.to_string(), record["render"]["mm_hashes"]["image"][0].as_str().unwrap(), "{}", record["name"]);
        compared += 1;
    }
    assert_eq!(compared, 4);
}

/// Expected value from Python's blake3 over the framing written by hand.
#[test]
fn a_video_s_options_enter_its_id() {
    let options = serde_json::json!({ "num_frames": 8 });
    let options = Options { mm_processor: None, media_io: options.as_object() };
    let id = vllm_video_id("abc", options, "/m/q");
    assert_eq!(id.to_string(), "e0e54fc0f5739bacd5865e4305be272d7435e7e976b0edd7668e722467695bd3");
    assert_eq!(vllm_video_id("abc", Options::default(), "/m/q"), MediaId::from_engine_id("abc"));
}
