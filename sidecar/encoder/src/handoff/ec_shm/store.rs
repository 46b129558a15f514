//! Which files there are, who needs them, and which go when room is short.

use std::collections::{BTreeMap, HashMap};
use std::hash::{BuildHasher, RandomState};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fovea_kv::MediaId;

use super::files::{self, Entry, OpenError};
use super::{EngineState, Settings};
use crate::format::safetensors;
use crate::handoff::HandOffError;
use crate::tensor::Embedding;

/// Longest wait for another request that writes the same image.
const WRITE_WAIT: Duration = Duration::from_secs(10);

/// The files of one folder.
#[derive(Clone, Debug)]
pub struct EcStore {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    settings: Settings,
    state: Mutex<State>,
    /// A write ended.
    written: Condvar,
    /// Makes names of temporary files unlike those of another life of ours.
    unique: AtomicU64,
    opened: Instant,
}

#[derive(Debug, Default)]
struct State {
    files: HashMap<MediaId, File>,
    /// Files that no request holds, the longest unused first.
    idle: BTreeMap<u64, MediaId>,
    tick: u64,
    bytes: u64,
    /// Files found at start that are there still.
    foreign: Vec<MediaId>,
    leases: u64,
    written: u64,
    reused: u64,
    evicted: u64,
    refused: u64,
}

#[derive(Debug)]
struct File {
    bytes: u64,
    leases: u64,
    place: Place,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// Its bytes are counted, its file is not there yet.
    Writing,
    /// There; the number is its key in `idle` while no request holds it.
    Ready { idle: Option<u64> },
    /// Found at start beside a running engine: neither trusted nor removed.
    Foreign,
}

/// Counts for metrics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EcStats {
    pub files: u64,
    pub bytes: u64,
    pub leases: u64,
    pub written: u64,
    pub reused: u64,
    pub evicted: u64,
    /// Images for which there was no room.
    pub refused: u64,
}

/// Holds one file for one request.
#[derive(Debug)]
#[must_use = "dropping a lease lets the file go away"]
pub struct FileLease {
    inner: Arc<Inner>,
    id: MediaId,
}

impl Drop for FileLease {
    fn drop(&mut self) {
        let mut state = self.inner.lock();
        state.leases -= 1;
        let State { files, idle, tick, .. } = &mut *state;
        let Some(file) = files.get_mut(&self.id) else { return };
        file.leases -= 1;
        if file.leases == 0 && file.place == (Place::Ready { idle: None }) {
            *tick += 1;
            file.place = Place::Ready { idle: Some(*tick) };
            idle.insert(*tick, self.id);
        }
    }
}

impl Inner {
    /// The state is whole between any two statements that can panic.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl EcStore {
    /// Opens the folder, makes it if need be, and sees that its file system has room for the whole budget.
    ///
    /// # Errors
    /// When the folder is unsafe, cannot be made or read, or lies where there is not enough space.
    pub fn open(settings: Settings, engine: EngineState) -> Result<Self, OpenError> {
        files::prepare(&settings.folder)?;
        let state = Mutex::default();
        let unique = AtomicU64::new(RandomState::new().hash_one(settings.folder.as_os_str()));
        let store = Self {
            inner: Arc::new(Inner { settings, state, written: Condvar::new(), unique, opened: Instant::now() }),
        };
        match engine {
            EngineState::Quiet => {
                store.engine_quiet()?;
            }
            EngineState::Unknown => {
                let mut state = store.inner.lock();
                for entry in files::scan(store.folder())? {
                    if let Entry::Held { id, bytes } = entry {
                        state.bytes += bytes;
                        state.files.insert(id, File { bytes, leases: 0, place: Place::Foreign });
                        state.foreign.push(id);
                    }
                }
            }
        }
        let wanted = store.inner.settings.bytes_max;
        let free = files::free_bytes(store.folder())?.saturating_add(store.stats().bytes);
        if free < wanted {
            return Err(OpenError::Space { path: store.folder().display().to_string(), free, wanted });
        }
        Ok(store)
    }

    pub fn folder(&self) -> &Path {
        &self.inner.settings.folder
    }

    pub fn stats(&self) -> EcStats {
        let state = self.inner.lock();
        let &State { bytes, leases, written, reused, evicted, refused, .. } = &*state;
        EcStats { files: state.files.len() as u64, bytes, leases, written, reused, evicted, refused }
    }

    /// Removes all files that no request holds, and the folders that engine or crashes left. Call it only while the engine is down or
    /// has no request. Gives the number of files removed.
    ///
    /// # Errors
    /// When the folder cannot be listed.
    pub fn engine_quiet(&self) -> Result<usize, OpenError> {
        let mut removed = 0;
        let mut state = self.inner.lock();
        for entry in files::scan(self.folder())? {
            let path = match entry {
                Entry::Held { id, .. } => {
                    let needed =
                        state.files.get(&id).is_some_and(|file| file.leases > 0 || file.place == Place::Writing);
                    if needed {
                        continue;
                    }
                    removed += 1;
                    state.forget(&id);
                    files::path_of(self.folder(), &id)
                }
                Entry::Empty { path } => {
                    let id = path.file_name().and_then(|name| name.to_str()).and_then(MediaId::from_hex);
                    if !id.is_some_and(|id| state.files.contains_key(&id)) {
                        files::remove_folder(&path);
                    }
                    continue;
                }
            };
            // A file that stays is written over when its id comes again.
            let _ = files::remove(&path);
        }
        Ok(removed)
    }

