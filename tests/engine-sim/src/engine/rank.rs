//! One data-parallel rank: its scheduler, block pool and publisher, and the task that turns steps into time.

use super::lock;
use super::state::{State, sort};
use crate::cache::{Batch, Cache};
use crate::config::SimConfig;
use crate::fault::Fault;
use crate::prompt::Model;
use crate::publisher::{Command, Published};
use crate::scheduler::{Counts, Job, Limits, Progress, Scheduler, Step};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use tokio::sync::{Notify, mpsc};
use tokio_util::sync::CancellationToken;

/// Addresses and topic of a rank's event sockets; empty where events are polled.
#[derive(Clone, Debug, Default)]
pub struct Sources {
    /// `tcp://…` of the event socket.
    pub events: String,
    /// `tcp://…` of the replay socket.
    pub replay: String,
    /// First frame of each message.
    pub topic: String,
}

/// One rank, shared by its task and the HTTP handlers.
pub struct Rank {
    /// From 0.
    pub index: usize,
    /// What went out on the event socket.
    pub published: Arc<Published>,
    /// Where events are published.
    pub sources: Sources,
    config: Arc<SimConfig>,
    scheduler: Mutex<Scheduler>,
    wake: Arc<Notify>,
    commands: mpsc::Sender<Command>,
    /// Factor of the fault `slow`.
    slow: Mutex<f64>,
    outstanding: AtomicUsize,
}

/// One HTTP request's place on a rank: counts as outstanding until dropped.
pub struct Place(Arc<Rank>);

impl Place {
    /// Takes a place.
    pub fn on(rank: &Arc<Rank>) -> Self {
        rank.outstanding.fetch_add(1, Ordering::Relaxed);
        Self(Arc::clone(rank))
    }

    /// The rank.
    pub fn rank(&self) -> &Rank {
        &self.0
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.outstanding.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Tokens of one HTTP request's answers. Dropping it aborts what is not finished.
pub struct Answers {
    /// `None` before the last token of all answers = the engine died.
    pub progress: mpsc::Receiver<Progress>,
    place: Place,
}

impl Drop for Answers {
    fn drop(&mut self) {
        self.progress.close();
        self.place.0.wake.notify_one();
    }
}

/// The queue is full.
#[derive(Debug, thiserror::Error)]
#[error("the engine's waiting queue is full")]
pub struct QueueFull;

impl Rank {
    /// An idle rank; `commands` leads to its publisher.
    pub fn new(
        index: usize,
        config: Arc<SimConfig>,
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
        let scheduler = Mutex::new(Scheduler::new(model, Cache::new(&config), limits));
        let (wake, slow, outstanding) = (Arc::default(), Mutex::new(1.0), AtomicUsize::new(0));
        Self { index, published, sources, config, scheduler, wake, commands, slow, outstanding }
    }

    /// Runs steps until `stop`.
    pub async fn run(self: Arc<Self>, stop: CancellationToken) {
        let work = async {
            loop {
                let step = self.scheduler().begin_step();
                self.published.changes.note();
                match step {
                    Some(step) => self.run_step(step).await,
                    None => {
                        self.publish(Scheduler::take_idle_events).await;
                        self.wake.notified().await;
                    }
                }
            }
        };
        tokio::select! {
            () = stop.cancelled() => {}
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
                            self.published.changes.note();
                        }
                    }
                }
            }
        } else {
            tokio::task::yield_now().await;
        }
        self.publish(|scheduler| scheduler.end_step(step)).await;
        self.published.changes.note();
    }

    /// Takes a batch under the lock under which it is queued, so that none of an old life follows a restart. A full
    /// queue holds the scheduler up, as vLLM's does.
    async fn publish(&self, take: impl FnOnce(&mut Scheduler) -> Option<Batch>) {
        let permit = self.commands.reserve().await;
        let mut scheduler = self.scheduler();
        if let (Some(batch), Ok(permit)) = (take(&mut scheduler), permit) {
            permit.send(Command::Batch(batch));
        }
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
        let slow = *lock(&self.slow);
        Duration::try_from_secs_f64(seconds * slow / config.speed).unwrap_or(Duration::from_secs(3600))
    }

    fn scheduler(&self) -> MutexGuard<'_, Scheduler> {
        lock(&self.scheduler)
    }

    /// HTTP requests that have a place here.
    pub fn outstanding(&self) -> usize {
        self.outstanding.load(Ordering::Relaxed)
    }

    /// Sums and state of the scheduler.
    pub fn counts(&self) -> Counts {
        self.scheduler().counts()
    }

    /// Looks at the scheduler.
    pub fn inspect<T>(&self, look: impl FnOnce(&Scheduler) -> T) -> T {
        look(&self.scheduler())
    }

    /// Drops the prefix cache; false while jobs hold blocks.
    pub fn reset_prefix_cache(&self) -> bool {
        let done = self.scheduler().reset_prefix_cache();
        self.wake.notify_one();
        done
    }

    /// `/sleep` and `/wake_up`.
    pub fn set_asleep(&self, asleep: bool) {
        self.scheduler().set_asleep(asleep);
        self.wake.notify_one();
    }

    /// This rank alone.
    pub fn state(&self) -> State {
        let look =
            |scheduler: &Scheduler| (scheduler.counts(), scheduler.cache().cached(), scheduler.cache().offloaded());
        let (counts, mut cached_blocks, mut cpu_blocks) = self.inspect(look);
        sort(&mut cached_blocks);
        sort(&mut cpu_blocks);
        State {
            counts,
            cached_blocks,
            cpu_blocks,
            next_seq: self.published.next_seq.load(Ordering::Relaxed),
            subscriptions: self.published.subscriptions.load(Ordering::Relaxed),
            restarts: self.published.restarts.load(Ordering::Relaxed),
            ranks: Vec::new(),
        }
    }

    /// Applies a fault that has its place in a rank.
    pub async fn fault(&self, fault: Fault) {
        match &fault {
            Fault::Stall => self.scheduler().set_stalled(true),
            Fault::Resume => self.scheduler().set_stalled(false),
            Fault::Slow { factor } => *lock(&self.slow) = factor.max(0.0),
            _ => {}
        }
        let permit = self.commands.reserve().await;
        {
            let mut scheduler = self.scheduler();
            if fault == Fault::Restart {
                scheduler.restart(Cache::new(&self.config));
            }
            if let Ok(permit) = permit {
                permit.send(Command::Fault(fault));
            }
        }
        self.wake.notify_one();
    }
}

/// Queues the jobs of one HTTP request, all or none. `jobs` makes them, given the channel for their tokens.
///
/// # Errors
/// The queue is full.
pub fn submit(
    place: Place,
    tokens_max: usize,
    jobs: impl FnOnce(&mpsc::Sender<Progress>) -> Vec<Job>,
) -> Result<Answers, QueueFull> {
    let (output, progress) = mpsc::channel(tokens_max.max(1));
    let answers = Answers { progress, place };
    let rank = answers.place.rank();
    {
        let mut scheduler = rank.scheduler();
        for job in jobs(&output) {
            scheduler.submit(job).map_err(|_| QueueFull)?;
        }
    }
    rank.wake.notify_one();
    Ok(answers)
}
