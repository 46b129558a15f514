//! Facts of real encoders' files against those of the engine's decoder (tests/containers/README.md).

use std::path::PathBuf;

use fovea_media::container::{self, ContainerError, File};
use serde_json::Value;

fn folder() -> PathBuf {
    concat!(env!("CARGO_MANIFEST_DIR"), "/tests/containers").into()
}

fn read(name: &str) -> Vec<u8> {
    std::fs::read(folder().join(name)).expect("a recorded file")
}

fn rows() -> Vec<(String, Value)> {
    let rows: Vec<Value> = serde_json::from_slice(&read("expected.json")).expect("a list of rows");
    rows.into_iter().map(|row| (row["file"].as_str().unwrap_or_default().to_owned(), row)).collect()
}

/// Files whose frames only decoding tells: fragments, AV1, a pause, and frames that last as they like.
const UNCOUNTED: [&str; 4] = ["h264_frag.mp4", "av1.mp4", "pause.mp4", "vfr.webm"];
/// Files whose rate only decoding tells.
const RATELESS: [&str; 2] = ["h264_frag.mp4", "vfr.gif"];

#[test]
fn videos_have_the_frames_and_the_rate_that_opencv_finds() {
    let mut seen = 0;
    for (file, row) in rows().iter().filter(|(_, row)| row["video"].is_object()) {
        let facts = container::video(File::whole(&read(file))).unwrap_or_else(|error| panic!("{file}: {error}"));
        let (width, height) = facts.upright();
        let wanted = &row["video"];
        assert_eq!((wanted["width"] == width, wanted["height"] == height), (true, true), "{file} {facts:?}");
        assert_eq!(facts.frames.is_none(), UNCOUNTED.contains(&file.as_str()), "{file} {facts:?}");
        assert!(facts.frames.is_none_or(|frames| wanted["frames"] == frames), "{file} {facts:?}");
        assert_eq!(facts.fps.is_none(), RATELESS.contains(&file.as_str()), "{file} {facts:?}");
        // The very same number, because the frames picked depend on it.
        assert!(facts.fps.is_none_or(|fps| wanted["fps"] == fps.per_second()), "{file} {facts:?}");
        seen += 1;
    }
    assert_eq!(seen, 28);
}

#[test]
fn sounds_have_their_rate_channels_and_length() {
    for (file, row) in rows().iter().filter(|(_, row)| row["audio"].is_object()) {
        let facts = container::audio(File::whole(&read(file))).unwrap_or_else(|error| panic!("{file}: {error}"));
        let wanted = &row["audio"];
        assert_eq!(wanted["sample_rate"], facts.sample_rate, "{file}");
        assert_eq!(wanted["channels"], facts.channels, "{file}");
        assert!(facts.samples.is_none_or(|samples| wanted["decoded_samples"] == samples), "{file} {facts:?}");
        let decoded_ms = wanted["decoded_samples"].as_u64().unwrap() * 1000 / u64::from(facts.sample_rate);
        // A picture track may last longer, an encoder's delay comes on top.
        assert!(facts.duration_ms.is_some_and(|ms| ms.abs_diff(decoded_ms) < 50), "{file} {facts:?}");
        assert!(!facts.estimated);
    }
}

#[test]
fn an_index_at_the_end_is_asked_for_and_one_in_front_is_enough() {
    let (behind, front) = (read("h264_25.mp4"), read("h264_25_front.mp4"));
    let head = |bytes: &[u8], length| container::video(File::head(&bytes[..length])).map(|facts| facts.frames);
    assert_eq!(head(&front, front.len() - 200), Ok(Some(30)));
    let error = head(&behind, 400).unwrap_err();
    assert!(matches!(error, ContainerError::NeedsWhole { .. }));
    let text =
        "Mp4 file: its index (moov), which stands at the end, lies beyond the bytes at hand: the whole file is needed";
    assert_eq!(error.to_string(), text);
}

#[test]
fn heads_say_the_same_as_whole_files_or_less() {
    for (file, _) in rows() {
        let bytes = read(&file);
        let whole = (container::video(File::whole(&bytes)), container::audio(File::whole(&bytes)));
        for length in (0..bytes.len()).step_by(1 + bytes.len() / 200) {
            let head = File::head(&bytes[..length]);
            if let (Ok(head), Ok(whole)) = (container::video(head), &whole.0) {
                let same = (head.width, head.height, head.fps) == (whole.width, whole.height, whole.fps);
                assert!(
                    same && (head.frames.is_none() || head.frames == whole.frames || whole.frames.is_none()),
                    "{file} {length}"
                );
            }
            if let (Ok(head), Ok(whole)) = (container::audio(head), &whole.1) {
                assert_eq!((head.sample_rate, head.channels), (whole.sample_rate, whole.channels), "{file} {length}");
            }
        }
    }
}
