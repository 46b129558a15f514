//! Encoders written in Python: an unchanged Dynamo `VisionEncoderBackend` in a process of its own.
//!
//! Mirrors what Dynamo 1.6 asks of and gives to such a class. The process is ours from start to end: its output is logged, its death or
//! silence fails the requests that it had, and another one is started. Images go to it over a socket, rows come back as files in a
//! private folder, in memory where the machine has one.
//! **Invariant:** nothing that the process does or says can panic us, block us for ever or make us allocate without bound.

mod process;
mod session;
mod supervisor;
mod tensors;
#[cfg(test)]
mod tests;
mod wire;

use std::num::NonZeroU32;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::time::Duration;

use bytes::Bytes;
use serde_json::{Value, json};

use crate::backend::{
    BackendStatus, BuildResult, Built, EncoderSpec, Preprocess, Preprocessed, RawImage, VisionEncoder,
};
use crate::error::{BatchError, BuildError, ItemError};
use crate::tensor::{DType, Embedding};
use session::{CallError, Session};
use supervisor::{Ready, Shared};

/// How a Python encoder is run.
#[derive(Clone, Debug)]
pub struct PythonConfig {
    /// `pkg.mod:Class` or `pkg.mod.Class`.
    pub class: String,
    /// Handed to the encoder's `build`: a folder or a name that the class understands.
    pub model: String,
    /// Of the environment that has what the class imports.
    pub interpreter: PathBuf,
    /// Folders searched for modules, before the interpreter's own.
    pub python_path: Vec<PathBuf>,
    /// `CUDA_VISIBLE_DEVICES` of the process; `None`: ours.
    pub cuda_visible_devices: Option<String>,
    /// Part of the fingerprint: change it when the encoder changes in a way that its files do not show.
    pub revision: Option<String>,
    /// In place of the class's own `preprocess_concurrency`.
    pub preprocess_concurrency: Option<u32>,
    /// For the worker's private folder; `None`: `/dev/shm`, else the system's.
    pub transfer_dir: Option<PathBuf>,
    /// For imports and `build` together.
    pub start_timeout: Duration,
    /// For one image.
    pub preprocess_timeout: Duration,
    /// For one batch; then the process is ended.
    pub forward_timeout: Duration,
    pub close_timeout: Duration,
    /// Between two signs of life that are asked for; without one for the time-out the process is ended.
    pub heartbeat: Duration,
    pub heartbeat_timeout: Duration,
    /// Waits before another start: the first and the longest, doubled in between.
    pub restart_backoff: [Duration; 2],
    scripts: [(&'static str, &'static str); 2],
}

impl PythonConfig {
    pub fn new(class: impl Into<String>, model: impl Into<String>) -> Self {
        Self {
            class: class.into(),
            model: model.into(),
            interpreter: PathBuf::from("python3"),
            python_path: Vec::new(),
            cuda_visible_devices: None,
            revision: None,
            preprocess_concurrency: None,
            transfer_dir: None,
            start_timeout: Duration::from_secs(600),
            preprocess_timeout: Duration::from_secs(30),
            forward_timeout: Duration::from_secs(60),
            close_timeout: Duration::from_secs(10),
            heartbeat: Duration::from_secs(1),
            heartbeat_timeout: Duration::from_secs(30),
            restart_backoff: [Duration::from_secs(1), Duration::from_secs(30)],
            scripts: process::SCRIPTS,
        }
    }
}

/// Why a Python encoder did not start, with the remedy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StartError {
    #[error(
        "encoder.python.interpreter {path:?} cannot be run ({error}): name the python of the encoder's environment"
    )]
    Interpreter { path: PathBuf, error: String },
    #[error("encoder.python.transfer_dir {path:?} cannot be used ({error}): name a folder that we may write to")]
    Folder { path: PathBuf, error: String },
    #[error("encoder.python.class: {0}: write pkg.module:Class")]
    ClassPath(String),
    #[error(
        "encoder.python.class: cannot import {0}: install it for encoder.python.interpreter or name its folder in encoder.python.python_path"
    )]
    Import(String),
    #[error("encoder.python.class: {0}: check the name")]
    ClassMissing(String),
    #[error("encoder.python.class: {0} of dynamo.vllm.multimodal_utils.custom_encoder: derive it from that class")]
    NotABackend(String),
    #[error(
        "encoder.python.class: {0} but preprocess_concurrency is 0, so it would never be called: set it to 1 or more"
    )]
    PreprocessUnused(String),
    #[error("encoder.python.class: attribute {0}: correct the class")]
    Attribute(String),
    #[error("python encoder failed in {0}: see the log for its traceback")]
    Build(String),
    #[error("python encoder ended while it started ({error}): see the log for its last words")]
    Died { error: String },
    #[error(
        "python encoder did not start within {seconds}s: raise encoder.python.start_timeout or make its build faster"
    )]
    TimedOut { seconds: u64 },
}

