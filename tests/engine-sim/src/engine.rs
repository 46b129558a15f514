//! The engine task: turns scheduler steps into time, and step ends into tokens and events.

use crate::blocks::BlockPool;
use crate::config::SimConfig;
use crate::fault::Fault;
use crate::hash::{BlockHasher, Digest};
use crate::prompt::{MediaCache, Model};
use crate::publisher::{Command, Published};
use crate::scheduler::{Counts, Job, Limits, Progress, Scheduler, Step};
use serde::Serialize;
use serde_json::Value;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

/// What HTTP handlers and the engine task share.
pub struct Engine {
    /// Settings.
    pub config: SimConfig,
    /// The model directory.
    pub model: Arc<Model>,
    /// Processor cache.
    pub media: Mutex<MediaCache>,
    /// What went out on the event socket.
    pub published: Arc<Published>,
    /// Where events are published.
    pub sources: Sources,
    /// Ends all tasks; cancelled by the owner or by the fault `die`.
    pub stop: CancellationToken,
    died: AtomicBool,
    scheduler: Mutex<Scheduler>,
    wake: Arc<Notify>,
    commands: mpsc::Sender<Command>,
    faults: Mutex<RequestFaults>,
    request_number: AtomicU64,
}

/// Addresses and topic of the event sockets.
#[derive(Clone, Debug)]
pub struct Sources {
    /// `tcp://…` of the event socket.
    pub events: String,
    /// `tcp://…` of the replay socket.
    pub replay: String,
    /// First frame of each message.
    pub topic: String,
}

struct RequestFaults {
    errors: u64,
    status: u16,
    slow: f64,
}

/// Tokens of one HTTP request's answers. Dropping it aborts what is not finished.
pub struct Answers {
    /// `None` before the last token of all answers = the engine died.
    pub progress: mpsc::Receiver<Progress>,
    wake: Arc<Notify>,
}

impl Drop for Answers {
    fn drop(&mut self) {
        self.progress.close();
        self.wake.notify_one();
    }
}

/// The engine as tests see it (`GET /sim/state`).
#[derive(Clone, Debug, Serialize)]
pub struct State {
    /// Sums and queue lengths.
    #[serde(flatten)]
    pub counts: Counts,
    /// Hashes in the prefix cache, as events carry them (bytes as hex), each once.
    pub cached_blocks: Vec<Value>,
    /// Hashes in the CPU tier, likewise.
    pub cpu_blocks: Vec<Value>,
    /// Next event sequence number.
    pub next_seq: u64,
    /// Subscriptions seen by the event socket since the last restart.
    pub subscriptions: u64,
    /// Restarts finished.
    pub restarts: u64,
}

/// The queue is full.
#[derive(Debug, thiserror::Error)]
#[error("the engine's waiting queue is full")]
pub struct QueueFull;

impl Engine {
    /// An idle engine; `commands` leads to its publisher.
    pub fn new(
        config: SimConfig,
        model: Arc<Model>,
        published: Arc<Published>,
        commands: mpsc::Sender<Command>,
        sources: Sources,
    ) -> Self {
        let limits = Limits {
            running: config.max_running,
            waiting: config.max_waiting,
            step_tokens: config.step_tokens,
            encoder_images: config.encoder_cache_images,
        };
        let scheduler = Scheduler::new(Arc::clone(&model), new_pool(&config), limits);
        Self {
            model,
            media: Mutex::default(),
            published,
            sources,
            stop: CancellationToken::new(),
            died: AtomicBool::new(false),
            scheduler: Mutex::new(scheduler),
            wake: Arc::new(Notify::new()),
            commands,
            faults: Mutex::new(RequestFaults { errors: 0, status: 500, slow: 1.0 }),
            request_number: AtomicU64::new(0),
            config,
        }
    }

    /// Runs steps until `self.stop`.
    pub async fn run(self: Arc<Self>) {
        let work = async {
            loop {
                let step = self.scheduler().begin_step();
                self.published.note_change();
                match step {
                    Some(step) => self.run_step(step).await,
                    None => self.wake.notified().await,
                }
            }
        };
        tokio::select! {
            () = self.stop.cancelled() => {}
            () = work => {}
        }
    }

    async fn run_step(&self, step: Step) {
        let done = tokio::time::sleep(self.duration(step));
        tokio::pin!(done);
        if self.config.speed > 0.0 {
            loop {
                tokio::select! {
                    () = &mut done => break,
                    () = self.wake.notified() => {
                        if self.scheduler().sweep() {
                            self.published.note_change();
                        }
                    }
                }
            }
        } else {
            tokio::task::yield_now().await;
        }
        let events = self.scheduler().end_step(step);
        if !events.is_empty() {
            // A full queue holds the scheduler up, as vLLM's does.
            let _ = self.commands.send(Command::Batch(events)).await;
        }
        self.published.note_change();
    }