    /// Sees that the file of an image is there and holds it. Writes it unless it is there already; may block.
    ///
    /// # Errors
    /// When there is no room, or the file system fails.
    pub fn put(&self, id: &MediaId, embedding: &Embedding) -> Result<FileLease, HandOffError> {
        let head = safetensors::ec_head([embedding.rows, embedding.width], embedding.dtype);
        let bytes = (head.len() + embedding.data.len()) as u64;
        let path = files::path_of(self.folder(), id);
        if let Some(lease) = self.reserve(id, bytes, &path)? {
            return Ok(lease);
        }
        // From here on the entry is `Writing`: others wait, and nothing evicts it.
        let unique = self.inner.unique.fetch_add(1, Ordering::Relaxed);
        let written = files::write(&path, unique, &head, &embedding.data);
        let mut state = self.inner.lock();
        state.end_write(id, written.is_ok());
        drop(state);
        self.inner.written.notify_all();
        let lease = || FileLease { inner: Arc::clone(&self.inner), id: *id };
        written.map(|()| lease()).map_err(|source| io_error("write", &path, source))
    }

    /// A lease when the file is there; `None` when the caller must write it, for which its bytes are then counted.
    fn reserve(&self, id: &MediaId, bytes: u64, path: &Path) -> Result<Option<FileLease>, HandOffError> {
        let waited = |state: &mut State| state.files.get(id).is_some_and(|file| file.place == Place::Writing);
        let guard = self.inner.written.wait_timeout_while(self.inner.lock(), WRITE_WAIT, waited);
        let (mut guard, time) = guard.unwrap_or_else(PoisonError::into_inner);
        let state = &mut *guard;
        if time.timed_out() {
            return Err(HandOffError::Busy { waited_ms: WRITE_WAIT.as_millis() as u64 });
        }
        let mut lost = None;
        if let Some(file) = state.files.get_mut(id) {
            // Somebody else may have emptied the folder; a request without its file would end the engine.
            let there = std::fs::metadata(path).is_ok_and(|meta| meta.len() == bytes);
            if let Place::Ready { idle } = file.place
                && there
            {
                idle.map(|key| state.idle.remove(&key));
                file.place = Place::Ready { idle: None };
                file.leases += 1;
                state.leases += 1;
                state.reused += 1;
                return Ok(Some(FileLease { inner: Arc::clone(&self.inner), id: *id }));
            }
            // Gone, perhaps under requests that hold it: written anew for them too.
            if file.leases > 0 {
                lost = Some(File { place: Place::Ready { idle: None }, ..*file });
            }
            state.forget(id);
        }
        let leases = lost.as_ref().map_or(0, |file| file.leases);
        if let Err(error) = self.make_room(state, bytes) {
            // Still held, so still counted.
            if let Some(file) = lost {
                state.bytes += file.bytes;
                state.files.insert(*id, file);
            }
            return Err(error);
        }
        state.bytes += bytes;
        state.files.insert(*id, File { bytes, leases, place: Place::Writing });
        Ok(None)
    }

    /// Removes what was found at start and not written anew since.
    fn drop_foreign(&self, state: &mut State) {
        for id in std::mem::take(&mut state.foreign) {
            if state.files.get(&id).is_some_and(|file| file.place == Place::Foreign) {
                state.forget(&id);
                // A file that stays is written over when its id comes again.
                let _ = files::remove(&files::path_of(self.folder(), &id));
            }
        }
    }

    fn make_room(&self, state: &mut State, bytes: u64) -> Result<(), HandOffError> {
        let Settings { bytes_max: budget, foreign_keep, .. } = self.inner.settings;
        if state.bytes.saturating_add(bytes) <= budget {
            return Ok(());
        }
        if self.inner.opened.elapsed() >= foreign_keep {
            self.drop_foreign(state);
        }
        let idle: u64 = state.idle.values().filter_map(|id| state.files.get(id)).map(|file| file.bytes).sum();
        let free = budget.saturating_sub(state.bytes).saturating_add(idle);
        if bytes > free {
            state.refused += 1;
            return Err(HandOffError::Full { needed: bytes, free, budget });
        }
        while state.bytes + bytes > budget {
            let Some((_, id)) = state.idle.pop_first() else { break };
            state.forget(&id);
            state.evicted += 1;
            let path = files::path_of(self.folder(), &id);
            files::remove(&path).map_err(|source| io_error("remove", &path, source))?;
        }
        Ok(())
    }
}

impl State {
    fn end_write(&mut self, id: &MediaId, whole: bool) {
        let Some(file) = self.files.get_mut(id) else { return };
        if whole {
            file.leases += 1;
            file.place = Place::Ready { idle: None };
            self.written += 1;
            self.leases += 1;
        } else if file.leases > 0 {
            // Not there, but held: the next request for it writes it again.
            file.place = Place::Ready { idle: None };
        } else {
            self.forget(id);
        }
    }

    fn forget(&mut self, id: &MediaId) {
        if let Some(file) = self.files.remove(id) {
            self.bytes -= file.bytes;
            if let Place::Ready { idle: Some(key) } = file.place {
                self.idle.remove(&key);
            }
        }
    }
}

fn io_error(action: &'static str, path: &Path, source: std::io::Error) -> HandOffError {
    HandOffError::Io { action, path: path.display().to_string(), source }
}
