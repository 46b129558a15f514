//! What images become in the prompts of models whose family has no rule here: asked of an engine's own renderer, once per size.
//!
//! **Invariant:** asking is beside the requests: a size that is not known ends the request's view and is queued, and no client waits.
//! **Invariant:** what goes out is a probe of our own making, never anything that a client sent but two numbers.
//!
//! The renderer sees sizes alone, so no identity comes from it: it stands in for a family's rule, in vLLM pools. Nothing is carried over
//! from one size to another. Mirrors vLLM 0.32–0.33 (`/v1/chat/completions/render`, `/tokenize`).

mod align;
mod answer;
mod ask;
mod metrics;
mod pace;
mod probe;
mod standing;

use std::sync::{Arc, Weak};

use fovea_kv::MediaKey;
use prometheus_client::metrics::counter::Counter;
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use tokio::sync::mpsc;
use xxhash_rust::xxh3::Xxh3;

pub use ask::Asker;
pub use metrics::RenderMetrics;

use crate::prepare::{Learnt, LearntMedia, Preparer, Rendering};
use crate::workers::{Pool, PoolRef};

/// Sizes waiting to be asked, of all pools; more are forgotten until they come again.
const QUEUE_MAX: usize = 256;
/// Sizes kept per pool; the least used go first.
const SIZES_MAX: u64 = 4096;
/// Runs of tokens kept per size in the mean, 8 bytes each: longer ones leave room for fewer.
const RUNS_MEAN: u64 = 256;
/// Pixels of a probe, width times height: its decoding is work for an engine.
const PIXELS_MAX: u64 = 1 << 26;

/// One size of images of one model; a pool may serve several models.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct Size {
    model: u64,
    width: u32,
    height: u32,
}

/// What is known of a size.
#[derive(Clone, Debug)]
enum Entry {
    /// Queued, or being asked.
    Asked,
    /// The engine takes no image of this size, or it becomes too much.
    Refused,
    Known(Arc<Rendering>),
}

#[derive(Clone, Copy)]
struct ByRuns;

impl Weighter<Size, Entry> for ByRuns {
    fn weight(&self, _: &Size, entry: &Entry) -> u64 {
        let runs = match entry {
            Entry::Asked | Entry::Refused => 0,
            Entry::Known(rendering) => rendering.expansion().runs().len() as u64,
        };
        runs.max(RUNS_MEAN)
    }
}

/// What one pool's renderers showed.
pub struct Store(Cache<Size, Entry, ByRuns>);

impl Default for Store {
    fn default() -> Self {
        Self(Cache::with_weighter(SIZES_MAX as usize, SIZES_MAX * RUNS_MEAN, ByRuns))
    }
}

/// A size to be asked.
struct Wanted {
    /// Not kept alive by a queue.
    pool: Weak<Pool>,
    base_names: Arc<[String]>,
    preparer: Arc<Preparer>,
    size: Size,
}

/// Takes the sizes that requests bring. Cheap to call from any thread.
pub struct Renderer {
    queue: mpsc::Sender<Wanted>,
    dropped: Counter,
}

impl Renderer {
    fn want(&self, known: &Known<'_>, size: Size) {
        let store = &known.pool.rendered.0;
        store.insert(size, Entry::Asked);
        let (pool, base_names) = (Arc::downgrade(known.pool), Arc::clone(known.base_names));
        let wanted = Wanted { pool, base_names, preparer: Arc::clone(known.preparer), size };
        if self.queue.try_send(wanted).is_err() {
            store.remove(&size);
            self.dropped.inc();
        }
    }
}

/// All that is known of the media of one model in one pool. What is not known of a size is asked.
pub struct Known<'a> {
    pub pool: &'a PoolRef,
    /// Names of the model.
    pub base_names: &'a Arc<[String]>,
    pub preparer: &'a Arc<Preparer>,
    /// `None` = nothing is asked.
    pub renderer: Option<&'a Renderer>,
}

impl Learnt for Known<'_> {
    fn get(&self, key: &MediaKey) -> Option<LearntMedia> {
        self.pool.learnt.get(key)
    }

    fn rendering(&self, width: u32, height: u32) -> Option<Arc<Rendering>> {
        let renderer = self.renderer?;
        let pixels = u64::from(width) * u64::from(height);
        if pixels == 0 || pixels > PIXELS_MAX {
            return None;
        }
        let size = Size { model: model(self.base_names), width, height };
        match self.pool.rendered.0.get(&size) {
            Some(Entry::Known(rendering)) => Some(rendering),
            Some(Entry::Asked | Entry::Refused) => None,
            None => {
                renderer.want(self, size);
                None
            }
        }
    }
}

/// Names the model among those of its pool: engines of different models may all be started with a path such as `/model`.
fn model(base_names: &[String]) -> u64 {
    let mut hasher = Xxh3::new();
    for name in base_names {
        hasher.update(&(name.len() as u64).to_le_bytes());
        hasher.update(name.as_bytes());
    }
    hasher.digest()
}

#[cfg(test)]
mod tests;
