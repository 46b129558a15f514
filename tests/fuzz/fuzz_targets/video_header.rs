//! Containers of video and sound: any bytes, whole or not, have sane facts, or are an error.
#![no_main]

use fovea_media::container::{self, File};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    for file in [File::whole(bytes), File::head(bytes)] {
        if let Ok(video) = container::video(file) {
            let (width, height) = video.upright();
            assert!(width > 0 && height > 0 && video.frames != Some(0) && video.rotation < 360, "{video:?}");
        }
        if let Ok(audio) = container::audio(file) {
            assert!(audio.sample_rate > 0 && audio.channels > 0, "{audio:?}");
        }
    }
});
