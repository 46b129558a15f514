//! Where a planned request is tried: its place in line, a worker, and after a failure that allows it one other worker.
//!
//! **Invariant:** a request that an engine may have begun is tried again only while no byte of an answer has been seen, and once.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fovea_balancer_core::fleet::{State, WorkerKey};
use fovea_balancer_core::health::Sign;
use fovea_balancer_core::quarantine::{Fingerprint, Standing};
use fovea_balancer_core::queue::Claim;
use http::StatusCode;
use pingora_core::protocols::http::ServerSession;

use super::forward::{Failed, Upstream};
use super::plan::Plan;
use super::suspects::Trial;
use super::{Context, Front};
use crate::metrics::ErrorKind;
use crate::workers::Route;

/// What a sidecar adds to an answer that says nothing of an engine at work: `died`, `draining` or `unreachable`.
const ENGINE: &str = "x-fovea-engine";
/// A sidecar's block stream ends this soon after its connections.
const GONE_WITHIN: Duration = Duration::from_millis(250);
/// Workers that one request may be sent to, those that took nothing of it included.
const WORKERS_MAX: usize = 4;
const GONE_PAUSE: Duration = Duration::from_millis(10);

/// A request on its way to a worker.
pub(super) struct Asked<'a> {
    /// As it goes to a sidecar, after the preamble.
    pub body: &'a Bytes,
    /// `None` = there is no quarantine.
    pub print: Option<Fingerprint>,
    /// Some engine may have worked on it.
    pub sent: &'a AtomicBool,
}

/// An answer whose head has come, and from whom.
pub(super) struct Answered {
    pub upstream: Upstream,
    pub route: Route,
    pub trial: Option<Trial>,
}

/// What a try came to, besides its answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sight {
    /// The answer goes to the client, or nobody may try again.
    Final,
    /// Nothing of it has reached an engine.
    Untaken,
    /// An engine at work refused it, or what became of it is not known.
    Unserved,
    /// The engine ended under it.
    Died,
}

impl Front {
    /// The head of an answer: from the chosen worker, or once from another when that one refuses with 503 or dies. A worker that took nothing
    /// of the request is no try. `NoWorker` when the pool has nobody for it: a new plan may find another pool.
    pub(super) async fn answer_of_a_worker(
        &self,
        client: &mut ServerSession,
        plan: &Plan,
        asked: &Asked<'_>,
        context: &Context,
    ) -> Result<Answered, Failed> {
        let mut suspect = match self.suspects.standing(asked.print) {
            Standing::Clear => false,
            Standing::Suspect => true,
            Standing::Poison { left } => {
                self.suspects.refused();
                return Err(Failed::Poison(left));
            }
        };
        let (mut avoid, mut tried_again, mut last) = (Vec::new(), false, None);
        loop {
            let (route, trial) = match (self.place_while_there(client, plan, &avoid, suspect, context).await, &last) {
                (Ok(placed), _) => placed,
                (Err(Failed::Upstream(ErrorKind::NoWorker, _) | Failed::NoTurn), Some((_, free)))
                    if !(*free && self.is_served_elsewhere(plan)) =>
                {
                    break;
                }
                (Err(failed), _) => {
                    give_up(last).await;
                    return Err(failed);
                }
            };
            if last.is_some() {
                self.metrics.retries.inc();
            }
            avoid.push(route.booked.key);
            asked.sent.store(true, Ordering::Relaxed);
            let tried = Box::pin(self.try_worker(client, plan, &route, asked.body, context)).await;
            let sight = self.judge(route.booked.key, &tried).await;
            let tried = tried.map(|upstream| Answered { upstream, route, trial });
            // Work that nobody does any more adds no load elsewhere that was not there: only what an engine at work sent away is counted.
            let free = tried.as_ref().map_or(true, |answered| answered.upstream.head().headers.contains_key(ENGINE));
            last = Some(match (last.take(), tried) {
                // An engine that says why it cannot serve tells the client more than a later one that says nothing.
                (Some((Ok(busy), _)), Err(Failed::Upstream(..))) => (Ok(busy), free),
                (before, tried) => {
                    give_up(before).await;
                    (tried, free)
                }
            });
            if sight == Sight::Died {
                suspect = self.suspects.enabled();
                if let Standing::Poison { left } = self.suspects.died(asked.print) {
                    give_up(last).await;
                    return Err(Failed::Poison(left));
                }
            }
            let again = match sight {
                Sight::Final => false,
                Sight::Untaken => avoid.len() < WORKERS_MAX,
                Sight::Unserved | Sight::Died => {
                    !std::mem::replace(&mut tried_again, true) && (free || self.retries.spend())
                }
            };
            if !again {
                break;
            }
        }
        last.map_or(Err(Failed::NoTurn), |(last, _)| last)
    }

    fn is_served_elsewhere(&self, plan: &Plan) -> bool {
        self.workers.is_served_elsewhere(&plan.pool, &plan.prepared.model, Instant::now())
    }

