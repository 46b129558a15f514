//! Data URLs: any text is bytes or an error, and what we write we read.
#![no_main]

use fovea_media::data_url;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    if let Ok(text) = std::str::from_utf8(bytes) {
        let _ = data_url::decode(text);
        let _ = data_url::decode(&format!("data:image/png;base64,{text}"));
    }
    assert_eq!(data_url::decode(&data_url::encode(bytes)).as_deref(), Ok(bytes));
});
