//! One engine: continuous batching with chunked prefill over a pool of blocks, and time by a simple model.
//!
//! Mirrors `vllm/v1/core/sched/scheduler.py` (0.32): running requests first, then waiting ones in order while the step has tokens left;
//! a block counts as cached from the start of the step that computes it. A step takes prefill tokens / speed, plus the encoding of the
//! images it reaches, plus the time of one decode step if anything is decoded.

use std::collections::VecDeque;

use fovea_kv::SequenceHash;

use super::Micros;
use super::encoder::EncoderCache;
use super::pool::Pool;
use super::workload::Request;

#[derive(Clone, Copy, Debug)]
pub struct Settings {
    /// Prompt tokens computed per second.
    pub prefill_per_s: f64,
    /// Time to encode one image token, in prefill tokens.
    pub image_cost: f64,
    /// A decode step with little to read, in milliseconds.
    pub decode_ms: f64,
    /// Added per thousand prompt tokens of the requests decoded: their KV is read.
    pub decode_ms_per_1000: f64,
    /// Tokens computed in one step.
    pub step_tokens: u32,
    /// Requests in one batch.
    pub running_max: usize,
    /// Image tokens whose encoder output is kept.
    pub encoder_tokens: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            prefill_per_s: 10_000.0,
            image_cost: 0.5,
            decode_ms: 10.0,
            decode_ms_per_1000: 0.1,
            step_tokens: 2048,
            running_max: 256,
            encoder_tokens: 10_000,
        }
    }
}

/// One request at the engine.
#[derive(Debug)]
struct Job {
    request: usize,
    blocks: Vec<u32>,
    /// Blocks found in the cache or put there since.
    stored: u32,
    computed: u32,
    /// Computed in the step in progress.
    scheduled: u32,
    produced: u32,
}

/// What ended with a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Output {
    First(usize),
    Last(usize),
}

/// Blocks of one request that a step put into the cache, from block `from` on.
#[derive(Clone, Copy, Debug)]
pub struct Stored {
    pub request: usize,
    pub from: u32,
    pub to: u32,
}

/// What an engine did for one request, or for all.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Work {
    /// Prompt tokens found in the cache.
    pub reused: u64,
    /// Prompt tokens computed.
    pub computed: u64,
    /// Image tokens encoded.
    pub encoded: u64,
}

pub struct Engine {
    settings: Settings,
    block_tokens: u32,
    pub pool: Pool,
    pub encoder: EncoderCache,
    /// Requests on their way to here.
    coming: Vec<usize>,
    waiting: VecDeque<usize>,
    running: Vec<Job>,
    stored: Vec<Stored>,
    /// Microseconds of prefill and encoding.
    pub busy: f64,
    pub is_stepping: bool,
}

impl Engine {
    pub fn new(settings: Settings, block_tokens: u32, blocks: u32) -> Self {
        Self {
            settings,
            block_tokens,
            pool: Pool::new(blocks),
            encoder: EncoderCache::new(settings.encoder_tokens),
            coming: Vec::new(),
            waiting: VecDeque::new(),
            running: Vec::new(),
            stored: Vec::new(),
            busy: 0.0,
            is_stepping: false,
        }
    }

    /// A request was sent here.
    pub fn expect(&mut self, request: usize) {
        self.coming.push(request);
    }

    /// It arrived.
    pub fn submit(&mut self, request: usize) {
        self.coming.retain(|other| *other != request);
        self.waiting.push_back(request);
    }

    pub fn is_idle(&self) -> bool {
        self.coming.is_empty() && self.waiting.is_empty() && self.running.is_empty()
    }

    /// Starts a step and tells how long it takes; `None` without work.
    pub fn begin_step(&mut self, requests: &[Request], work: &mut [Work]) -> Option<Micros> {
        let mut budget = self.settings.step_tokens;
        let (mut prefill, mut decoded, mut encoded) = (0, 0_u64, 0);
        let mut jobs = std::mem::take(&mut self.running);
        for job in &mut jobs {
            if job.produced > 0 {
                job.scheduled = 1;
                decoded += u64::from(requests[job.request].prompt_tokens());
                budget = budget.saturating_sub(1);
            } else if budget > 0 {
                let number = job.request;
                let (tokens, images) = self.chunk(job, &requests[number], budget, &mut work[number]);
                (budget, prefill, encoded) = (budget - tokens, prefill + tokens, encoded + images);
            }
        }
        while budget > 0 && jobs.len() < self.settings.running_max {
            let Some(mut job) = self.admit(requests, work) else { break };
            let number = job.request;
            let (tokens, images) = self.chunk(&mut job, &requests[number], budget, &mut work[number]);
            (budget, prefill, encoded) = (budget - tokens, prefill + tokens, encoded + images);
            jobs.push(job);
        }
        self.running = jobs;
        self.is_stepping = u64::from(prefill) + decoded > 0;
        let compute =
            (f64::from(prefill) + self.settings.image_cost * encoded as f64) / self.settings.prefill_per_s * 1e6;
        self.busy += compute;
        let decoding = self.settings.decode_ms * 1e3 + self.settings.decode_ms_per_1000 * decoded as f64;
        let decoding = if decoded > 0 { decoding } else { 0.0 };
        self.is_stepping.then(|| ((compute + decoding) as Micros).max(1))
    }

