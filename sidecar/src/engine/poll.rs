//! Events of an engine that keeps them in a queue until they are fetched: TensorRT-LLM's `POST /kv_cache_events`.
//!
//! Each answer empties the queue, so this must be its only reader. Events are numbered per attention rank: a jump means that the
//! queue ran over (`event_buffer_max_size`), a step back that the engine is another one; either voids what is known, for there is no
//! replay. Requests cannot be sent to a rank, so the ranks are one worker, each a group of its own: its depth is an upper bound.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use fovea_kv::event::{Batch, KvEvent, Skipped};
use fovea_kv::replica::Count;
use fovea_kv::trtllm::{Media, Pulled, Puller};
use fovea_service::label::Snake;
use http::Method;
use tokio_util::sync::CancellationToken;

use super::discover::{EngineClient, Pages, RANKS_MAX};
use crate::metrics::{AnomalyLabels, EventMetrics, RankLabels, SkippedLabels};
use crate::state::State;
use crate::worker::{Stream, Worker};

const PATH: &str = "/kv_cache_events";
/// Servers before 1.3 hold an idle poll for 2 s.
const ANSWER_TIME_MAX: Duration = Duration::from_secs(10);

pub struct Poller {
    pub client: EngineClient,
    /// Base URL of the engine.
    pub base: String,
    pub media: Media,
    /// Tokens per block as the engine's pages say; 0 = they do not.
    pub block_size: u32,
    pub interval: Duration,
    pub worker: Arc<Worker>,
    pub state: Arc<State>,
    pub metrics: EventMetrics,
}

/// Order of the events of all ranks.
#[derive(Debug, Default)]
struct Order {
    /// Number of the next event, by rank.
    next: BTreeMap<u32, u64>,
    /// All events since the engine began were seen.
    whole: bool,
    seen: u64,
}

/// What an event's number says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Fits,
    Gap,
    Restart,
    /// Of more ranks than there can be.
    Stray,
}

impl Order {
    fn place(&mut self, rank: u32, id: u64) -> Place {
        if self.next.len() >= RANKS_MAX && !self.next.contains_key(&rank) {
            return Place::Stray;
        }
        self.seen += 1;
        match self.next.insert(rank, id.saturating_add(1)) {
            None if id == 0 => {
                self.whole |= self.next.len() == 1;
                Place::Fits
            }
            None => {
                self.whole = false;
                Place::Fits
            }
            // What is said under one number may come in parts.
            Some(next) if id == next || id.checked_add(1) == Some(next) => Place::Fits,
            Some(next) => {
                self.next = BTreeMap::from([(rank, id.saturating_add(1))]);
                self.whole = id < next && id == 0;
                if id > next { Place::Gap } else { Place::Restart }
            }
        }
    }
}

