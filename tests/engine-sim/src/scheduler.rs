//! Continuous batching in simple form: which requests compute how many tokens in the next step.
//!
//! Mirrors `vllm/v1/core/sched/scheduler.py` (0.32): running requests first, then waiting ones in order while the step
//! has tokens left; the last running request is preempted when the pool is full. **Invariant:** no clock and no waiting
//! here; the engine task turns a [`Step`] into time.

use crate::blocks::Sequence;
use crate::cache::{Batch, Cache};
use crate::prompt::Model;
use serde::Serialize;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use tokio::sync::mpsc;

/// A request for one answer.
#[derive(Debug)]
pub struct Job {
    /// Prompt, with what else keys its blocks.
    pub sequence: Sequence,
    /// Answer tokens.
    pub output_tokens: usize,
    /// Fixes the made-up text.
    pub seed: u64,
    /// Announce the hit prefix again (`kv_cache_report_mode: "full"`).
    pub report_hits: bool,
    /// Which answer of the HTTP request this is.
    pub index: usize,
    /// Where tokens go; a dropped receiver aborts the job.
    pub output: mpsc::Sender<Progress>,
}

/// One token of one answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Progress {
    /// Which answer.
    pub index: usize,
    /// The token.
    pub token: u32,
    /// Prompt tokens that were in the cache when the job was first scheduled.
    pub cached_tokens: usize,
    /// This is the answer's last token.
    pub last: bool,
}

#[derive(Debug)]
struct Running {
    job: Job,
    produced: usize,
    cached_tokens: Option<usize>,
    /// Tokens computed in the step in progress.
    scheduled: usize,
}

/// Work of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Step {
    life: u64,
    /// Prompt tokens to compute.
    pub prefill_tokens: usize,
    /// Answer tokens to compute.
    pub decode_tokens: usize,
    /// Tokens of images to encode.
    pub image_tokens: usize,
}

/// Sums since start, and the state at this moment.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Counts {
    /// Jobs that ended well.
    pub served: u64,
    /// Jobs whose client went away.
    pub aborted: u64,
    /// Images encoded (not found in the encoder cache).
    pub images_encoded: u64,
    /// Prompt tokens of jobs scheduled.
    pub prompt_tokens: u64,
    /// Of these, found in the cache.
    pub cached_tokens: u64,
    /// Answer tokens.
    pub generated_tokens: u64,
    /// Jobs put back to the queue for want of blocks.
    pub preemptions: u64,
    /// Jobs in the batch.
    pub running: usize,
    /// Jobs in the queue.
    pub waiting: usize,
    /// Steps finished.
    pub steps: u64,
}

impl Counts {
    /// Adds those of another rank.
    pub fn add(&mut self, other: &Self) {
        self.served += other.served;
        self.aborted += other.aborted;
        self.images_encoded += other.images_encoded;
        self.prompt_tokens += other.prompt_tokens;
        self.cached_tokens += other.cached_tokens;
        self.generated_tokens += other.generated_tokens;
        self.preemptions += other.preemptions;
        self.running += other.running;
        self.waiting += other.waiting;
        self.steps += other.steps;
    }
}

/// Limits, from the settings.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Requests in one batch.
    pub running: usize,
    /// Requests in the queue.
    pub waiting: usize,
    /// Tokens in one step.
    pub step_tokens: usize,
    /// Images whose encoder output is kept.
    pub encoder_images: usize,
}

/// State of the engine between steps.
pub struct Scheduler {
    model: Arc<Model>,
    cache: Cache,
    limits: Limits,
    waiting: VecDeque<Running>,
    running: Vec<Running>,
    encoder: EncoderCache,
    counts: Counts,
    /// Counts restarts, so that a step begun before one ends without effect.
    life: u64,
    stalled: bool,
    asleep: bool,
}

