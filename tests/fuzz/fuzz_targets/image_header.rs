//! Image headers of every format: any bytes are a header of a sane size, or an error.
#![no_main]

use fovea_media::header;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(header) = header::read(bytes) {
        let (width, height) = header.upright();
        assert!(width > 0 && height > 0 && (1..=8).contains(&header.orientation), "{header:?}");
    }
});
