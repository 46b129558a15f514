//! Keeps a worker process alive: starts it, reads what it says, ends it when it hangs or babbles, starts it again.

use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::SyncSender;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::Pid;
use serde::Deserialize;
use serde_json::{Value, json};

use super::process::{self, Process};
use super::session::Session;
use super::wire::{FrameReader, WireError};
use super::{PythonConfig, StartError};

/// Version of the frames' meaning.
const PROTOCOL: u64 = 1;
/// Between two looks at whether to stop, while a worker starts.
const TICK: Duration = Duration::from_millis(100);
/// A frame that a worker does not take for so long ends it.
const WRITE_TIMEOUT: Duration = Duration::from_secs(30);

/// What a worker says once it is built.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Ready {
    pub max_batch_cost: Option<u32>,
    pub max_batch_items: Option<u32>,
    pub buckets: Vec<u32>,
    pub preprocess_concurrency: u32,
    pub deterministic: bool,
    pub width: Option<u32>,
    pub dtype: Option<String>,
    /// 64 hex digits.
    pub fingerprint: String,
}

#[derive(Default)]
struct State {
    session: Option<Arc<Session>>,
    stopping: bool,
    ended: bool,
}

/// What the supervisor shares with those who use the worker.
pub struct Shared {
    pub config: PythonConfig,
    state: Mutex<State>,
    changed: Condvar,
    restarts: AtomicU64,
}

