//! One request on its way through the engine: registered with its rank's closed loop before the engine sees it, and reported to it
//! when its answer ends, however it ends.

use std::sync::Arc;
use std::time::Instant;

use fovea_sidecar_core::verify::{Expected, FlightId, Outcome};

use super::usage::Usage;
use crate::worker::Worker;

/// What the closed loop is to compare with, put into a request by the step that read its record.
#[derive(Clone, Debug)]
pub struct Predicted(pub Expected);

/// Registered until the drop.
pub struct Flight {
    worker: Arc<Worker>,
    id: FlightId,
    usage: Usage,
    /// The answer came to its end, and was one.
    whole: bool,
}

impl Flight {
    /// Without a prediction its blocks are known to be somebody's, and no more.
    pub fn begin(worker: Arc<Worker>, id: FlightId, predicted: Option<Predicted>) -> Self {
        worker.begin(id, predicted.map(|Predicted(expected)| expected), Instant::now());
        Self { worker, id, usage: Usage::default(), whole: false }
    }

    /// A piece of the answer passed.
    pub fn piece(&mut self, bytes: &[u8]) {
        self.usage.feed(bytes);
    }

    /// The answer ended as it should.
    pub fn ended(&mut self) {
        self.whole = true;
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        let Usage { prompt_tokens, cached_tokens, .. } = self.usage;
        let outcome = Outcome { prompt_tokens, cached_tokens, failed: !self.whole };
        self.worker.finished(self.id, outcome, Instant::now());
    }
}