impl Poller {
    /// Polls until the stop.
    pub async fn run(self, stop: CancellationToken) {
        let (mut order, mut puller) = (Order::default(), self.puller());
        let mut ticks = tokio::time::interval(self.interval);
        ticks.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                _ = ticks.tick() => {}
            }
            let pages = Pages { client: &self.client, base: &self.base, limit: ANSWER_TIME_MAX };
            let answer = tokio::select! {
                biased;
                () = stop.cancelled() => break,
                answer = pages.ask(Method::POST, PATH) => answer,
            };
            match answer {
                Ok(page) => self.take(&page, &mut order, &mut puller),
                Err(error) if error.is_slow() || !self.worker.stream().live => {}
                Err(error) => {
                    // Whoever answers next may be another engine.
                    tracing::warn!(%error, "the engine's kv events cannot be fetched");
                    self.reset(&mut order);
                    puller = self.puller();
                    self.show(Stream::default());
                }
            }
        }
        self.metrics.connected.get_or_create(&self.labels()).set(0);
        self.metrics.complete.get_or_create(&self.labels()).set(0);
    }

    fn puller(&self) -> Puller {
        Puller::new(self.media).with_block_size(self.block_size)
    }

    fn take(&self, page: &[u8], order: &mut Order, puller: &mut Puller) {
        match puller.pull(page) {
            Ok(pulled) => pulled.into_iter().for_each(|one| self.apply(one, order)),
            Err(error) => {
                tracing::warn!(%error, "cannot read the engine's kv events");
                self.metrics.undecodable.get_or_create(&self.labels()).inc();
                // What was in it is gone.
                self.reset(order);
            }
        }
        self.state.learn(self.worker.take_learnt());
        if self.worker.flush() {
            self.state.announce();
        }
        self.show(Stream { live: true, complete: order.whole, watermark: order.seen.checked_sub(1) });
    }

    fn apply(&self, pulled: Pulled, order: &mut Order) {
        let count = match order.place(pulled.rank, pulled.event_id) {
            Place::Fits => None,
            Place::Gap => Some(Count::Gap),
            Place::Restart => Some(Count::Restart),
            Place::Stray => return,
        };
        if let Some(what) = count {
            self.metrics.anomalies.get_or_create(&AnomalyLabels { rank: self.worker.rank, what: Snake(what) }).inc();
            self.worker.reset();
            self.state.announce();
        }
        match pulled.event {
            Ok(mut event) => {
                group(&mut event, pulled.rank);
                self.metrics.batches.get_or_create(&self.labels()).inc();
                self.worker.apply(&Batch { events: vec![event], ..Batch::default() });
            }
            Err(cause) => {
                let labels = SkippedLabels { rank: self.worker.rank, cause: Snake(cause) };
                self.metrics.skipped.get_or_create(&labels).inc();
                if cause == Skipped::Removal {
                    // What is still held is not known any more.
                    self.worker.reset();
                    self.state.announce();
                    order.whole = false;
                }
            }
        }
    }

    fn reset(&self, order: &mut Order) {
        *order = Order { seen: order.seen, ..Order::default() };
        self.metrics.resets.get_or_create(&self.labels()).inc();
        self.worker.reset();
        self.state.announce();
    }

    fn show(&self, stream: Stream) {
        let before = self.worker.stream();
        self.worker.set_stream(stream);
        self.metrics.connected.get_or_create(&self.labels()).set(stream.live.into());
        self.metrics.complete.get_or_create(&self.labels()).set(stream.complete.into());
        let figure = stream.watermark.map_or(-1, |seen| i64::try_from(seen).unwrap_or(i64::MAX));
        self.metrics.watermark.get_or_create(&self.labels()).set(figure);
        if before.live != stream.live || before.watermark.is_none() != stream.watermark.is_none() {
            self.state.refresh_hello();
        }
    }

    fn labels(&self) -> RankLabels {
        RankLabels { rank: self.worker.rank }
    }
}

/// Blocks of each rank are counted by themselves.
fn group(event: &mut KvEvent, rank: u32) {
    match event {
        KvEvent::Stored(stored) => stored.group = rank,
        KvEvent::Removed(removed) => removed.group = rank,
        KvEvent::Cleared => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_tell_gaps_and_restarts_per_rank() {
        let mut order = Order::default();
        assert_eq!([(0, 0), (1, 0), (0, 1), (1, 1), (1, 1)].map(|(rank, id)| order.place(rank, id)), [Place::Fits; 5]);
        assert!(order.whole);
        assert_eq!((order.place(0, 5), order.whole), (Place::Gap, false));
        assert_eq!((order.place(0, 0), order.whole), (Place::Restart, true));
        assert_eq!((order.place(1, 0), order.whole), (Place::Fits, true));
    }

    #[test]
    fn a_queue_that_was_read_before_is_not_whole() {
        let mut order = Order::default();
        assert_eq!((order.place(0, 7), order.whole), (Place::Fits, false));
        assert_eq!((order.place(0, 8), order.whole), (Place::Fits, false));
    }
}