impl Shared {
    pub fn new(config: PythonConfig) -> Self {
        Self { config, state: Mutex::default(), changed: Condvar::new(), restarts: AtomicU64::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The worker, when one is up.
    pub fn session(&self) -> Option<Arc<Session>> {
        self.lock().session.clone()
    }

    pub fn restarts(&self) -> u64 {
        self.restarts.load(Relaxed)
    }

    fn stopping(&self) -> bool {
        self.lock().stopping
    }

    /// From here on a worker that ends is not started again.
    pub fn stop(&self) {
        self.lock().stopping = true;
        self.changed.notify_all();
    }

    /// Waits until the supervisor has ended; false when `timeout` passed first.
    pub fn wait_ended(&self, timeout: Duration) -> bool {
        let waited = self.changed.wait_timeout_while(self.lock(), timeout, |state| !state.ended);
        waited.unwrap_or_else(PoisonError::into_inner).0.ended
    }

    /// Waits before another start; false when it is time to stop.
    fn pause(&self, delay: Duration) -> bool {
        let waited = self.changed.wait_timeout_while(self.lock(), delay, |state| !state.stopping);
        !waited.unwrap_or_else(PoisonError::into_inner).0.stopping
    }
}

/// A worker that is up.
struct Life {
    process: Process,
    reader: FrameReader,
    session: Arc<Session>,
    ready: Ready,
}

/// Runs until told to stop. The first start's outcome goes to `first`; when it fails there is no second.
pub fn run(shared: &Shared, first: SyncSender<Result<Ready, StartError>>) {
    let [least, most] = shared.config.restart_backoff;
    let (mut first, mut known) = (Some(first), None);
    let mut delay = least;
    for epoch in 0.. {
        let started = Instant::now();
        match launch(shared, epoch) {
            Ok(life) => {
                let wanted = known.get_or_insert_with(|| life.ready.clone());
                let same = *wanted == life.ready;
                if same {
                    shared.lock().session = Some(life.session.clone());
                }
                // After the session is there: whoever waits for the start may call at once.
                if let Some(first) = first.take() {
                    _ = first.send(Ok(life.ready.clone()));
                }
                live(shared, life, same);
            }
            Err(error) => {
                if let Some(first) = first.take() {
                    _ = first.send(Err(error));
                    break;
                }
                tracing::error!(%error, "python encoder did not start again");
            }
        }
        if started.elapsed() > most {
            delay = least;
        }
        if !shared.pause(delay) {
            break;
        }
        delay = (delay * 2).min(most);
        shared.restarts.fetch_add(1, Relaxed);
    }
    shared.lock().ended = true;
    shared.changed.notify_all();
}

fn live(shared: &Shared, mut life: Life, same: bool) {
    if same {
        let why = serve(shared, &mut life);
        shared.lock().session = None;
        if !shared.stopping() {
            tracing::error!(error = %why, "python encoder lost, starting it again");
        }
    } else {
        tracing::error!(
            "python encoder came back as another one (class, model or revision changed): restart the program"
        );
    }
    life.session.end();
    reap(&mut life.process);
}

fn reap(process: &mut Process) {
    if let Err(error) = process.child.wait() {
        tracing::warn!(%error, "python encoder not reaped");
    }
}

fn launch(shared: &Shared, epoch: u64) -> Result<Life, StartError> {
    let mut process = process::start(&shared.config)?;
    let group = Pid::from_child(&process.child);
    let writer = process.socket.try_clone().and_then(|socket| {
        socket.set_write_timeout(Some(WRITE_TIMEOUT))?;
        process.socket.set_read_timeout(Some(TICK))?;
        Ok(socket)
    });
    let writer = writer.map_err(|error| StartError::Died { error: error.to_string() })?;
    let folder = process.folder.path().to_owned();
    let session = Arc::new(Session::new(epoch, folder, Some(group), writer));
    let mut reader = FrameReader::default();
    match greet(shared, &session, &mut process.socket, &mut reader) {
        Ok(ready) => Ok(Life { process, reader, session, ready }),
        Err(error) => {
            session.end();
            reap(&mut process);
            Err(error)
        }
    }
}

fn greet(
    shared: &Shared,
    session: &Session,
    socket: &mut UnixStream,
    reader: &mut FrameReader,
) -> Result<Ready, StartError> {
    let config = &shared.config;
    let until = Instant::now() + config.start_timeout;
    let hello = next(shared, socket, reader, until)?;
    if hello["op"] != "hello" || hello["protocol"] != PROTOCOL {
        return Err(StartError::Died { error: "it speaks another protocol".to_owned() });
    }
    let build = json!({
        "class": config.class, "model": config.model, "path": config.python_path, "revision": config.revision,
        "preprocess_concurrency": config.preprocess_concurrency,
    });
    session.send(build, &[]).map_err(|error| StartError::Died { error: error.to_string() })?;
    let answer = next(shared, socket, reader, until)?;
    if answer["op"] == "failed" {
        let text = |field: &str| answer[field].as_str().unwrap_or_default().to_owned();
        return Err(StartError::from_code(&text("code"), text("message")));
    }
    let ready = Ready::deserialize(&answer);
    socket.set_read_timeout(Some(config.heartbeat)).map_err(|error| StartError::Died { error: error.to_string() })?;
    session.hear();
    ready.map_err(|error| StartError::Died { error: format!("it speaks another protocol: {error}") })
}

fn next(
    shared: &Shared,
    socket: &mut UnixStream,
    reader: &mut FrameReader,
    until: Instant,
) -> Result<Value, StartError> {
    loop {
        match reader.read(socket) {
            Ok(Some(value)) => return Ok(value),
            Ok(None) if Instant::now() >= until => {
                return Err(StartError::TimedOut { seconds: shared.config.start_timeout.as_secs() });
            }
            Ok(None) if shared.stopping() => return Err(StartError::Died { error: "told to stop".to_owned() }),
            Ok(None) => {}
            Err(error) => return Err(StartError::Died { error: error.to_string() }),
        }
    }
}

/// Why a worker's life ended.
#[derive(Debug, thiserror::Error)]
enum End {
    #[error(transparent)]
    Wire(#[from] WireError),
    #[error("it has been silent for {}s", .0.as_secs())]
    Silent(Duration),
    #[error("it speaks another protocol: a message without id")]
    NoId,
}

/// Reads until the worker ends or must be ended.
fn serve(shared: &Shared, life: &mut Life) -> End {
    let session = life.session.clone();
    loop {
        match life.reader.read(&mut life.process.socket) {
            Ok(Some(message)) => {
                session.hear();
                match message["id"].as_u64() {
                    Some(id) => session.resolve(id, message),
                    None if message["op"] == "pong" => {}
                    None => return End::NoId,
                }
            }
            Ok(None) if session.silence() > shared.config.heartbeat_timeout => return End::Silent(session.silence()),
            // A worker that does not take it is met as silent, or as gone, in the next round.
            Ok(None) => _ = session.send(json!({"op": "ping"}), &[]),
            Err(error) => return error.into(),
        }
    }
}
