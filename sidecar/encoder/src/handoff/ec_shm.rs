//! vLLM's `ECExampleConnector` as a consumer: rows in a file of a shared folder, and a request of 320 bytes (measured on 0.32.0).
//!
//! File: `<folder>/<id>/encoder_cache.safetensors`, one tensor `ec_cache`. The engine looks whether it exists, twice, and opens it later.
//! **Invariant:** a file appears whole or not at all, and before the request is sent; it stays while any request that names it lives. An
//! engine that misses a file it has seen ends.
//! **Invariant:** no file is changed in place: its name holds the encoder's fingerprint, so that equal names mean equal rows.

mod files;
mod store;

#[cfg(test)]
mod tests;

use std::path::PathBuf;
use std::time::Duration;

use bytes::Bytes;

use super::flags::{CommandLine, Requirement};
use super::{EncodedImage, HandOff, HandOffError, Lease, part_head};
use crate::tensor::{EngineTensor, Expect};

pub use files::OpenError;
pub use store::{EcStats, EcStore, FileLease};

/// Where files go, and how many bytes of them there may be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The engine's `shared_storage_path`. The engine makes folders in it as well, so both must be able to write it.
    pub folder: PathBuf,
    pub bytes_max: u64,
    /// Files found at start beside a running engine may be read by requests of a sidecar before; so long they stay.
    pub foreign_keep: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self { folder: "/dev/shm/fovea-ec".into(), bytes_max: 8 << 30, foreign_keep: Duration::from_secs(10) }
    }
}

/// What is known of the engine when the folder is opened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineState {
    /// Down, or up without a request: what lies in the folder is not needed.
    Quiet,
    /// It may be reading: what lies there stays for [`Settings::foreign_keep`], or until [`EcStore::engine_quiet`].
    Unknown,
}

const FLAG: &str = "--ec-transfer-config";

/// The hand-off over one folder.
#[derive(Debug)]
pub struct EcShm {
    model: EngineTensor,
    store: EcStore,
}

impl EcShm {
    pub fn new(model: EngineTensor, store: EcStore) -> Self {
        Self { model, store }
    }

    pub fn store(&self) -> &EcStore {
        &self.store
    }
}

/// Folder that an engine's command line names.
pub fn folder_of(command_line: &CommandLine) -> Option<PathBuf> {
    let json: serde_json::Value = serde_json::from_str(command_line.value(FLAG)?).ok()?;
    json.pointer("/ec_connector_extra_config/shared_storage_path")?.as_str().map(PathBuf::from)
}

/// The flag with its whole value, for one folder.
pub fn requirement(folder: &std::path::Path) -> Requirement {
    let path = folder.display().to_string();
    let value = serde_json::json!({
        "ec_connector": "ECExampleConnector",
        "ec_role": "ec_consumer",
        "ec_connector_extra_config": {"shared_storage_path": path},
    });
    Requirement {
        flag: FLAG,
        value: Some(value.to_string()),
        fields: vec![
            ("/ec_connector", "ECExampleConnector".to_owned()),
            ("/ec_role", "ec_consumer|ec_both".to_owned()),
            ("/ec_connector_extra_config/shared_storage_path", path),
        ],
        without: "it answers 400 to every image or, with another folder, ends at the first",
        // A request that names a file the engine does not find ends it: only the command line can tell.
        probe: None,
    }
}

impl HandOff for EcShm {
    fn name(&self) -> &'static str {
        "vllm-ec-shm"
    }

    fn expect(&self, rows: Option<u32>) -> Expect {
        self.model.expect(rows)
    }

    fn requirements(&self) -> Vec<Requirement> {
        vec![requirement(self.store.folder())]
    }

    fn part(&self, image: &EncodedImage) -> Result<(Bytes, Lease), HandOffError> {
        image.embedding.suits(&self.expect(None))?;
        let [t, h, w] = image.embedding.grid().ok_or(crate::tensor::CheckError::NoGrid)?;
        let lease = self.store.put(&image.id, image.embedding.embedding())?;
        let mut out = part_head(&image.id, 64);
        out.extend_from_slice(format!(r#"{{"image_grid_thw":[{t},{h},{w}]}}}}"#).as_bytes());
        Ok((out.into(), Lease::holding(lease)))
    }

    fn files(&self) -> Option<EcStats> {
        Some(self.store.stats())
    }
}
