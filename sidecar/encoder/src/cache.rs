//! Embeddings by image and encoder, so that an image is encoded once however often it is sent, and its rows are equal to the bit.
//!
//! **Invariant:** bytes held never exceed the budget. **Invariant:** for one key at most one leader encodes at a time; a leader that
//! goes away without an answer wakes all who wait, and they look again.

mod flight;

#[cfg(test)]
mod tests;

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fovea_kv::MediaId;
use tokio::sync::{broadcast, watch};

use crate::tensor::Checked;

use flight::Answer;
pub use flight::{GetError, Joined, Joiner, Leader};

/// What an embedding depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct CacheKey {
    /// Identity of the image's content.
    pub media: MediaId,
    /// Digest of the request's own processing options; 0 = none.
    pub options: u64,
    /// Of the encoder: weights, configuration, preprocessing, dtype, backend and its version.
    pub fingerprint: [u8; 32],
}

impl CacheKey {
    /// What the engine keys the image by. Options enter too when there are any.
    pub fn identity(&self) -> MediaId {
        match self.options {
            0 => identity(&self.media, &self.fingerprint),
            options => {
                let with_options = identity(&self.media, &self.fingerprint);
                let mut hasher = blake3::Hasher::new();
                hasher.update(b"fovea-embedding-options").update(&with_options.0).update(&options.to_le_bytes());
                MediaId(*hasher.finalize().as_bytes())
            }
        }
    }
}

/// The engine-visible id (uuid) of an image encoded by the encoder with this fingerprint:
/// `blake3("fovea-embedding" ‖ media [32 bytes] ‖ fingerprint [32 bytes])`, shown as 64 hex digits.
///
/// An engine keys KV by this alone, so a changed encoder must change it. Balancers compute the same.
pub fn identity(media: &MediaId, fingerprint: &[u8; 32]) -> MediaId {
    fovea_media::identity::encoded_id(media, fingerprint)
}

/// What happened to the set of keys held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    Stored(CacheKey),
    Evicted(CacheKey),
}

/// Counts for metrics; `bytes` and `entries` as they are, the others since the start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheStats {
    pub hits: u64,
    pub misses: u64,
    /// Requests that waited for another's encoding.
    pub joins: u64,
    pub evictions: u64,
    /// Embeddings larger than the whole budget: given out, not kept.
    pub too_large: u64,
    pub bytes: u64,
    pub entries: u64,
}

/// Bounds of the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Rows and book-keeping together.
    pub bytes_max: u64,
    /// Changes that a slow reader of [`EmbeddingCache::changes`] may be behind before it must take the keys anew.
    pub changes_max: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { bytes_max: 2 << 30, changes_max: 4096 }
    }
}

/// Book-keeping of one entry, in bytes.
const ENTRY_BYTES: u64 = 256;

/// What a look-up gives; `E` is why encoding failed.
#[derive(Debug)]
pub enum Look<E> {
    Hit(Arc<Checked>),
    /// Encode it and tell the leader.
    Lead(Leader<E>),
    /// Somebody else does.
    Join(Joiner<E>),
}

/// The cache; clones share it.
#[derive(Debug)]
pub struct EmbeddingCache<E> {
    shared: Arc<Shared<E>>,
}

impl<E> Clone for EmbeddingCache<E> {
    fn clone(&self) -> Self {
        Self { shared: Arc::clone(&self.shared) }
    }
}

#[derive(Debug)]
pub(crate) struct Shared<E> {
    settings: Settings,
    state: Mutex<State<E>>,
    changes: broadcast::Sender<Change>,
}

#[derive(Debug)]
struct State<E> {
    entries: HashMap<CacheKey, Entry>,
    /// The longest unused first.
    order: BTreeMap<u64, CacheKey>,
    flights: HashMap<CacheKey, watch::Receiver<Answer<E>>>,
    tick: u64,
    stats: CacheStats,
}

#[derive(Debug)]
struct Entry {
    rows: Arc<Checked>,
    used: u64,
}

impl<E: Clone + Send + Sync> EmbeddingCache<E> {
    pub fn new(settings: Settings) -> Self {
        let (entries, order, flights) = (HashMap::new(), BTreeMap::new(), HashMap::new());
        let state = Mutex::new(State { entries, order, flights, tick: 0, stats: CacheStats::default() });
        let changes = broadcast::Sender::new(settings.changes_max.max(1));
        Self { shared: Arc::new(Shared { settings, state, changes }) }
    }

    /// Looks a key up; never waits. A leader must be told its outcome or dropped.
    pub fn look(&self, key: CacheKey) -> Look<E> {
        let mut state = self.shared.lock();
        let State { entries, order, flights, tick, stats } = &mut *state;
        if let Some(entry) = entries.get_mut(&key) {
            order.remove(&entry.used);
            *tick += 1;
            entry.used = *tick;
            order.insert(*tick, key);
            stats.hits += 1;
            return Look::Hit(Arc::clone(&entry.rows));
        }
        if let Some(flight) = flights.get(&key) {
            stats.joins += 1;
            return Look::Join(Joiner::new(flight.clone()));
        }
        stats.misses += 1;
        let (told, flight) = watch::channel(Answer::Pending);
        flights.insert(key, flight);
        Look::Lead(Leader::new(Arc::clone(&self.shared), key, told))
    }

    pub fn stats(&self) -> CacheStats {
        self.shared.lock().stats
    }

    /// All keys held at this moment and every change from it on. A reader told that it lagged calls this again.
    pub fn changes(&self) -> (Vec<CacheKey>, broadcast::Receiver<Change>) {
        let state = self.shared.lock();
        (state.entries.keys().copied().collect(), self.shared.changes.subscribe())
    }
}

impl<E> Shared<E> {
    /// The state is whole between any two statements that can panic.
    fn lock(&self) -> MutexGuard<'_, State<E>> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends a flight, and keeps its rows if there are any and they fit.
    fn end_flight(&self, key: &CacheKey, rows: Option<&Arc<Checked>>) {
        let mut state = self.lock();
        state.flights.remove(key);
        let Some(rows) = rows else { return };
        let bytes = cost(rows);
        if bytes > self.settings.bytes_max {
            state.stats.too_large += 1;
            return;
        }
        // An entry cannot be there: a look-up would have hit it before it led.
        debug_assert!(!state.entries.contains_key(key), "one leader per key");
        let State { entries, order, tick, stats, .. } = &mut *state;
        while stats.bytes + bytes > self.settings.bytes_max {
            let Some((_, oldest)) = order.pop_first() else { break };
            if let Some(entry) = entries.remove(&oldest) {
                stats.bytes -= cost(&entry.rows);
                stats.evictions += 1;
                self.tell(Change::Evicted(oldest));
            }
        }
        *tick += 1;
        entries.insert(*key, Entry { rows: Arc::clone(rows), used: *tick });
        order.insert(*tick, *key);
        stats.bytes += bytes;
        stats.entries = entries.len() as u64;
        self.tell(Change::Stored(*key));
    }

    /// Told under the lock, so that changes come in the order in which they happened.
    fn tell(&self, change: Change) {
        // Nobody may be listening.
        let _ = self.changes.send(change);
    }
}

fn cost(rows: &Checked) -> u64 {
    rows.bytes() as u64 + ENTRY_BYTES
}
