//! One life of a worker process, as those who call it see it.

use std::collections::HashMap;
use std::io::Write;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use rustix::process::{Pid, Signal, kill_process_group};
use serde_json::{Value, json};

use super::wire;

/// Why a call has no reply.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CallError {
    #[error("the worker ended")]
    Lost,
    #[error("the worker gave no answer in time")]
    TimedOut,
    #[error("more than 2 GiB of images at once")]
    TooLong,
}

/// Replies that are waited for; `None` once the worker is gone.
type Pending = Option<HashMap<u64, SyncSender<Value>>>;

pub struct Session {
    /// Tells the lives of one worker apart.
    pub epoch: u64,
    /// Where tensors are put; goes with the session.
    pub folder: PathBuf,
    /// `None` once the process was reaped: its id may then be another's.
    group: Mutex<Option<Pid>>,
    writer: Mutex<UnixStream>,
    pending: Mutex<Pending>,
    heard: Mutex<Instant>,
    /// Items of the worker that nobody needs any more; told with the next frame.
    drops: Mutex<Vec<u64>>,
    next_id: AtomicU64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Session {
    pub fn new(epoch: u64, folder: PathBuf, group: Option<Pid>, writer: UnixStream) -> Self {
        Self {
            epoch,
            folder,
            group: Mutex::new(group),
            writer: Mutex::new(writer),
            pending: Mutex::new(Some(HashMap::new())),
            heard: Mutex::new(Instant::now()),
            drops: Mutex::default(),
            next_id: AtomicU64::new(1),
        }
    }

    /// Sends a message with bytes behind it and waits for its reply. `next` makes the message from its id.
    pub fn call(
        &self,
        next: impl FnOnce(u64) -> Value,
        blobs: &[&Bytes],
        timeout: Duration,
    ) -> Result<Value, CallError> {
        let id = self.next_id.fetch_add(1, Relaxed);
        let mut message = next(id);
        message["id"] = id.into();
        let (sender, receiver) = sync_channel(1);
        lock(&self.pending).as_mut().ok_or(CallError::Lost)?.insert(id, sender);
        if let Err(error) = self.send(message, blobs) {
            self.forget(id);
            return Err(error);
        }
        let reply = receiver.recv_timeout(timeout);
        self.forget(id);
        reply.map_err(|error| match error {
            RecvTimeoutError::Timeout => CallError::TimedOut,
            RecvTimeoutError::Disconnected => CallError::Lost,
        })
    }

    fn forget(&self, id: u64) {
        if let Some(pending) = lock(&self.pending).as_mut() {
            pending.remove(&id);
        }
    }

    /// A frame that was not written whole ends the worker: what follows would be misread.
    pub fn send(&self, mut message: Value, blobs: &[&Bytes]) -> Result<(), CallError> {
        let bytes: usize = blobs.iter().map(|blob| blob.len()).sum();
        let bytes = u32::try_from(bytes).ok().filter(|&bytes| bytes < 1 << 31).ok_or(CallError::TooLong)?;
        let drops = std::mem::take(&mut *lock(&self.drops));
        if !drops.is_empty() {
            message["drop"] = json!(drops);
        }
        let head = wire::head(&message, bytes);
        let mut writer = lock(&self.writer);
        let mut written = writer.write_all(&head);
        for blob in blobs {
            written = written.and_then(|()| writer.write_all(blob));
        }
        drop(writer);
        written.map_err(|_| {
            self.kill();
            CallError::Lost
        })
    }

    /// Gives a reply to whoever waits for it; one that came too late is nobody's, and so is the item that it names.
    pub fn resolve(&self, id: u64, reply: Value) {
        let sender = lock(&self.pending).as_mut().and_then(|pending| pending.remove(&id));
        let unread = match sender {
            Some(sender) => sender.try_send(reply).err().map(|error| match error {
                TrySendError::Full(reply) | TrySendError::Disconnected(reply) => reply,
            }),
            None => Some(reply),
        };
        if let Some(handle) = unread.and_then(|reply| reply["handle"].as_u64()) {
            self.drop_item(handle);
        }
    }

    /// Notes a sign of life.
    pub fn hear(&self) {
        *lock(&self.heard) = Instant::now();
    }

    pub fn silence(&self) -> Duration {
        lock(&self.heard).elapsed()
    }

    /// Lets the worker forget an item.
    pub fn drop_item(&self, handle: u64) {
        lock(&self.drops).push(handle);
    }

    fn signal(&self, signal: Signal) {
        if let Some(group) = *lock(&self.group) {
            // The group may have ended by itself.
            _ = kill_process_group(group, signal);
        }
    }

    pub fn terminate(&self) {
        self.signal(Signal::TERM);
    }

    /// Ends the process and its children, and wakes everybody who waits.
    pub fn kill(&self) {
        self.signal(Signal::KILL);
        _ = lock(&self.writer).shutdown(Shutdown::Both);
    }

    /// After this no call succeeds and no signal is sent.
    pub fn end(&self) {
        self.kill();
        *lock(&self.group) = None;
        *lock(&self.pending) = None;
    }
}
