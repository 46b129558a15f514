//! The line before a pool in which every worker has enough.
//!
//! **Invariant:** whoever waits holds a [`Place`]; dropping it, however that comes, gives the place or the turn to the next.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fovea_balancer_core::queue::{Claim, Queue, Ticket};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};
use tokio::sync::oneshot;

use crate::config::queue::QueueConfig;
use crate::workers::{PoolRef, Saturation, Workers};

/// What the line shows.
#[derive(Clone, Debug)]
pub struct LineMetrics {
    waiting: Gauge,
    waited: Histogram,
    refused: Counter,
}

impl LineMetrics {
    pub fn register(r: &mut Registry) -> Self {
        let bounds = std::iter::successors(Some(0.001), |bound| Some(bound * 2.0)).take(15);
        let metrics = Self { waiting: Gauge::default(), waited: Histogram::new(bounds), refused: Counter::default() };
        r.register("queue_waiting", "Requests that wait for a worker", metrics.waiting.clone());
        r.register_with_unit("queue_wait", "Waits that ended with a turn", Unit::Seconds, metrics.waited.clone());
        r.register("queue_refused", "Requests refused after the wait, or for want of a place", metrics.refused.clone());
        metrics
    }
}

/// No turn came.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NoTurn;

struct PoolLine {
    pool: PoolRef,
    queue: Queue<oneshot::Sender<()>>,
    /// Whose turn it is has not been sent yet: the next waits for that, because until then the load does not show it.
    granted: Option<Ticket>,
}

pub struct Line {
    config: QueueConfig,
    workers: Arc<Workers>,
    pools: Mutex<Vec<PoolLine>>,
    metrics: LineMetrics,
}

/// A place in the line, and then a turn.
pub struct Place {
    line: Arc<Line>,
    pool: PoolRef,
    ticket: Ticket,
}

impl Drop for Place {
    fn drop(&mut self) {
        let mut pools = self.line.pools();
        if let Some(at) = pools.iter().position(|line| Arc::ptr_eq(&line.pool, &self.pool)) {
            let line = &mut pools[at];
            if line.queue.leave(self.ticket).is_some() {
                self.line.metrics.waiting.dec();
            }
            if line.granted == Some(self.ticket) {
                line.granted = None;
                self.line.grant(line);
            }
            if line.granted.is_none() && line.queue.is_empty() {
                pools.swap_remove(at);
            }
        }
    }
}

impl Line {
    /// To be called in a runtime.
    pub fn new(config: QueueConfig, workers: Arc<Workers>, metrics: LineMetrics) -> Arc<Self> {
        let line = Arc::new(Self { config, workers: Arc::clone(&workers), pools: Mutex::default(), metrics });
        let weak = Arc::downgrade(&line);
        tokio::spawn(async move {
            loop {
                workers.load_changed().await;
                let Some(line) = weak.upgrade() else { return };
                line.pools().iter_mut().for_each(|waiting| line.grant(waiting));
            }
        });
        line
    }

    fn saturation(&self) -> Saturation {
        Saturation { requests_max: u64::from(self.config.requests_max), cache_factor: self.config.saturation }
    }

    /// Waits until the pool has room; `None` = there was at once, and nobody waits. The turn lasts until its place is dropped, which
    /// should be as soon as the request is booked.
    ///
    /// # Errors
    /// When the line is full, or the wait too long.
    pub async fn turn(self: &Arc<Self>, pool: &PoolRef, claim: Claim) -> Result<Option<Place>, NoTurn> {
        let began = Instant::now();
        let Some((place, turn)) = self.join(pool, claim)? else { return Ok(None) };
        match tokio::time::timeout(self.config.wait_max, turn).await {
            Ok(Ok(())) => {
                self.metrics.waited.observe(began.elapsed().as_secs_f64());
                Ok(Some(place))
            }
            Ok(Err(_)) | Err(_) => {
                self.metrics.refused.inc();
                Err(NoTurn)
            }
        }
    }

    fn join(self: &Arc<Self>, pool: &PoolRef, claim: Claim) -> Result<Option<(Place, oneshot::Receiver<()>)>, NoTurn> {
        let mut pools = self.pools();
        let mut at = pools.iter().position(|line| Arc::ptr_eq(&line.pool, pool));
        if at.is_none() {
            if !self.workers.is_saturated(pool, self.saturation(), Instant::now()) {
                return Ok(None);
            }
            let queue = Queue::new(self.config.waiting_max);
            pools.push(PoolLine { pool: Arc::clone(pool), queue, granted: None });
            at = Some(pools.len() - 1);
        }
        let Some(line) = at.and_then(|at| pools.get_mut(at)) else { return Ok(None) };
        let (sender, turn) = oneshot::channel();
        let Ok(ticket) = line.queue.join(claim, sender) else {
            pools.retain(|line| line.granted.is_some() || !line.queue.is_empty());
            self.metrics.refused.inc();
            return Err(NoTurn);
        };
        self.metrics.waiting.inc();
        Ok(Some((Place { line: Arc::clone(self), pool: Arc::clone(pool), ticket }, turn)))
    }

    /// Gives the next in line a turn, if there is room and no turn is being used.
    fn grant(&self, line: &mut PoolLine) {
        if line.granted.is_some()
            || line.queue.is_empty()
            || self.workers.is_saturated(&line.pool, self.saturation(), Instant::now())
        {
            return;
        }
        if let Some((ticket, sender)) = line.queue.pop() {
            self.metrics.waiting.dec();
            line.granted = Some(ticket);
            // A receiver that is gone drops its place next, which passes the turn on.
            let _ = sender.send(());
        }
    }

    fn pools(&self) -> MutexGuard<'_, Vec<PoolLine>> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
