//! Engine events of every dialect: any bytes are events or an error, and what was decoded can be regrouped in any order.
#![no_main]

use fovea_kv::event::KvEvent;
use fovea_kv::regroup::Regroup;
use fovea_kv::trtllm::{self, Media, Puller};
use fovea_kv::{sglang, vllm};
use libfuzzer_sys::fuzz_target;

const MEDIA: Media = Media { placeholder: Some(9), vocab_size: Some(100) };

fuzz_target!(|payload: &[u8]| {
    let batches = [vllm::decode(payload), sglang::decode(payload), trtllm::push(payload, MEDIA)];
    let pulled = Puller::new(MEDIA).pull(payload).unwrap_or_default();
    let _ = trtllm::pull(payload, Media::default());
    let mut regroup = Regroup::new(3).with_max_pages(16);
    let mut out = Vec::new();
    let events = batches.into_iter().flatten().flat_map(|batch| batch.events);
    let events: Vec<KvEvent> = events.chain(pulled.into_iter().filter_map(|one| one.event.ok())).collect();
    for event in events {
        regroup.apply(event, &mut out);
        regroup.check_invariants();
    }
});