impl StartError {
    fn from_code(code: &str, message: String) -> Self {
        match code {
            "class_path" => Self::ClassPath(message),
            "import" => Self::Import(message),
            "class_missing" => Self::ClassMissing(message),
            "not_a_backend" => Self::NotABackend(message),
            "preprocess_unused" => Self::PreprocessUnused(message),
            "attribute" => Self::Attribute(message),
            _ => Self::Build(message),
        }
    }
}

impl From<StartError> for BuildError {
    fn from(error: StartError) -> Self {
        match error {
            StartError::Build(_) | StartError::Died { .. } => Self::Failed(error.to_string()),
            other => Self::Config(other.to_string()),
        }
    }
}

/// An encoder in a Python process.
pub struct PythonEncoder {
    shared: Arc<Shared>,
}

/// Its part for any thread.
pub struct PythonPre {
    shared: Arc<Shared>,
    concurrency: u32,
}

/// An image as the worker knows it.
pub enum PythonItem {
    /// Not preprocessed: goes with the batch.
    Raw(RawImage),
    Held(Held),
}

/// An item that lies in the worker until this is dropped.
pub struct Held {
    session: Arc<Session>,
    handle: u64,
}

impl Drop for Held {
    fn drop(&mut self) {
        self.session.drop_item(self.handle);
    }
}

impl PythonEncoder {
    /// Starts the process and waits for the class's `build`.
    ///
    /// # Errors
    /// With the remedy: see [`StartError`].
    pub fn build(config: PythonConfig) -> BuildResult<Self> {
        let shared = Arc::new(Shared::new(config));
        let (sender, first) = sync_channel(1);
        let supervised = shared.clone();
        let body = move || supervisor::run(&supervised, sender);
        let spawned = std::thread::Builder::new().name("encoder-python".into()).spawn(body);
        spawned.map_err(|error| BuildError::Failed(format!("no thread: {error}")))?;
        let encoder = Self { shared: shared.clone() };
        let ready = first.recv().map_err(|_| BuildError::Failed("its supervisor ended".to_owned()))??;
        let spec = spec(&ready);
        let preprocess = Arc::new(PythonPre { shared, concurrency: ready.preprocess_concurrency });
        Ok(Built { encoder, preprocess, spec })
    }

    fn lost(&self, session: &Session, error: CallError) -> BatchError {
        if error == CallError::TimedOut {
            tracing::error!(seconds = self.shared.config.forward_timeout.as_secs(), "python encoder hangs, ending it");
            session.kill();
        }
        BatchError::Unavailable(error.to_string())
    }
}

fn spec(ready: &Ready) -> EncoderSpec {
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"fovea-python-1").update(ready.fingerprint.as_bytes());
    EncoderSpec {
        width: ready.width,
        dtype: ready.dtype.as_deref().and_then(DType::from_name),
        max_batch_cost: ready.max_batch_cost.and_then(NonZeroU32::new),
        max_batch_items: ready.max_batch_items.and_then(NonZeroU32::new),
        buckets: ready.buckets.clone(),
        preprocess_concurrency: ready.preprocess_concurrency as usize,
        deterministic: ready.deterministic,
        fingerprint: *hasher.finalize().as_bytes(),
    }
}

/// What the worker says of an exception, for one image.
fn item_error(fault: &Value) -> ItemError {
    let message = fault["message"].as_str().unwrap_or_default().to_owned();
    match fault["kind"].as_str() {
        Some("invalid") => ItemError::Invalid(message),
        Some("oom") => ItemError::OutOfMemory,
        Some("device") => ItemError::Unavailable,
        _ => ItemError::Internal(message),
    }
}

impl Preprocess for PythonPre {
    type Item = PythonItem;

    fn preprocess(&self, raw: RawImage) -> Result<Preprocessed<PythonItem>, ItemError> {
        if self.concurrency == 0 {
            return Ok(Preprocessed { item: PythonItem::Raw(raw), cost: 1, key: 0 });
        }
        let session = self.shared.session().ok_or(ItemError::Unavailable)?;
        let message = |_| json!({"op": "preprocess", "mime": raw.mime});
        let reply = session.call(message, &[&raw.bytes], self.shared.config.preprocess_timeout);
        let reply = reply.map_err(|error| match error {
            CallError::Lost => ItemError::Unavailable,
            CallError::TimedOut | CallError::TooLong => ItemError::Internal(format!("preprocess: {error}")),
        })?;
        if reply["error"].is_object() {
            return Err(item_error(&reply["error"]));
        }
        let number = |field: &str| reply[field].as_u64().ok_or_else(|| ItemError::Internal(format!("no {field}")));
        let held = Held { handle: number("handle")?, session };
        let cost = u32::try_from(number("cost")?).unwrap_or(u32::MAX);
        Ok(Preprocessed { item: PythonItem::Held(held), cost, key: number("key")? })
    }

