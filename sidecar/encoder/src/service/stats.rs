//! Counters of one encoder. Relaxed: they are read for metrics alone.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use crate::error::{EncodeError, ErrorKind};

/// What an encoder did since its start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Stats {
    pub requests: u64,
    pub images: u64,
    pub batches: u64,
    /// Images and cost of all batches; another try counts again.
    pub batch_items: u64,
    pub batch_cost: u64,
    /// Sum of the buckets that batches were padded to; those without one count their cost.
    pub batch_padded_cost: u64,
    pub preprocess_seconds: f64,
    /// From submission to the first forward pass, summed over requests.
    pub queue_seconds: f64,
    pub forward_seconds: f64,
    /// Failed requests, by [`ErrorKind`] in the order of [`ErrorKind::ALL`].
    pub errors: [u64; ErrorKind::ALL.len()],
    pub restarts: u64,
    pub queued_cost: u64,
    pub pending_images: u64,
}

impl Stats {
    pub fn errors_of(&self, kind: ErrorKind) -> u64 {
        self.errors[kind as usize]
    }
}

#[derive(Default)]
pub(super) struct Counters {
    requests: AtomicU64,
    images: AtomicU64,
    batches: AtomicU64,
    batch_items: AtomicU64,
    batch_cost: AtomicU64,
    batch_padded_cost: AtomicU64,
    preprocess_ns: AtomicU64,
    queue_ns: AtomicU64,
    forward_ns: AtomicU64,
    errors: [AtomicU64; ErrorKind::ALL.len()],
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}

impl Counters {
    pub fn request(&self, images: usize) {
        self.requests.fetch_add(1, Relaxed);
        self.images.fetch_add(images as u64, Relaxed);
    }

    pub fn preprocessed(&self, took: Duration) {
        self.preprocess_ns.fetch_add(nanoseconds(took), Relaxed);
    }

    pub fn queued(&self, took: Duration) {
        self.queue_ns.fetch_add(nanoseconds(took), Relaxed);
    }

    pub fn batch(&self, items: usize, cost: u64, bucket: Option<u32>) {
        self.batches.fetch_add(1, Relaxed);
        self.batch_items.fetch_add(items as u64, Relaxed);
        self.batch_cost.fetch_add(cost, Relaxed);
        self.batch_padded_cost.fetch_add(bucket.map_or(cost, u64::from), Relaxed);
    }

    pub fn forward(&self, took: Duration) {
        self.forward_ns.fetch_add(nanoseconds(took), Relaxed);
    }

    pub fn failed(&self, error: &EncodeError) {
        self.errors[error.kind() as usize].fetch_add(1, Relaxed);
    }

    pub fn snapshot(&self) -> Stats {
        let seconds = |counter: &AtomicU64| counter.load(Relaxed) as f64 / 1e9;
        Stats {
            requests: self.requests.load(Relaxed),
            images: self.images.load(Relaxed),
            batches: self.batches.load(Relaxed),
            batch_items: self.batch_items.load(Relaxed),
            batch_cost: self.batch_cost.load(Relaxed),
            batch_padded_cost: self.batch_padded_cost.load(Relaxed),
            preprocess_seconds: seconds(&self.preprocess_ns),
            queue_seconds: seconds(&self.queue_ns),
            forward_seconds: seconds(&self.forward_ns),
            errors: std::array::from_fn(|at| self.errors[at].load(Relaxed)),
            ..Stats::default()
        }
    }
}
