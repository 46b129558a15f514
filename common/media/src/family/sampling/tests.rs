use serde_json::json;

use super::*;
use crate::container::Container;

fn object(value: Value) -> Map<String, Value> {
    value.as_object().unwrap().clone()
}

fn video(frames: Option<u32>, fps: Option<Rate>) -> VideoFacts {
    VideoFacts { container: Container::Mp4, width: 64, height: 48, rotation: 90, frames, fps, duration_ms: None }
}

/// Rows of vLLM 0.33's own loader classes, run on their own; `torch.arange` stood for by its count and the clamp after it.
#[test]
fn frames_are_those_that_vllm_s_loaders_pick() {
    let rows: Vec<Value> = serde_json::from_str(include_str!("rows.json")).unwrap();
    for row in &rows {
        let io = VideoIo::merge(None, row["options"].as_object()).unwrap();
        let loader = match row["loader"].as_str().unwrap() {
            "opencv" => Loader::Uniform,
            "qwen2_vl" => Loader::Qwen2,
            _ => Loader::Qwen3,
        };
        let total = row["total"].as_u64().unwrap() as u32;
        let picked = io.pick(loader, total, row["fps"].as_f64().unwrap()).unwrap_or_default();
        if row.get("error").is_some() {
            assert!(picked.is_empty(), "{row}");
            continue;
        }
        let sum: u64 = picked.iter().copied().map(u64::from).sum();
        assert_eq!(row["frames"], picked.len(), "{row}");
        if loader != Loader::Qwen2 {
            assert_eq!((row["sum"] == sum, &row["last"] == picked.last().unwrap()), (true, true), "{row}");
            assert_eq!(row["first"], json!(picked[..picked.len().min(6)]), "{row}");
        }
    }
    assert_eq!(rows.len(), 240);
}

#[test]
fn a_request_s_number_takes_the_server_s_rate_away() {
    let merge = |server, request| {
        let io = VideoIo::merge(Some(&object(server)), Some(&object(request))).unwrap();
        (io.num_frames, io.fps)
    };
    assert_eq!(merge(json!({ "num_frames": 8, "fps": 3 }), json!({})), (Some(8), Some(3.0)));
    assert_eq!(merge(json!({ "num_frames": 8, "fps": 3 }), json!({ "num_frames": 4 })), (Some(4), None));
    assert_eq!(merge(json!({ "num_frames": 8, "fps": 3 }), json!({ "fps": 1.5 })), (None, Some(1.5)));
    assert_eq!(merge(json!({ "num_frames": 8 }), json!({ "fps": 1, "num_frames": -1 })), (Some(-1), Some(1.0)));
}

#[test]
fn an_option_with_unknown_effect_is_named() {
    let error = |server: Value, request: Value| {
        VideoIo::merge(Some(&object(server)), Some(&object(request))).unwrap_err().to_string()
    };
    let text =
        |key| format!("media_io_kwargs.video: effect of `{key}` is not known: leave it out to have videos predicted");
    assert_eq!(error(json!({}), json!({ "frame_recovery": true })), text("frame_recovery"));
    assert_eq!(error(json!({ "backend": "torchcodec" }), json!({})), text("backend"));
    // Only the server chooses the loader.
    assert_eq!(error(json!({}), json!({ "video_backend": "opencv" })), text("video_backend"));
    assert_eq!(error(json!({}), json!({ "num_frames": "8" })), text("num_frames"));
    let named = VideoIo::merge(Some(&object(json!({ "video_backend": "opencv", "backend": "opencv" }))), None).unwrap();
    assert_eq!(named.loader, Some(Loader::Uniform));
}

#[test]
fn frames_that_the_header_does_not_count_are_not_guessed() {
    let io = VideoIo::default();
    let rate = Rate::new(25, 1);
    assert_eq!(io.sample(Loader::Qwen3, &video(None, rate)), Err(Unsampled::Uncounted));
    assert_eq!(io.sample(Loader::Qwen3, &video(Some(9), None)), Err(Unsampled::Uncounted));
    assert_eq!(io.sample(Loader::Qwen2, &video(Some(1), rate)), Err(Unsampled::Length { total: 1 }));
    assert_eq!(io.sample(Loader::Qwen3, &video(Some(u32::MAX), rate)), Err(Unsampled::Length { total: u32::MAX }));
    let sampled = io.sample(Loader::Qwen3, &video(Some(100), rate)).unwrap();
    assert_eq!((sampled.width, sampled.height, sampled.fps, sampled.total), (48, 64, 25.0, 100));
    assert_eq!(sampled.indices, [0, 14, 28, 42, 57, 71, 85, 99]);
}