    fn duration(&self, step: Step) -> Duration {
        let config = &self.config;
        if config.speed <= 0.0 {
            return Duration::ZERO;
        }
        #[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^53")]
        let seconds = step.prefill_tokens as f64 / config.prefill_tps
            + step.image_tokens as f64 * config.encoder_ms_per_token / 1e3
            + if step.decode_tokens > 0 { config.decode_ms / 1e3 } else { 0.0 };
        let slow = lock(&self.faults).slow;
        Duration::try_from_secs_f64(seconds * slow / config.speed).unwrap_or(Duration::from_secs(3600))
    }

    fn scheduler(&self) -> MutexGuard<'_, Scheduler> {
        lock(&self.scheduler)
    }

    /// Queues the jobs of one HTTP request, all or none. `jobs` makes them, given the channel for their tokens.
    ///
    /// # Errors
    /// The queue is full.
    pub fn submit(
        &self,
        tokens_max: usize,
        jobs: impl FnOnce(&mpsc::Sender<Progress>) -> Vec<Job>,
    ) -> Result<Answers, QueueFull> {
        let (output, progress) = mpsc::channel(tokens_max.max(1));
        let answers = Answers { progress, wake: Arc::clone(&self.wake) };
        {
            let mut scheduler = self.scheduler();
            for job in jobs(&output) {
                scheduler.submit(job).map_err(|_| QueueFull)?;
            }
        }
        self.wake.notify_one();
        Ok(answers)
    }

    /// Sums and state of the scheduler.
    pub fn counts(&self) -> Counts {
        self.scheduler().counts()
    }

    /// Looks at the scheduler.
    pub fn inspect<T>(&self, look: impl FnOnce(&Scheduler) -> T) -> T {
        look(&self.scheduler())
    }

    /// `/reset_prefix_cache`.
    pub fn reset_prefix_cache(&self) -> bool {
        self.scheduler().reset_prefix_cache()
    }

    /// `/sleep` and `/wake_up`.
    pub fn set_asleep(&self, asleep: bool) {
        self.scheduler().set_asleep(asleep);
        self.wake.notify_one();
    }

    /// What tests wait for and look at.
    pub fn state(&self) -> State {
        let form = self.config.hash_form;
        let (counts, mut cached_blocks, mut cpu_blocks) = self.inspect(|scheduler| {
            let pool = scheduler.pool();
            let published = |hash: &Digest| hash.published(form);
            let (gpu, cpu) = (pool.cached().map(published).collect(), pool.offloaded().map(published).collect());
            (scheduler.counts(), gpu, cpu)
        });
        for blocks in [&mut cached_blocks, &mut cpu_blocks] {
            let blocks: &mut Vec<Value> = blocks;
            blocks.sort_by_key(ToString::to_string);
        }
        State {
            counts,
            cached_blocks,
            cpu_blocks,
            next_seq: self.published.next_seq.load(Ordering::Relaxed),
            subscriptions: self.published.subscriptions.load(Ordering::Relaxed),
            restarts: self.published.restarts.load(Ordering::Relaxed),
        }
    }

    /// Waits until the state is as asked and returns it.
    pub async fn wait_for(&self, reached: impl Fn(&State) -> bool) -> State {
        let mut changes = self.published.changed.subscribe();
        loop {
            let state = self.state();
            if reached(&state) || changes.changed().await.is_err() {
                return state;
            }
        }
    }

    /// Whether the fault `die` ended the engine.
    pub fn has_died(&self) -> bool {
        self.died.load(Ordering::Relaxed)
    }

    /// A number for the next request's id.
    pub fn next_request(&self) -> u64 {
        self.request_number.fetch_add(1, Ordering::Relaxed)
    }

    /// Status with which this generation request is to fail, by a fault.
    pub fn take_error(&self) -> Option<u16> {
        let mut faults = lock(&self.faults);
        let left = faults.errors.checked_sub(1)?;
        faults.errors = left;
        Some(faults.status)
    }

    /// Applies a fault.
    pub async fn fault(&self, fault: Fault) {
        match &fault {
            Fault::Stall => self.scheduler().set_stalled(true),
            Fault::Resume => self.scheduler().set_stalled(false),
            Fault::Error { count, status } => {
                let mut faults = lock(&self.faults);
                (faults.errors, faults.status) = (*count, *status);
            }
            Fault::Slow { factor } => lock(&self.faults).slow = factor.max(0.0),
            Fault::Die => {
                self.died.store(true, Ordering::Relaxed);
                self.stop.cancel();
            }
            Fault::Restart => {
                self.scheduler().restart(new_pool(&self.config));
                lock(&self.media).clear();
            }
            _ => {}
        }
        let _ = self.commands.send(Command::Fault(fault)).await;
        self.wake.notify_one();
    }
}

fn new_pool(config: &SimConfig) -> BlockPool {
    BlockPool::new(config.block_size, config.blocks, BlockHasher::new(config.hash_algo)).with_offload(config.cpu_blocks)
}

/// A poisoned lock means a panicked test; its data is still whole between steps.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
