//! What the requests in flight weigh, per rank. The sidecar is the truth about load: every request passes it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering::Relaxed};

use fovea_gossip::message::Load;
use tokio::sync::watch;

/// Counts of one rank; each change bumps `changed`.
#[derive(Debug)]
pub struct RankLoad {
    running: AtomicU32,
    waiting: AtomicU32,
    prefill_tokens: AtomicU64,
    decode_tokens: AtomicU64,
    kv_usage_permille: AtomicU16,
    changed: Arc<watch::Sender<u64>>,
}

impl RankLoad {
    pub fn new(changed: Arc<watch::Sender<u64>>) -> Arc<Self> {
        Arc::new(Self {
            running: AtomicU32::new(0),
            waiting: AtomicU32::new(0),
            prefill_tokens: AtomicU64::new(0),
            decode_tokens: AtomicU64::new(0),
            kv_usage_permille: AtomicU16::new(0),
            changed,
        })
    }

    /// The counts as a message. Each is right; together they may be of different moments.
    pub fn message(&self, worker: u16) -> Load {
        Load {
            worker,
            running: self.running.load(Relaxed),
            waiting: self.waiting.load(Relaxed),
            prefill_tokens: self.prefill_tokens.load(Relaxed),
            decode_tokens: self.decode_tokens.load(Relaxed),
            kv_usage_permille: self.kv_usage_permille.load(Relaxed),
        }
    }

    pub fn set_kv_usage(&self, permille: u16) {
        if self.kv_usage_permille.swap(permille, Relaxed) != permille {
            self.bump();
        }
    }

    /// Counts a request as waiting until [`Charge::first_byte`], then as running until the drop.
    pub fn charge(self: &Arc<Self>, prompt_tokens: u32, prefill_tokens: u32) -> Charge {
        self.waiting.fetch_add(1, Relaxed);
        self.prefill_tokens.fetch_add(prefill_tokens.into(), Relaxed);
        self.bump();
        Charge { load: Arc::clone(self), prompt_tokens, prefill_tokens, running: false }
    }

    fn bump(&self) {
        self.changed.send_modify(|version| *version = version.wrapping_add(1));
    }
}

/// One request's weight, taken off by the drop.
#[derive(Debug)]
pub struct Charge {
    load: Arc<RankLoad>,
    prompt_tokens: u32,
    prefill_tokens: u32,
    running: bool,
}

impl Charge {
    /// Prefill is over: what weighs now is the decoding.
    pub fn first_byte(&mut self) {
        if self.running {
            return;
        }
        self.running = true;
        let load = &self.load;
        load.waiting.fetch_sub(1, Relaxed);
        load.prefill_tokens.fetch_sub(self.prefill_tokens.into(), Relaxed);
        load.running.fetch_add(1, Relaxed);
        load.decode_tokens.fetch_add(self.prompt_tokens.into(), Relaxed);
        load.bump();
    }
}

impl Drop for Charge {
    fn drop(&mut self) {
        let load = &self.load;
        if self.running {
            load.running.fetch_sub(1, Relaxed);
            load.decode_tokens.fetch_sub(self.prompt_tokens.into(), Relaxed);
        } else {
            load.waiting.fetch_sub(1, Relaxed);
            load.prefill_tokens.fetch_sub(self.prefill_tokens.into(), Relaxed);
        }
        load.bump();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_weighs_by_its_stage_and_leaves_nothing() {
        let (changed, mut seen) = watch::channel(0);
        let load = RankLoad::new(Arc::new(changed));
        let counts = |load: &RankLoad| {
            let l = load.message(0);
            (l.waiting, l.running, l.prefill_tokens, l.decode_tokens)
        };
        let (mut first, second) = (load.charge(100, 40), load.charge(7, 7));
        assert_eq!(counts(&load), (2, 0, 47, 0));
        first.first_byte();
        first.first_byte();
        assert_eq!(counts(&load), (1, 1, 7, 100));
        drop(first);
        drop(second);
        assert_eq!(counts(&load), (0, 0, 0, 0));
        assert_eq!(*seen.borrow_and_update(), 5);
    }
}
