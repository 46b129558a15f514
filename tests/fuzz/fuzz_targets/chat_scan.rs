//! Request bodies: every reader takes or refuses them, their edits fit, and what was cut is gone and leaves what can be read.
#![no_main]

use fovea_openai::edit::Edits;
use fovea_openai::{ChatRequest, CompletionRequest, CutPolicy, scan};
use libfuzzer_sys::fuzz_target;

fuzz_target!(|body: &str| {
    let completion = CompletionRequest::parse(body);
    if let Ok(request) = &completion {
        let _ = request.hazard(false);
        Edits::new(request.common.cuts.clone(), []).expect("cuts of a completion lie apart").apply(body.as_bytes());
    }
    if let Ok(request) = ChatRequest::parse(body) {
        let _ = request.hazard(false);
        let uuids = request.media.iter().filter_map(|part| part.uuid_cut.clone());
        let inserts = request.media.iter().map(|part| (part.insert_at, b"\"uuid\":\"0\",".to_vec()));
        let edits = Edits::new(request.common.cuts.iter().cloned().chain(uuids), inserts);
        edits.expect("edits of a chat lie apart").apply(body.as_bytes());
    }
    if let Ok(seen) = scan(body, CutPolicy::default(), false) {
        let edits = Edits::new(seen.cuts, []).expect("cuts of a scan lie apart");
        let after = edits.apply(body.as_bytes());
        let after = std::str::from_utf8(&after).expect("cuts fall between characters");
        let again = scan(after, CutPolicy::default(), false).expect("a cut body is JSON still");
        assert!(again.cuts.is_empty(), "{:?} is left in {after}", again.cuts);
    }
});
