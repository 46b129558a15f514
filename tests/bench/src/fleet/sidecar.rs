//! Beside each engine: the real publisher behind its flush window, and the account of load with its shortest pause between two messages.

use std::sync::Arc;

use fovea_balancer_core::load::{Charge, Report};
use fovea_kv::event::{Attention, BlockExtra, KvEvent, Removed, Stored};
use fovea_kv::{EngineHash, RoutingView, SequenceHash, Tier};
use fovea_sidecar_core::publish::{Config, Delta, Publisher};

use super::Micros;
use super::engine;
use super::workload::Request;

/// From an engine's step to its sidecar's decoder.
const EVENT_DELAY: Micros = 200;
/// Collected before a delta is sent: the sidecar's `flush_interval`.
const FLUSH_AFTER: Micros = 10_000;
/// Shortest time between two load messages: the sidecar's `load_interval`.
const LOAD_PAUSE: Micros = 50_000;

pub struct Sidecar {
    publisher: Publisher,
    is_flush_due: bool,
    load: Report,
    is_load_due: bool,
    load_sent: Option<Micros>,
}

impl Default for Sidecar {
    fn default() -> Self {
        Self {
            publisher: Publisher::new(Config::default()),
            is_flush_due: false,
            load: Report::default(),
            is_load_due: false,
            load_sent: None,
        }
    }
}

impl Sidecar {
    /// Takes a step's events, as vLLM announces them; when to flush, unless that is settled.
    pub fn events(
        &mut self,
        stored: &[engine::Stored],
        removed: Vec<SequenceHash>,
        requests: &[Request],
        block_tokens: u32,
        now: Micros,
    ) -> Option<Micros> {
        if stored.is_empty() && removed.is_empty() {
            return None;
        }
        if !removed.is_empty() {
            let hashes = removed.into_iter().map(|hash| EngineHash::Int(hash.0)).collect();
            self.publisher.apply(&KvEvent::Removed(Removed { hashes, tier: Tier::Gpu, group: 0 }));
        }
        for run in stored {
            self.publisher.apply(&KvEvent::Stored(event(&requests[run.request], *run, block_tokens)));
        }
        let due = !std::mem::replace(&mut self.is_flush_due, true);
        due.then_some(now + EVENT_DELAY + FLUSH_AFTER)
    }

    pub fn flush(&mut self) -> Delta {
        self.is_flush_due = false;
        self.publisher.take_delta()
    }

    /// A request arrived; when to report.
    pub fn arrived(&mut self, charge: Charge, now: Micros) -> Option<Micros> {
        self.load.waiting += 1;
        self.load.prefill_tokens += charge.prefill_tokens;
        self.changed(now)
    }

    /// Its first byte came.
    pub fn started(&mut self, charge: Charge, now: Micros) -> Option<Micros> {
        self.load.waiting -= 1;
        self.load.prefill_tokens -= charge.prefill_tokens;
        self.load.running += 1;
        self.load.decode_tokens += charge.prompt_tokens;
        self.changed(now)
    }

    pub fn ended(&mut self, charge: Charge, now: Micros) -> Option<Micros> {
        self.load.running -= 1;
        self.load.decode_tokens -= charge.prompt_tokens;
        self.changed(now)
    }

    pub fn report(&mut self, now: Micros) -> Report {
        (self.is_load_due, self.load_sent) = (false, Some(now));
        self.load
    }

    fn changed(&mut self, now: Micros) -> Option<Micros> {
        let due = !std::mem::replace(&mut self.is_load_due, true);
        due.then(|| self.load_sent.map_or(now, |sent| now.max(sent + LOAD_PAUSE)))
    }
}

/// The engine's event for a run of blocks. Its hashes are opaque to the publisher, which makes ours from the tokens.
fn event(request: &Request, run: engine::Stored, block_tokens: u32) -> Stored {
    let hash = |at: u32| EngineHash::Int(request.chain[at as usize].0);
    let blocks = || run.from..run.to;
    Stored {
        hashes: blocks().map(hash).collect(),
        parent: run.from.checked_sub(1).map(hash),
        tokens: tokens(&request.view, run.from * block_tokens, run.to * block_tokens),
        block_size: block_tokens,
        tier: Tier::Gpu,
        lora: None,
        extra: blocks().map(|block| extra(&request.view, block * block_tokens, block_tokens)).collect(),
        group: 0,
        attention: Attention::Full,
        session: None::<Arc<str>>,
    }
}

fn tokens(view: &RoutingView, start: u32, end: u32) -> Vec<u32> {
    let (mut out, mut at) = (Vec::with_capacity((end - start) as usize), 0);
    for run in view.runs() {
        let (from, to) = (at.max(start), (at + run.count).min(end));
        if from < to {
            out.resize(out.len() + (to - from) as usize, run.token);
        }
        at += run.count;
        if at >= end {
            break;
        }
    }
    out
}

fn extra(view: &RoutingView, start: u32, block_tokens: u32) -> BlockExtra {
    let over = view.spans().iter().filter(|span| span.start < start + block_tokens && start < span.start + span.len);
    let media = over.map(|span| (span.id, (i64::from(span.start) - i64::from(start)) as i32)).collect();
    BlockExtra { media, ..BlockExtra::default() }
}