    /// As [`Self::place`], until the client leaves.
    async fn place_while_there(
        &self,
        client: &mut ServerSession,
        plan: &Plan,
        avoid: &[WorkerKey],
        suspect: bool,
        context: &Context,
    ) -> Result<(Route, Option<Trial>), Failed> {
        tokio::select! {
            biased;
            placed = self.place(plan, avoid, suspect, context) => placed,
            _ = client.read_body_or_idle(true) => Err(Failed::ClientGone),
        }
    }

    /// Waits in line, and books a worker that is not `avoid`; a suspect one where no other is on trial.
    async fn place(
        &self,
        plan: &Plan,
        avoid: &[WorkerKey],
        suspect: bool,
        context: &Context,
    ) -> Result<(Route, Option<Trial>), Failed> {
        let tenant = context.caller.as_ref().ok().map(|caller| &caller.tenant);
        let claim = Claim {
            priority: plan.priority,
            tenant: tenant.map_or(0, |tenant| tenant.number),
            tokens: plan.load_tokens().into(),
            weight: tenant.map_or(1, |tenant| tenant.weight),
        };
        let deadline = Instant::now() + self.config.queue.wait_max;
        let _waits = suspect.then(|| self.suspects.wait());
        loop {
            let turn = self.line.turn(&plan.pool, claim).await.map_err(|_| Failed::NoTurn)?;
            // Made before the look, so that no end of a trial is missed.
            let (ended, now) = (self.suspects.trial_ended(), Instant::now());
            let free = |key| !avoid.contains(&key) && (!suspect || self.suspects.is_free(key, now));
            match self.workers.route_among(&plan.pool, &plan.ask(), free, now) {
                Some(route) if !suspect => return Ok((route, None)),
                Some(route) => {
                    if let Some(trial) = self.suspects.begin(route.booked.key, now) {
                        return Ok((route, Some(trial)));
                    }
                }
                None if suspect && self.suspects.try_any(now) => {
                    let left = deadline.saturating_duration_since(now);
                    if left.is_zero() {
                        return Err(Failed::NoTurn);
                    }
                    // Others go on meanwhile. However it ends: look again.
                    drop(turn);
                    let _ = tokio::time::timeout(left.min(self.suspects.trial_now()), ended).await;
                }
                None => {
                    let error = pingora_core::Error::new_str("no worker takes requests");
                    return Err(Failed::Upstream(ErrorKind::NoWorker, error));
                }
            }
        }
    }

    /// What a try tells of its worker, and whether another may follow.
    async fn judge(&self, key: WorkerKey, tried: &Result<Upstream, Failed>) -> Sight {
        let (sign, sight) = match tried {
            Ok(upstream) => {
                let head = upstream.head();
                match (head.headers.get(ENGINE).map(http::HeaderValue::as_bytes), head.status) {
                    (Some(b"died"), _) => (Some(Sign::Failed), Sight::Died),
                    (Some(b"draining"), _) => (None, Sight::Untaken),
                    (Some(b"unreachable"), _) => (Some(Sign::Failed), Sight::Untaken),
                    (_, StatusCode::SERVICE_UNAVAILABLE) => (Some(Sign::Failed), Sight::Unserved),
                    (_, status) if status.is_server_error() => (Some(Sign::Failed), Sight::Final),
                    _ => (Some(Sign::Served), Sight::Final),
                }
            }
            Err(Failed::Upstream(ErrorKind::Connect, _)) => (Some(Sign::Failed), Sight::Untaken),
            Err(Failed::Upstream(ErrorKind::UpstreamFailed, _)) => {
                let sight = if self.has_gone(key).await { Sight::Died } else { Sight::Unserved };
                (Some(Sign::Failed), sight)
            }
            // Slow is not sick.
            Err(Failed::Upstream(ErrorKind::UpstreamTimeout, _)) => (None, Sight::Final),
            Err(Failed::Upstream(..)) => (None, Sight::Unserved),
            Err(Failed::ClientGone | Failed::Poison(_) | Failed::NoTurn) => (None, Sight::Final),
        };
        if let Some(sign) = sign {
            self.workers.note(key, sign, Instant::now());
        }
        sight
    }

    /// The worker's stream ends too, and it did not say before that it stops.
    async fn has_gone(&self, key: WorkerKey) -> bool {
        let until = Instant::now() + GONE_WITHIN;
        while Instant::now() < until {
            match self.workers.state(key, Instant::now()) {
                None => return true,
                Some(State::Draining) => return false,
                Some(State::Up | State::Stale | State::Excluded) => tokio::time::sleep(GONE_PAUSE).await,
            }
        }
        false
    }

    /// An answer that had begun broke off, `silent` after its last piece.
    pub(super) fn broke_off(&self, key: WorkerKey, print: Option<Fingerprint>, silent: Duration) {
        let drains = self.workers.state(key, Instant::now()) == Some(State::Draining);
        // A silent engine is cut off at `stream_idle` by its sidecar; that is no death.
        if !drains && silent < self.config.timeouts.stream_idle / 2 {
            self.workers.note(key, Sign::Failed, Instant::now());
            self.suspects.died(print);
        }
    }
}

async fn give_up(last: Option<(Result<Answered, Failed>, bool)>) {
    if let Some((Ok(answered), _)) = last {
        answered.upstream.give_up().await;
    }
}
