use fovea_kv::Run;
use serde_json::{Value, json};

use super::*;
use crate::container::{Container, Rate, VideoFacts};
use crate::family::{ModelFiles, Sampled, Video, VideoIo};

const IMAGE: u32 = 593;
const VIDEO: u32 = 594;
const START: u32 = 590;
const END: u32 = 591;

/// Digits, points and everything else: a token each, of the text's length.
fn encode(text: &str) -> Option<Vec<u32>> {
    Some(vec![text.len() as u32, text.bytes().map(u32::from).sum()])
}

fn models(model_type: &str, file: Value) -> (VisionModel, VideoModel) {
    let config = json!({
        "model_type": model_type, "image_token_id": IMAGE, "video_token_id": VIDEO,
        "vision_start_token_id": START, "vision_end_token_id": END,
    });
    let files = ModelFiles { config: &config, preprocessor: Some(&file), processor: None, kwargs: None };
    (VisionModel::from_files(&files, encode).unwrap(), VideoModel::from_files(&files, encode).unwrap())
}

fn image(model: &VisionModel) -> Item {
    Item { id: MediaId([1; 32]), shape: model.measure(64, 64).unwrap() }
}

fn video(model: &VideoModel, id: u8, frames: u32) -> VideoItem {
    let shape = model.measure(&Video { width: 64, height: 64, frames, fps: 2.0 }).unwrap();
    VideoItem { id: MediaId([id; 32]), shape }
}

#[track_caller]
fn check(got: Result<MixedExpansion, ExpandError>, runs: &[(u32, u32)], spans: &[(u32, u32, u8)]) {
    let got = got.unwrap();
    let runs: Vec<_> = runs.iter().map(|&(token, count)| Run { token, count }).collect();
    assert_eq!(got.view.runs(), runs);
    let found: Vec<_> = got.view.spans().iter().map(|span| (span.start, span.len, span.id.0[0])).collect();
    assert_eq!(found, spans);
}

#[test]
fn each_kind_takes_its_own_placeholders_in_order() {
    let size = json!({ "size": { "shortest_edge": 3136, "longest_edge": 12845056 } });
    let (vision, model) = models("qwen2_5_vl", size);
    let tokens = [1, VIDEO, 2, IMAGE, 3, VIDEO, 4, VIDEO];
    let images = [image(&vision)];
    let features = images[0].shape.tokens();
    let videos = [video(&model, 2, 4), video(&model, 3, 5)];
    let [first, second] = [0, 1].map(|index: usize| videos[index].shape.tokens());
    // Two and three temporal patches.
    assert_eq!((first, second), (2 * features, 3 * features));
    let got = expand_mixed(&tokens, (&images, Some(&vision)), (&videos, &model), encode);
    let (at_image, at_second) = (first + 2, first + features + 3);
    let places = got.as_ref().map(|got| [&got.images[..], &got.videos].concat());
    let wanted = [(at_image, features), (1, first), (at_second, second)];
    assert_eq!(places, Ok(wanted.map(|(start, length)| start..start + length).to_vec()));
    let runs = [(1, 1), (VIDEO, first), (2, 1), (IMAGE, features), (3, 1), (VIDEO, second), (4, 1), (VIDEO, 1)];
    check(got, &runs, &[(1, first, 2), (at_image, features, 1), (at_second, second, 3)]);
}

#[test]
fn times_and_marks_are_keyed_by_the_video_and_the_template_s_marks_stay() {
    let (_, model) = models("qwen3_vl", json!({ "size": { "shortest_edge": 4096, "longest_edge": 25165824 } }));
    let got = expand_mixed(&[START, VIDEO, END], (&[], None), (&[video(&model, 2, 4)], &model), encode);
    let [[length, first], [_, second]] = ["<0.2 seconds>", "<1.2 seconds>"].map(|time| {
        let ids = encode(time).unwrap();
        [ids[0], ids[1]]
    });
    let patch = |time| [(length, 1), (time, 1), (START, 1), (VIDEO, 4), (END, 1)];
    let runs = [&[(START, 1)][..], &patch(first), &patch(second), &[(END, 1)]].concat();
    // The last mark of the video and the template's own are one run.
    let mut runs = runs;
    runs.truncate(10);
    runs.push((END, 2));
    check(got, &runs, &[(1, 16, 2)]);
}

#[test]
fn a_video_without_placeholder_is_an_error() {
    let (vision, model) = models("qwen2_vl", json!({}));
    let videos = [video(&model, 2, 4), video(&model, 3, 4)];
    let error = expand_mixed(&[VIDEO, IMAGE], (&[image(&vision)], Some(&vision)), (&videos, &model), encode);
    assert_eq!(error, Err(ExpandError::TooFewVideoPlaceholders { videos: 2, placeholders: 1 }));
    let error = expand_mixed(&[VIDEO], (&[image(&vision)], Some(&vision)), (&videos[..1], &model), encode);
    assert_eq!(error, Err(ExpandError::TooFewPlaceholders { images: 1, placeholders: 0 }));
    let (_, stamped) = models("qwen3_vl", json!({}));
    let videos = [video(&stamped, 2, 4)];
    let error = expand_mixed(&[VIDEO], (&[], None), (&videos, &stamped), |_| None);
    assert_eq!(error, Err(ExpandError::VideoTime { index: 0 }));
}

#[test]
fn a_file_s_facts_become_frames_and_their_times() {
    let (_, model) = models("qwen3_vl", json!({ "size": { "shortest_edge": 4096, "longest_edge": 25165824 } }));
    assert!(!model.is_measured());
    let facts = |frames| VideoFacts {
        container: Container::Mp4,
        width: 64,
        height: 64,
        rotation: 0,
        frames: Some(frames),
        fps: Rate::new(25, 1),
        duration_ms: None,
    };
    let stamps = |sampled: &Sampled| {
        let mut stamps = Vec::new();
        let mut keep = |text: &str| {
            stamps.push(text.to_owned());
            Some(vec![1])
        };
        assert!(model.push(&model.measure_sampled(sampled).unwrap(), &mut keep, &mut RoutingView::default()));
        stamps
    };
    // 100 frames of 25 per second: 8 are picked, at 0, 14, 28, 42, 57, 71, 85, 99.
    let sampled = VideoIo::default().sample(model.loader(), &facts(100)).unwrap();
    assert_eq!(stamps(&sampled), ["<0.3 seconds>", "<1.4 seconds>", "<2.6 seconds>", "<3.7 seconds>"]);
    // Fewer frames than asked for: all are taken, and the processor picks from them at its own rate.
    let every = VideoIo { fps: Some(30.0), ..VideoIo::default() };
    let sampled = every.sample(model.loader(), &facts(30)).unwrap();
    assert_eq!(sampled.indices.len(), 30);
    assert_eq!(stamps(&sampled), ["<0.2 seconds>", "<1.0 seconds>"]);
}
