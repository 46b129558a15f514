//! The folder of the connector: what may lie in it, and the few calls that change it.

use std::fs::{self, DirBuilder, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use fovea_kv::MediaId;

pub(super) const FILE: &str = "encoder_cache.safetensors";

/// Folders looked at when the folder is opened; an engine makes one for every image that it meets.
const FOLDERS_MAX: usize = 1 << 20;

/// Why a folder cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("encoder.handoff.path {path} is no folder of its own (a link or a file): name another")]
    NoFolder { path: String },
    #[error("encoder.handoff.path {path} must be absolute and not a top folder: /dev/shm/fovea-ec is usual")]
    Path { path: String },
    #[error("encoder.handoff.path {path}: cannot {action}")]
    Io {
        action: &'static str,
        path: String,
        #[source]
        source: io::Error,
    },
    #[error(
        "encoder.handoff.path {path}: its file system has {free} bytes free, encoder.handoff.bytes is {wanted}: \
         lower it, or give the container more shared memory (64 MiB is Docker's default)"
    )]
    Space { path: String, free: u64, wanted: u64 },
    #[error("encoder.handoff.path {path} holds more than {FOLDERS_MAX} entries: stop the engine and empty it")]
    TooMany { path: String },
}

/// Makes the folder and sees that it is one.
pub(super) fn prepare(folder: &Path) -> Result<(), OpenError> {
    let path = folder.display().to_string();
    if !folder.is_absolute() || folder.components().count() < 3 {
        return Err(OpenError::Path { path });
    }
    let io = |action| {
        let path = path.clone();
        move |source| OpenError::Io { action, path, source }
    };
    DirBuilder::new().recursive(true).create(folder).map_err(io("create it"))?;
    let kind = fs::symlink_metadata(folder).map_err(io("look at it"))?;
    if kind.is_dir() { Ok(()) } else { Err(OpenError::NoFolder { path }) }
}

/// Bytes that can be written to the folder's file system.
pub(super) fn free_bytes(folder: &Path) -> Result<u64, OpenError> {
    let path = folder.display().to_string();
    let stat = rustix::fs::statvfs(folder);
    let stat = stat.map_err(|error| OpenError::Io { action: "ask for free space", path, source: error.into() })?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// What an entry of the folder is.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Entry {
    /// A file under one of our ids, with its size.
    Held { id: MediaId, bytes: u64 },
    /// A folder without a whole file: made by the engine, or left by a crash.
    Empty { path: PathBuf },
}

/// All entries whose names are ids of ours or that the engine made for an id; other names are not touched.
pub(super) fn scan(folder: &Path) -> Result<Vec<Entry>, OpenError> {
    let path = folder.display().to_string();
    let io = |source| OpenError::Io { action: "list it", path: path.clone(), source };
    let mut found = Vec::new();
    for (count, entry) in fs::read_dir(folder).map_err(io)?.enumerate() {
        if count >= FOLDERS_MAX {
            return Err(OpenError::TooMany { path });
        }
        let entry = entry.map_err(io)?;
        let name = entry.file_name();
        let Some(name) = name.to_str().filter(|name| is_id(name)) else { continue };
        if !entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            continue;
        }
        let bytes =
            fs::symlink_metadata(entry.path().join(FILE)).ok().filter(fs::Metadata::is_file).map(|meta| meta.len());
        found.push(match (MediaId::from_hex(name), bytes) {
            (Some(id), Some(bytes)) => Entry::Held { id, bytes },
            _ => Entry::Empty { path: entry.path() },
        });
    }
    Ok(found)
}

/// Names that an id of ours or of an engine has: 16 to 64 lower-case hex digits.
fn is_id(name: &str) -> bool {
    (16..=64).contains(&name.len()) && name.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// Where the file of an id lies. The name is made of an id's digits alone.
pub(super) fn path_of(folder: &Path, id: &MediaId) -> PathBuf {
    folder.join(id.to_string()).join(FILE)
}

/// Writes head and data under a name of its own and renames it, so that a reader sees all or nothing.
pub(super) fn write(path: &Path, unique: u64, head: &[u8], data: &[u8]) -> io::Result<()> {
    let folder = path.parent().ok_or(io::ErrorKind::InvalidInput)?;
    DirBuilder::new().recursive(true).create(folder)?;
    let temporary = folder.join(format!("{FILE}.{unique:016x}"));
    // Never follows a link that somebody put there.
    let written = OpenOptions::new().write(true).create_new(true).open(&temporary).and_then(|mut file| {
        file.write_all(head)?;
        file.write_all(data)
    });
    let renamed = written.and_then(|()| fs::rename(&temporary, path));
    if renamed.is_err() {
        // Best effort: what stays is removed when the folder is.
        let _ = fs::remove_file(&temporary);
        let _ = fs::remove_dir(folder);
    }
    renamed
}

/// Removes a file, what a crash left beside it, and then its folder.
pub(super) fn remove(path: &Path) -> io::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        _ => (),
    }
    if let Some(folder) = path.parent() {
        remove_folder(folder);
    }
    Ok(())
}

/// Removes a folder that holds no whole file. Temporary files in it go; anything else keeps it.
pub(super) fn remove_folder(folder: &Path) {
    if fs::remove_dir(folder).is_ok() {
        return;
    }
    let Ok(entries) = fs::read_dir(folder) else { return };
    for entry in entries.flatten().take(1024) {
        if entry
            .file_name()
            .to_str()
            .is_some_and(|name| name.strip_prefix(FILE).is_some_and(|end| end.starts_with('.')))
        {
            let _ = fs::remove_file(entry.path());
        }
    }
    let _ = fs::remove_dir(folder);
}
