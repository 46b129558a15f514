//! One rank's walk from events to the outbox: source → replica → publisher → delta. All decisions are in the pure parts.

use std::sync::Arc;
use std::time::Duration;

use fovea_kv::replica::{Action, Input, Replica};
use fovea_service::label::Snake;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::discover::Wire;
use super::events::{EventSource, ReplayStream, SourceEvent};
use crate::metrics::{AnomalyLabels, EventMetrics, RankLabels, SkippedLabels};
use crate::state::State;
use crate::worker::{Stream, Worker};

/// From a connect to the first audit: the engine may have published between our connect and the moment it knew of our subscription.
const SETTLE: Duration = Duration::from_secs(1);

/// Between two replies of a replay. vLLM looks at its replay socket at least every 100 ms; a longer silence means that the
/// rest was dropped (0.32 sends at most 1000 replies to a slow reader, without an end marker).
const REPLAY_IDLE: Duration = Duration::from_secs(2);

/// Times of a follower.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Events are gathered this long into one delta.
    pub flush_interval: Duration,
    /// Silence after which the engine is asked whether the last event was lost.
    pub audit_after: Duration,
}

pub struct Follower<S: EventSource> {
    source: S,
    worker: Arc<Worker>,
    state: Arc<State>,
    metrics: EventMetrics,
    pace: Pace,
    replica: Replica,
    replay: Option<Replay<S::Replay>>,
    /// When the gathered events go out.
    flush_at: Option<Instant>,
    /// When to ask whether the last event was lost.
    audit_at: Option<Instant>,
    /// An audit runs, or the replay that it led to.
    auditing: bool,
    /// Highest batch that came by the subscription.
    live_seq: Option<u64>,
    /// Watermark before the present audit.
    audited: Option<u64>,
    connected: bool,
}

/// A replay that runs.
struct Replay<R> {
    ask: u64,
    stream: R,
    /// Without a reply until then it is given up; live batches come between and must not move it.
    silent_at: Instant,
}

/// Sleeps until then, or for ever.
async fn until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at).await,
        None => std::future::pending().await,
    }
}

/// The next answer of the replay that runs, as an input.
async fn reply<R: ReplayStream>(replay: &mut Option<Replay<R>>) -> Input {
    let Some(Replay { ask, stream, silent_at }) = replay else { return std::future::pending().await };
    let ask = *ask;
    match tokio::time::timeout_at(*silent_at, stream.next()).await {
        Ok(Ok(Some(frame))) => {
            *silent_at = Instant::now() + REPLAY_IDLE;
            Input::Replayed { ask, seq: frame.seq, payload: frame.payload.into() }
        }
        Ok(Ok(None)) => Input::ReplayEnd { ask },
        Ok(Err(error)) => {
            tracing::warn!(%error, "replay of events broke off");
            Input::ReplayFailed { ask }
        }
        Err(_) => {
            tracing::warn!(limit = ?REPLAY_IDLE, "replay of events fell silent");
            Input::ReplayFailed { ask }
        }
    }
}

impl<S: EventSource> Follower<S> {
    pub fn new(
        source: S,
        wire: Wire,
        worker: Arc<Worker>,
        state: Arc<State>,
        metrics: EventMetrics,
        pace: Pace,
    ) -> Self {
        Self {
            source,
            worker,
            state,
            metrics,
            pace,
            replica: Replica::new(move |payload| wire.decode(payload)),
            replay: None,
            flush_at: None,
            audit_at: None,
            auditing: false,
            live_seq: None,
            audited: None,
            connected: false,
        }
    }

    /// Follows until the stop.
    pub async fn run(mut self, stop: CancellationToken) {
        self.follow(stop).await;
        self.metrics.connected.get_or_create(&self.labels()).set(0);
        self.metrics.complete.get_or_create(&self.labels()).set(0);
    }

    async fn follow(&mut self, stop: CancellationToken) {
        let mut resets = self.state.resets();
        loop {
            let input = tokio::select! {
                biased;
                () = stop.cancelled() => return,
                Ok(()) = resets.changed() => Some(Input::CacheReset),
                () = until(self.flush_at) => { self.flush(); None }
                input = reply(&mut self.replay) => Some(input),
                event = self.source.next() => self.received(event),
                () = until(self.audit_at) => {
                    self.audit_at = Some(Instant::now() + self.pace.audit_after);
                    self.audit()
                }
            };
            let Some(input) = input else { continue };
            let urgent = matches!(input, Input::CacheReset);
            tokio::select! {
                biased;
                () = stop.cancelled() => return,
                () = self.step(input) => {}
            }
            if urgent {
                self.flush();
            }
        }
    }

    fn labels(&self) -> RankLabels {
        RankLabels { rank: self.worker.rank }
    }

    fn audit(&mut self) -> Option<Input> {
        if self.replay.is_some() || !self.replica.is_live() {
            return None;
        }
        (self.auditing, self.audited) = (true, self.replica.applied_seq());
        Some(Input::Audit)
    }