    fn status(&self) -> BackendStatus {
        BackendStatus { available: self.shared.session().is_some(), restarts: self.shared.restarts() }
    }
}

impl VisionEncoder for PythonEncoder {
    type Item = PythonItem;
    type Pre = PythonPre;

    fn forward_batch(
        &mut self,
        items: &[PythonItem],
        bucket: Option<u32>,
    ) -> Result<Vec<Result<Embedding, ItemError>>, BatchError> {
        let gone = || BatchError::Unavailable("the worker is being started again".to_owned());
        let session = self.shared.session().ok_or_else(gone)?;
        // An item of an earlier life is lost; those of this one must not suffer for it.
        let here = |item: &&PythonItem| match item {
            PythonItem::Raw(_) => true,
            PythonItem::Held(held) => held.session.epoch == session.epoch,
        };
        let present: Vec<&PythonItem> = items.iter().filter(here).collect();
        if present.is_empty() {
            return Err(gone());
        }
        let mut results = self.forward(&session, &present, bucket)?;
        if present.len() == items.len() || results.len() != present.len() {
            return Ok(results);
        }
        results.reverse();
        let mut next = || results.pop().unwrap_or(Err(ItemError::Unavailable));
        Ok(items.iter().map(|item| if here(&item) { next() } else { Err(ItemError::Unavailable) }).collect())
    }

    fn close(&mut self) {
        self.shared.stop();
        let config = &self.shared.config;
        if let Some(session) = self.shared.session() {
            if session.call(|_| json!({"op": "close"}), &[], config.close_timeout).is_err() {
                session.terminate();
            }
            if !self.shared.wait_ended(Duration::from_secs(2)) {
                session.kill();
            }
        }
        if !self.shared.wait_ended(Duration::from_secs(10)) {
            tracing::error!("python encoder did not end");
        }
    }
}

impl PythonEncoder {
    fn forward(
        &self,
        session: &Session,
        items: &[&PythonItem],
        bucket: Option<u32>,
    ) -> Result<Vec<Result<Embedding, ItemError>>, BatchError> {
        let path = |id: u64, at: usize| session.folder.join(format!("{id}-{at}.rows"));
        let mut message = json!({"op": "forward", "bucket": bucket});
        let mut blobs: Vec<&Bytes> = Vec::new();
        let (mut handles, mut images) = (Vec::new(), Vec::new());
        for item in items {
            match item {
                PythonItem::Held(held) => handles.push(held.handle),
                PythonItem::Raw(raw) => {
                    images.push(json!([raw.bytes.len(), raw.mime]));
                    blobs.push(&raw.bytes);
                }
            }
        }
        // All items of one worker are of one kind.
        let (field, value) = if images.is_empty() { ("handles", json!(handles)) } else { ("images", json!(images)) };
        message[field] = value;
        let mut files = tensors::Files::default();
        let with_files = |id| {
            files.paths = (0..items.len()).map(|at| path(id, at)).collect();
            message["files"] = json!(files.paths);
            message
        };
        let reply = session.call(with_files, &blobs, self.shared.config.forward_timeout);
        let reply = reply.map_err(|error| self.lost(session, error))?;
        if reply["error"].is_object() {
            return Err(self.batch_error(session, &reply["error"]));
        }
        let Some(results) = reply["results"].as_array() else {
            return Err(BatchError::Internal("the worker sent no results".to_owned()));
        };
        let read = |(at, result): (usize, &Value)| match (result["error"].is_object(), files.paths.get(at)) {
            (false, Some(path)) => tensors::read(path, result).map_err(ItemError::Internal),
            (false, None) => Err(ItemError::Internal("one result too many".to_owned())),
            (true, _) => Err(item_error(&result["error"])),
        };
        Ok(results.iter().enumerate().map(read).collect())
    }

    fn batch_error(&self, session: &Session, fault: &Value) -> BatchError {
        let message = fault["message"].as_str().unwrap_or_default().to_owned();
        match fault["kind"].as_str() {
            Some("oom") => BatchError::OutOfMemory,
            Some("invalid") => BatchError::Invalid(message),
            // A device that failed stays failed for the process that saw it.
            Some("device") => {
                tracing::error!(error = message, "python encoder lost its device, ending it");
                session.kill();
                BatchError::Unavailable(message)
            }
            _ => BatchError::Internal(message),
        }
    }
}

impl Drop for PythonEncoder {
    /// For an encoder that was not closed; after [`VisionEncoder::close`] there is nothing left to do.
    fn drop(&mut self) {
        self.shared.stop();
        if let Some(session) = self.shared.session() {
            session.kill();
        }
    }
}