impl Scheduler {
    /// An idle engine.
    pub fn new(model: Arc<Model>, cache: Cache, limits: Limits) -> Self {
        let encoder = EncoderCache { most: limits.encoder_images, ..EncoderCache::default() };
        let (waiting, running, counts) = Default::default();
        Self { model, cache, limits, waiting, running, encoder, counts, life: 0, stalled: false, asleep: false }
    }

    /// Queues a job; gives it back when the queue is full.
    ///
    /// # Errors
    /// The queue is full.
    #[expect(clippy::result_large_err, reason = "the caller drops it at once")]
    pub fn submit(&mut self, job: Job) -> Result<(), Job> {
        if self.waiting.len() >= self.limits.waiting {
            return Err(job);
        }
        self.waiting.push_back(Running { job, produced: 0, cached_tokens: None, scheduled: 0 });
        Ok(())
    }

    /// Ends jobs whose client went away. True when there was one.
    pub fn sweep(&mut self) -> bool {
        let before = self.counts.aborted;
        let gone = |running: &Running| running.job.output.is_closed();
        let waiting = self.waiting.len();
        self.waiting.retain(|queued| !gone(queued));
        self.counts.aborted += (waiting - self.waiting.len()) as u64;
        for mut ended in self.running.extract_if(.., |running| gone(running)) {
            self.cache.release(&mut ended.job.sequence, false);
            self.counts.aborted += 1;
        }
        self.counts.aborted > before
    }

    /// Decides the next step; `None` when there is nothing to compute or the engine stands still.
    pub fn begin_step(&mut self) -> Option<Step> {
        self.sweep();
        if self.stalled || self.asleep {
            return None;
        }
        let mut step = Step { life: self.life, ..Step::default() };
        let mut budget = self.limits.step_tokens;
        let preempted = self.schedule_running(&mut step, &mut budget);
        if !preempted {
            self.schedule_waiting(&mut step, &mut budget);
        }
        (step.prefill_tokens + step.decode_tokens > 0).then_some(step)
    }

    fn schedule_running(&mut self, step: &mut Step, budget: &mut usize) -> bool {
        let mut preempted = false;
        let mut at = 0;
        while at < self.running.len() && *budget > 0 {
            let sequence = &mut self.running[at].job.sequence;
            let tokens = (sequence.tokens.len() - sequence.computed).min(*budget);
            if self.cache.grow(sequence, tokens) {
                self.running[at].scheduled = tokens;
                *budget -= tokens;
                let produced = self.running[at].produced > 0;
                *(if produced { &mut step.decode_tokens } else { &mut step.prefill_tokens }) += tokens;
                step.image_tokens += self.encoder.encode(&self.running[at].job.sequence, tokens, &mut self.counts);
                at += 1;
            } else if let Some(mut last) = self.running.pop() {
                preempted = true;
                self.cache.release(&mut last.job.sequence, true);
                last.scheduled = 0;
                self.waiting.push_front(last);
                self.counts.preemptions += 1;
            }
        }
        preempted
    }

    fn schedule_waiting(&mut self, step: &mut Step, budget: &mut usize) {
        while *budget > 0 && self.running.len() < self.limits.running {
            let Some(next) = self.waiting.front_mut() else { return };
            let sequence = &mut next.job.sequence;
            let hits = self.cache.hit_blocks(sequence);
            let cached = hits * self.cache.block_size();
            let tokens = (sequence.tokens.len() - cached).min(*budget);
            let report = next.job.report_hits && next.cached_tokens.is_none();
            if !self.cache.admit(sequence, hits, tokens, report) {
                return;
            }
            next.scheduled = tokens;
            *budget -= tokens;
            step.prefill_tokens += tokens;
            if next.cached_tokens.is_none() {
                next.cached_tokens = Some(cached);
                self.counts.prompt_tokens += sequence.tokens.len() as u64;
                self.counts.cached_tokens += cached as u64;
            }
            step.image_tokens += self.encoder.encode(&next.job.sequence, tokens, &mut self.counts);
            self.running.extend(self.waiting.pop_front());
        }
    }

