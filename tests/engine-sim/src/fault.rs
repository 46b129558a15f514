//! Faults that a test can switch on while the engine runs (`POST /sim/fault`).

use serde::Deserialize;

/// A fault, as JSON `{"fault": "drop", "count": 2}`. Beside it, `"rank": 1` names one data-parallel rank; without it
/// the fault is in all.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(tag = "fault", rename_all = "snake_case", deny_unknown_fields)]
pub enum Fault {
    /// The next `count` event batches are not sent (they can be replayed).
    Drop {
        #[serde(default = "one")]
        count: u64,
    },
    /// The next batch is sent after the one that follows it.
    Reorder,
    /// The next `count` batches are sent twice.
    Duplicate {
        #[serde(default = "one")]
        count: u64,
    },
    /// A message that is no batch goes out, without a sequence number of its own.
    Garbage,
    /// The replay buffer is emptied, so that history is lost.
    Forget,
    /// A new engine process behind the same addresses: jobs and cache gone, sequence numbers from 0, connections of the
    /// event sockets cut. Block hashes stay as they were.
    Restart,
    /// No step is begun until `resume`.
    Stall,
    /// Ends `stall`.
    Resume,
    /// The next `count` generation requests are answered with `status`.
    Error {
        #[serde(default = "one")]
        count: u64,
        #[serde(default = "server_error")]
        status: u16,
    },
    /// All steps take `factor` times as long (1 = as set up).
    Slow { factor: f64 },
    /// The process ends: connections cut, nothing said.
    Die,
    /// The same, when a generation request comes whose body has `text` in it: after `after_tokens` of its answer.
    DieOf {
        text: String,
        #[serde(default)]
        after_tokens: usize,
    },
}

fn one() -> u64 {
    1
}

fn server_error() -> u16 {
    500
}
