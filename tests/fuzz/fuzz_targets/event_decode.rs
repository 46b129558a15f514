//! Engine events: any payload is a batch or an error.
#![no_main]

use libfuzzer_sys::fuzz_target;

fuzz_target!(|payload: &[u8]| {
    let _ = fovea_kv::vllm::decode(payload);
});