    /// Ends a step: tokens go out, finished jobs leave. The events are those of the whole step.
    pub fn end_step(&mut self, step: Step) -> Option<Batch> {
        if step.life != self.life {
            return None;
        }
        self.sweep();
        self.counts.steps += 1;
        for running in &mut self.running {
            let scheduled = std::mem::take(&mut running.scheduled);
            let sequence = &mut running.job.sequence;
            sequence.computed += scheduled;
            if scheduled > 0 && running.produced == 0 {
                self.cache.chunk_done(sequence);
            }
            if scheduled == 0 || sequence.computed < sequence.tokens.len() {
                continue;
            }
            let token = self.model.made_up(running.job.seed, running.produced);
            sequence.tokens.push(token);
            running.produced += 1;
            self.counts.generated_tokens += 1;
            let last = running.produced >= running.job.output_tokens;
            let cached_tokens = running.cached_tokens.unwrap_or(0);
            // The channel holds the whole answer, so this fails only when the client has gone; `sweep` sees that.
            let progress = Progress { index: running.job.index, token, cached_tokens, last };
            let _ = running.job.output.try_send(progress);
        }
        for mut done in self.running.extract_if(.., |running| running.produced >= running.job.output_tokens) {
            self.cache.release(&mut done.job.sequence, false);
            self.counts.served += 1;
        }
        Some(self.cache.take_events()).filter(|batch| !batch.is_empty())
    }

    /// Events that go out though no step ends.
    pub fn take_idle_events(&mut self) -> Option<Batch> {
        self.cache.take_idle_events()
    }

    /// Forgets the prefix cache; false while jobs hold blocks. The event waits for the next step, as in vLLM.
    pub fn reset_prefix_cache(&mut self) -> bool {
        self.cache.reset()
    }

    /// A new process: no jobs, no cache, no event about either.
    pub fn restart(&mut self, cache: Cache) {
        self.life += 1;
        self.cache = cache;
        self.waiting.clear();
        self.running.clear();
        self.encoder.clear();
        (self.stalled, self.asleep) = (false, false);
    }

    /// Makes no progress while set.
    pub fn set_stalled(&mut self, stalled: bool) {
        self.stalled = stalled;
    }

    /// Sleeps (true) or wakes; sleeping drops the prefix cache.
    pub fn set_asleep(&mut self, asleep: bool) {
        if asleep {
            self.cache.reset();
        }
        self.asleep = asleep;
    }

    /// Whether the engine was put to sleep.
    pub fn is_asleep(&self) -> bool {
        self.asleep
    }

    /// Sums and state.
    pub fn counts(&self) -> Counts {
        Counts { running: self.running.len(), waiting: self.waiting.len(), ..self.counts.clone() }
    }

    /// The prefix cache, to look at.
    pub fn cache(&self) -> &Cache {
        &self.cache
    }
}

/// Identities of images whose encoder output is kept, the oldest leaving first.
#[derive(Debug, Default)]
struct EncoderCache {
    most: usize,
    order: VecDeque<String>,
    known: HashSet<String>,
}

impl EncoderCache {
    fn clear(&mut self) {
        self.order.clear();
        self.known.clear();
    }

    /// Tokens to encode for the images that touch the next `tokens` positions of a sequence.
    fn encode(&mut self, sequence: &Sequence, tokens: usize, counts: &mut Counts) -> usize {
        let (start, end) = (sequence.computed, sequence.computed + tokens);
        let mut fresh = HashMap::new();
        for span in sequence.media.iter().filter(|span| span.start < end && start < span.start + span.tokens) {
            if self.known.contains(&span.id) {
                self.order.retain(|id| *id != span.id);
            } else {
                fresh.insert(&span.id, span.tokens);
                self.known.insert(span.id.clone());
            }
            self.order.push_back(span.id.clone());
            while self.order.len() > self.most {
                let Some(oldest) = self.order.pop_front() else { break };
                self.known.remove(&oldest);
            }
        }
        counts.images_encoded += fresh.len() as u64;
        fresh.values().sum()
    }
}
