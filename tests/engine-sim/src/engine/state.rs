//! What tests wait for and look at (`GET /sim/state`).

use crate::scheduler::Counts;
use serde::Serialize;
use serde_json::Value;

/// An engine, or one rank of it, as tests see it.
#[derive(Clone, Debug, Default, Serialize)]
pub struct State {
    /// Sums and queue lengths.
    #[serde(flatten)]
    pub counts: Counts,
    /// Hashes in the prefix cache, as events carry them (bytes as hex), each once per rank.
    pub cached_blocks: Vec<Value>,
    /// Hashes in the CPU tier, likewise.
    pub cpu_blocks: Vec<Value>,
    /// Next event sequence number.
    pub next_seq: u64,
    /// Subscriptions seen by the event socket since the last restart.
    pub subscriptions: u64,
    /// Restarts finished.
    pub restarts: u64,
    /// The ranks in order, without ranks of their own. What stands above is their sum.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub ranks: Vec<State>,
}

impl State {
    /// The state of an engine of these ranks.
    pub(super) fn sum(ranks: Vec<State>) -> Self {
        let mut sum = Self::default();
        for rank in &ranks {
            sum.counts.add(&rank.counts);
            sum.cached_blocks.extend_from_slice(&rank.cached_blocks);
            sum.cpu_blocks.extend_from_slice(&rank.cpu_blocks);
            sum.next_seq += rank.next_seq;
            sum.subscriptions += rank.subscriptions;
            sum.restarts += rank.restarts;
        }
        sort(&mut sum.cached_blocks);
        sort(&mut sum.cpu_blocks);
        sum.ranks = ranks;
        sum
    }
}

/// By text, so that equal sets are equal lists.
pub(super) fn sort(blocks: &mut [Value]) {
    blocks.sort_by_key(ToString::to_string);
}
