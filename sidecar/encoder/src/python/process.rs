//! Starting a worker process: its private folder, its socket, its output into our log.

use std::fs::{self, Permissions};
use std::io::{self, BufRead, BufReader, Read};
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

use super::{PythonConfig, StartError};

/// Longest piece of a line that is logged at once, in bytes.
const LINE_MAX: u64 = 4096;

/// Our programs for the interpreter, by file name.
pub const SCRIPTS: [(&str, &str); 2] = [
    ("fovea_worker.py", include_str!("../../python/fovea_worker.py")),
    ("fovea_shim.py", include_str!("../../python/fovea_shim.py")),
];

pub struct Process {
    pub child: Child,
    pub socket: UnixStream,
    /// Goes when the process does, with all that is left in it.
    pub folder: TempDir,
}

/// Memory-backed where there is such a folder: tensors pass through it.
fn base(config: &PythonConfig) -> PathBuf {
    let shared = Path::new("/dev/shm");
    let default = || if shared.is_dir() { shared.to_owned() } else { std::env::temp_dir() };
    config.transfer_dir.clone().unwrap_or_else(default)
}

fn folder(config: &PythonConfig) -> io::Result<TempDir> {
    let private = Permissions::from_mode(0o700);
    let folder = tempfile::Builder::new().prefix("fovea-encoder-").permissions(private).tempdir_in(base(config))?;
    for (name, text) in config.scripts {
        fs::write(folder.path().join(name), text)?;
    }
    Ok(folder)
}

pub fn start(config: &PythonConfig) -> Result<Process, StartError> {
    let no_folder = |error: io::Error| StartError::Folder { path: base(config), error: error.to_string() };
    let folder = folder(config).map_err(no_folder)?;
    let (socket, theirs) = UnixStream::pair().map_err(no_folder)?;
    let mut command = Command::new(&config.interpreter);
    // Unbuffered, so that the last words before a crash are logged.
    command.arg("-u").arg(folder.path().join(config.scripts[0].0));
    command.stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.process_group(0).env("PYTHONDONTWRITEBYTECODE", "1");
    if let Some(devices) = &config.cuda_visible_devices {
        command.env("CUDA_VISIBLE_DEVICES", devices);
    }
    let spawned = command.spawn();
    let mut child = spawned
        .map_err(|error| StartError::Interpreter { path: config.interpreter.clone(), error: error.to_string() })?;
    // The command holds the other end of the socket: without this a worker's death would go unnoticed.
    drop(command);
    if let Some(output) = child.stdout.take() {
        pump("stdout", output);
    }
    if let Some(output) = child.stderr.take() {
        pump("stderr", output);
    }
    Ok(Process { child, socket, folder })
}

/// Passes a stream on to the log until it ends.
fn pump(stream: &'static str, output: impl Read + Send + 'static) {
    let body = move || {
        let mut output = BufReader::new(output);
        let mut line = Vec::new();
        while let Ok(1..) = output.by_ref().take(LINE_MAX).read_until(b'\n', &mut line) {
            let text = String::from_utf8_lossy(&line);
            tracing::info!(stream, line = text.trim_end(), "python encoder");
            line.clear();
        }
    };
    if let Err(error) = std::thread::Builder::new().name("encoder-log".into()).spawn(body) {
        tracing::warn!(%error, stream, "output of the python encoder is not logged");
    }
}
