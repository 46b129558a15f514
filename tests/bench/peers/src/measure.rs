//! The figures of one index. Queries and events are prepared before the clock starts.

use std::collections::BTreeMap;
use std::hint::black_box;
use std::time::Instant;

use crate::memory;
use crate::subject::Subject;
use crate::workload::{BLOCKS, CLASSES, SHARED, Workload, chain, mix};

/// Queries per class and round.
const QUERIES: usize = 10_000;
const DECODED: usize = 40;

#[derive(Default)]
pub struct Figures {
    /// Class → each query's time in ns, over all rounds.
    times: BTreeMap<&'static str, Vec<u64>>,
    /// Kind → best rate over all rounds.
    pub updates_per_s: BTreeMap<&'static str, f64>,
    /// Bytes held per distinct block after the store phase.
    pub bytes_per_block: f64,
}

impl Figures {
    pub fn percentile_us(&mut self, class: &'static str, percent: usize) -> f64 {
        let times = self.times.entry(class).or_default();
        times.sort_unstable();
        times.get(times.len() * percent / 100).map_or(f64::NAN, |ns| *ns as f64 / 1000.0)
    }

    fn rate(&mut self, kind: &'static str, blocks: usize, seconds: f64) {
        let best = self.updates_per_s.entry(kind).or_default();
        *best = best.max(blocks as f64 / seconds);
    }
}

/// Applies the events until they count. CPU seconds of the whole process: neighbours on the machine take wall time, and the hand-over to
/// an event thread is work too.
fn timed<S: Subject>(subject: &mut S, events: Vec<S::Event>) -> f64 {
    let start = cpu_seconds();
    events.into_iter().for_each(|event| subject.apply(event));
    subject.drain();
    cpu_seconds() - start
}

fn cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: `time` is valid for the call.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// Fills an empty index, in portions so that prepared events need little memory.
pub fn store<S: Subject>(load: &Workload, figures: &mut Figures) -> S {
    let before = memory::held();
    let mut subject = S::new(load.workers);
    let mut seconds = 0.0;
    for from in (0..load.prompts).step_by(320) {
        let events = load.store_events::<S>(from, from + 320);
        seconds += timed(&mut subject, events);
    }
    figures.rate("store64", load.prompts * 8 * BLOCKS, seconds);
    figures.bytes_per_block = (memory::held() - before) as f64 / load.distinct() as f64;
    subject
}

pub fn queries<S: Subject>(subject: &mut S, load: &Workload, figures: &mut Figures, round: usize) {
    for class in &CLASSES {
        let times = figures.times.entry(class.name).or_default();
        for query in 0..QUERIES {
            let number = round * QUERIES + query;
            let prompt = mix(number as u64 ^ 0x55) as usize % load.prompts;
            // Where the held part ends is no round number.
            let known = if class.known == BLOCKS / 2 {
                BLOCKS / 2 - 64 + mix(number as u64) as usize % 128
            } else {
                class.known
            };
            let mut query = S::query(&load.unknown(known, prompt, number));
            let start = Instant::now();
            let held = subject.ask(black_box(&mut query));
            times.push(start.elapsed().as_nanos() as u64);
            black_box(held);
        }
    }
}

/// Every holder decodes 40 blocks of its own after the prompt, one event a block, holders in turn; then they go again, last first.
pub fn decode<S: Subject>(subject: &mut S, load: &Workload, figures: &mut Figures, round: usize) {
    let prompts = load.prompts.min(320);
    let (mut events, mut after) = (Vec::new(), Vec::new());
    let mut chains = Vec::new();
    for prompt in 0..prompts {
        let locals: Vec<_> = load.prompt(prompt).iter().map(|block| block.local).collect();
        for worker in load.holders(prompt) {
            let own =
                (0..DECODED).map(|at| mix(((round * 7 + 1) << 40 | prompt << 24 | (worker as usize) << 8 | at) as u64));
            chains.push((worker, chain(locals.iter().copied().chain(own))));
        }
    }
    for at in BLOCKS..BLOCKS + DECODED {
        events.extend(chains.iter().map(|(worker, chain)| S::stored(*worker, Some(&chain[at - 1]), &chain[at..=at])));
    }
    for at in (BLOCKS..BLOCKS + DECODED).rev() {
        after.extend(chains.iter().map(|(worker, chain)| S::removed(*worker, &chain[at..=at])));
    }
    let count = events.len();
    let seconds = timed(subject, events);
    figures.rate("decode1", count, seconds);
    let seconds = timed(subject, after);
    figures.rate("evict1", count, seconds);
}

/// A holder loses the first 250 blocks of a prompt and has them again. Counted are the engine's 500 block operations, whatever an index makes of them.
pub fn head_churn<S: Subject>(subject: &mut S, load: &Workload, figures: &mut Figures) {
    let lost = BLOCKS / 2;
    let mut events = Vec::new();
    let mut cycles = 0;
    for prompt in 0..load.prompts.min(320) {
        let blocks = load.prompt(prompt);
        for worker in load.holders(prompt).take(4) {
            events.push(S::head_lost(worker, &blocks, lost));
            events.push(S::head_back(worker, &blocks, lost));
            cycles += 1;
        }
    }
    let seconds = timed(subject, events);
    figures.rate("head_churn", cycles * 2 * lost, seconds);
}

/// Queries whose answer differs from what the workload says.
pub fn wrong<S: Subject>(subject: &mut S, load: &Workload) -> usize {
    let wrong = |prompt: &usize| {
        let answer = subject.answer(S::query(&load.prompt(*prompt)));
        let holders: Vec<_> = load.holders(*prompt).collect();
        let full = |(worker, depth): &(u32, u32)| holders.contains(worker) == (*depth as usize == BLOCKS);
        !answer.iter().all(full) || answer.iter().filter(|(_, depth)| *depth as usize >= SHARED).count() < holders.len()
    };
    (0..load.prompts.min(320)).filter(wrong).count()
}