    /// Ends the step in progress.
    pub fn end_step(&mut self, requests: &[Request], out: &mut Vec<Output>) {
        self.is_stepping = false;
        for job in &mut self.running {
            let request = &requests[job.request];
            let scheduled = std::mem::take(&mut job.scheduled);
            if job.produced == 0 {
                job.computed += scheduled;
                if job.computed < request.prompt_tokens() {
                    continue;
                }
                out.push(Output::First(job.request));
            }
            job.produced += 1;
            if job.produced >= request.output_tokens {
                out.push(Output::Last(job.request));
            }
        }
        for job in self.running.extract_if(.., |job| job.produced >= requests[job.request].output_tokens) {
            self.pool.release(&job.blocks);
        }
    }

    /// Blocks stored since the last call; those given up are with the pool.
    pub fn take_stored(&mut self) -> Vec<Stored> {
        std::mem::take(&mut self.stored)
    }

    fn admit(&mut self, requests: &[Request], work: &mut [Work]) -> Option<Job> {
        let number = *self.waiting.front()?;
        let request = &requests[number];
        let hits = self.pool.hits(&request.chain, request.reusable_blocks(self.block_tokens));
        let count = (request.prompt_tokens() + request.output_tokens).div_ceil(self.block_tokens);
        let blocks = self.pool.admit(&request.chain, hits, count)?;
        self.waiting.pop_front();
        let computed = hits * self.block_tokens;
        work[number].reused = u64::from(computed);
        work[number].computed = u64::from(request.prompt_tokens() - computed);
        Some(Job { request: number, blocks, stored: hits, computed, scheduled: 0, produced: 0 })
    }

    /// Schedules the next tokens of a prompt; (prompt tokens, image tokens to encode).
    fn chunk(&mut self, job: &mut Job, request: &Request, budget: u32, work: &mut Work) -> (u32, u64) {
        let tokens = (request.prompt_tokens() - job.computed).min(budget);
        let end = job.computed + tokens;
        let mut encoded = 0;
        for image in request.images.iter().filter(|image| image.start < end && job.computed < image.start + image.len) {
            if self.encoder.touch(image.id, image.len) {
                encoded += u64::from(image.len);
            }
        }
        let full = (end / self.block_tokens).min(request.chain.len() as u32);
        if full > job.stored {
            for at in job.stored..full {
                self.pool.store(job.blocks[at as usize], request.chain[at as usize]);
            }
            self.stored.push(Stored { request: job.request, from: job.stored, to: full });
            job.stored = full;
        }
        job.scheduled = tokens;
        work.encoded += encoded;
        (tokens, encoded)
    }
}

/// What only an oracle sees.
impl Engine {
    /// Requests whose prompt is not computed yet, those under way to here included.
    fn ahead(&self) -> impl Iterator<Item = usize> + Clone {
        let unfinished = self.running.iter().filter(|job| job.produced == 0).map(|job| job.request);
        unfinished.chain(self.waiting.iter().copied()).chain(self.coming.iter().copied())
    }

    /// Leading blocks of `chain` that will be cached when a request sent at this moment gets its turn.
    pub fn depth(&self, requests: &[Request], chain: &[SequenceHash]) -> u32 {
        let held = self.pool.hits(chain, u32::MAX);
        let shared = |other: usize| {
            let other = &requests[other].chain;
            if other.get(held as usize) != chain.get(held as usize) || chain.len() <= held as usize {
                return held;
            }
            chain.iter().zip(other.iter()).take_while(|(a, b)| a == b).count() as u32
        };
        self.ahead().map(shared).max().unwrap_or(held).max(held)
    }

    /// Work before a request sent at this moment gets its turn, in prefill tokens; `expected` says for each request how many of its
    /// prompt tokens were to be computed when it was sent.
    pub fn waiting_tokens(&self, expected: &[u32], requests: &[Request]) -> u64 {
        let not_begun = self.waiting.iter().chain(&self.coming).map(|number| {
            let (request, fresh) = (&requests[*number], expected[*number]);
            let reused = request.prompt_tokens() - fresh;
            let images = request.images.iter();
            let encode = images.filter(|image| image.start + image.len > reused && !self.encoder.holds(image.id));
            let encode: u32 = encode.map(|image| image.len).sum();
            f64::from(fresh) + self.settings.image_cost * f64::from(encode)
        });
        let prefilled = self.running.iter().filter(|job| job.produced == 0);
        let begun = prefilled.map(|job| f64::from(requests[job.request].prompt_tokens() - job.computed));
        (not_begun.sum::<f64>() + begun.sum::<f64>()) as u64
    }

    /// Prompt tokens of the requests that are decoded.
    pub fn decode_tokens(&self, requests: &[Request]) -> u64 {
        let decoded = self.running.iter().filter(|job| job.produced > 0);
        decoded.map(|job| u64::from(requests[job.request].prompt_tokens())).sum()
    }
}
