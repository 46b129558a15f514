//! One child process that says on stdout where it listens.

use std::fs::File;
use std::future::Future;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use anyhow::{Context, bail};
use serde_json::Value;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::time::{Instant, interval, timeout};

/// Longest wait for a program to say that it is ready.
const START_MAX: Duration = Duration::from_secs(60);

/// A running program; killed and reaped on drop.
pub struct Program {
    name: String,
    child: Child,
    /// The one JSON line it printed when ready.
    pub ready: Value,
}

impl Program {
    /// Starts `bin_dir()/name` with `args`, its stderr in `log`, and waits for its ready line.
    ///
    /// # Errors
    /// When it cannot be started, ends, or prints something other than a JSON line within a minute.
    pub async fn start(name: &str, args: &[String], log: &Path) -> anyhow::Result<Self> {
        let path = bin_dir()?.join(name);
        let stderr = File::options().create(true).append(true).open(log)?;
        let mut child = Command::new(&path)
            .args(args)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(stderr)
            .kill_on_drop(true)
            .spawn()
            .with_context(|| format!("cannot start {}; build it first", path.display()))?;
        let stdout = child.stdout.take().context("stdout is piped")?;
        let mut lines = BufReader::new(stdout).lines();
        let line =
            timeout(START_MAX, lines.next_line()).await.with_context(|| format!("{name} is not ready in time"))??;
        let Some(line) = line else { bail!("{name} ended before it was ready: see {}", log.display()) };
        let ready =
            serde_json::from_str(&line).with_context(|| format!("{name} printed {line:?} in place of a JSON line"))?;
        // Keep the pipe open and empty, so that a later print never blocks or kills the program.
        tokio::spawn(async move { while let Ok(Some(_)) = lines.next_line().await {} });
        Ok(Self { name: name.to_owned(), child, ready })
    }

    /// Address that the ready line gives under `key`, e.g. `http`.
    pub fn addr(&self, key: &str) -> anyhow::Result<String> {
        let addr = self.ready.get(key).and_then(Value::as_str);
        Ok(addr.with_context(|| format!("{} names no {key} in its ready line {}", self.name, self.ready))?.to_owned())
    }

    pub fn pid(&self) -> Option<u32> {
        self.child.id()
    }

    /// SIGTERM, then wait for the end.
    ///
    /// # Errors
    /// When the program does not end within `max`; it is killed then.
    pub async fn stop(mut self, max: Duration) -> anyhow::Result<std::process::ExitStatus> {
        let pid = self.pid().context("already ended")?.to_string();
        Command::new("kill").args(["-TERM", &pid]).status().await?;
        match timeout(max, self.child.wait()).await {
            Ok(status) => Ok(status?),
            Err(_) => bail!("{} did not end within {max:?} of SIGTERM", self.name),
        }
    }

    /// SIGKILL: the program dies without a word.
    pub async fn kill(mut self) -> anyhow::Result<()> {
        Ok(self.child.kill().await?)
    }
}

/// Where the built programs lie: beside the running one, or `FOVEA_BIN_DIR`.
pub fn bin_dir() -> anyhow::Result<PathBuf> {
    if let Some(dir) = std::env::var_os("FOVEA_BIN_DIR") {
        return Ok(dir.into());
    }
    let own = std::env::current_exe()?;
    let dir = own.parent().context("a program lies in a folder")?;
    // Test programs lie one level deeper, in `deps`.
    Ok(if dir.ends_with("deps") { dir.parent().unwrap_or(dir).into() } else { dir.into() })
}

/// Asks `state` again and again until it answers `Some`.
///
/// # Errors
/// When it does not within `max`; `what` names the state.
pub async fn eventually<T, F: Future<Output = anyhow::Result<Option<T>>>>(
    what: &str,
    max: Duration,
    mut state: impl FnMut() -> F,
) -> anyhow::Result<T> {
    let end = Instant::now() + max;
    let mut tick = interval(Duration::from_millis(10));
    let mut last = String::new();
    while Instant::now() < end {
        tick.tick().await;
        match state().await {
            Ok(Some(value)) => return Ok(value),
            Ok(None) => {}
            Err(error) => last = format!("; last: {error:#}"),
        }
    }
    bail!("{what}: not within {max:?}{last}")
}
