//! Time to make the sequence hashes of 8000 tokens with four images of 1024 tokens each, at 16 tokens a block.

use std::hint::black_box;
use std::time::Instant;

use fovea_kv::{BlockSize, MediaId, RoutingView, root};

use crate::workload::mix;

pub fn p50_us() -> f64 {
    let mut view = RoutingView::default();
    for image in 0..4_u8 {
        (0..976).for_each(|at| view.push(mix(u64::from(image) << 16 | at) as u32 % 150_000, 1));
        view.mark(view.len(), 1024, MediaId([image; 32]));
        view.push(151_655, 1024);
    }
    assert_eq!(view.len(), 8000);
    let (size, root) = (BlockSize::new(16).expect("not 0"), root("", ""));
    let mut out = Vec::new();
    let mut times: Vec<_> = (0..5000)
        .map(|_| {
            out.clear();
            let start = Instant::now();
            black_box(&view).sequence_hashes(size, root, &mut out);
            black_box(&out);
            start.elapsed().as_nanos()
        })
        .collect();
    times.sort_unstable();
    times[times.len() / 2] as f64 / 1000.0
}