    fn received(&mut self, event: SourceEvent) -> Option<Input> {
        self.auditing &= !matches!(event, SourceEvent::Connected | SourceEvent::Disconnected);
        match event {
            SourceEvent::Connected => {
                tracing::info!(rank = self.worker.rank, "subscribed to the engine's events");
                (self.connected, self.live_seq) = (true, None);
                self.audit_at = Some(Instant::now() + SETTLE.min(self.pace.audit_after));
                Some(Input::Connected)
            }
            SourceEvent::Disconnected => {
                tracing::warn!(rank = self.worker.rank, "the engine's event stream ended");
                (self.connected, self.replay, self.audit_at) = (false, None, None);
                Some(Input::Disconnected)
            }
            SourceEvent::Frame(frame) => {
                self.audit_at = Some(Instant::now() + self.pace.audit_after);
                self.live_seq = Some(frame.seq);
                Some(Input::Live { seq: frame.seq, payload: frame.payload.into() })
            }
            SourceEvent::Malformed => {
                self.metrics.malformed.get_or_create(&self.labels()).inc();
                None
            }
        }
    }

    /// One input and all that follows from it. A replay that cannot be asked for is an input of its own; the replica bounds their number.
    async fn step(&mut self, input: Input) {
        let mut next = Some(input);
        while let Some(input) = next.take() {
            if matches!(input, Input::ReplayEnd { .. } | Input::ReplayFailed { .. }) {
                self.replay = None;
            }
            for action in self.replica.step(input) {
                if let Action::AskReplay { ask, from } = action {
                    self.replay = None;
                    // A dial may take a while.
                    self.flush();
                    match self.source.replay(from).await {
                        Ok(stream) => {
                            self.replay = Some(Replay { ask, stream, silent_at: Instant::now() + REPLAY_IDLE });
                        }
                        Err(error) => {
                            let rank = self.worker.rank;
                            // An audit comes again every few seconds.
                            if self.auditing {
                                tracing::debug!(rank, %error, "cannot ask whether events were lost");
                            } else {
                                tracing::warn!(rank, %error, "cannot ask for a replay");
                            }
                            next = Some(Input::ReplayFailed { ask });
                        }
                    }
                } else {
                    self.perform(action);
                }
            }
        }
        self.show();
    }

    fn perform(&mut self, action: Action) {
        let rank = self.worker.rank;
        match action {
            Action::AskReplay { .. } => {}
            Action::Apply(batch) => {
                self.metrics.batches.get_or_create(&self.labels()).inc();
                for &cause in &batch.skipped {
                    self.metrics.skipped.get_or_create(&SkippedLabels { rank, cause: Snake(cause) }).inc();
                }
                self.worker.apply(&batch);
                self.flush_at.get_or_insert_with(|| Instant::now() + self.pace.flush_interval);
            }
            Action::Reset => {
                tracing::warn!(rank, "what was known of the engine's blocks is void");
                self.metrics.resets.get_or_create(&self.labels()).inc();
                self.worker.reset();
                if std::mem::take(&mut self.auditing) {
                    // The subscription did not tell: it may belong to the old life.
                    self.source.reconnect();
                }
                self.state.announce();
            }
            Action::Undecodable { seq, error } => {
                tracing::warn!(rank, seq, %error, "cannot read a batch of events");
                self.metrics.undecodable.get_or_create(&self.labels()).inc();
            }
            Action::Count(what) => {
                self.metrics.anomalies.get_or_create(&AnomalyLabels { rank, what: Snake(what) }).inc();
            }
        }
    }

    fn flush(&mut self) {
        self.flush_at = None;
        // Before the blocks: a fact is what makes their names predictable.
        self.state.learn(self.worker.take_learnt());
        if self.worker.flush() {
            self.state.announce();
        }
    }

    /// Tells the others how the stream stands.
    fn show(&mut self) {
        let watermark = self.replica.applied_seq();
        let before = self.worker.stream();
        if self.auditing && self.replay.is_none() {
            self.auditing = false;
            if watermark > self.live_seq.max(self.audited) {
                tracing::warn!(rank = self.worker.rank, "events went past the subscription, subscribing anew");
                self.source.reconnect();
            }
        }
        let stream = Stream { live: self.replica.is_live(), complete: self.replica.is_complete(), watermark };
        let labels = self.labels();
        self.metrics.connected.get_or_create(&labels).set(self.connected.into());
        self.metrics.complete.get_or_create(&labels).set(stream.complete.into());
        let figure = watermark.map_or(-1, |seq| i64::try_from(seq).unwrap_or(i64::MAX));
        self.metrics.watermark.get_or_create(&labels).set(figure);
        self.worker.set_stream(stream);
        if before.live != stream.live || before.watermark.is_none() != watermark.is_none() {
            // Deltas before the claim that they are complete.
            self.flush();
            self.state.refresh_hello();
        }
    }
}

#[cfg(test)]
mod tests;
