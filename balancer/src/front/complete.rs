//! One completion request, from its body to the end of its answer.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

use bytes::Bytes;
use fovea_balancer_core::quarantine::Fingerprint;
use fovea_service::config::ByteSize;
use pingora_core::protocols::http::ServerSession;

use super::forward::Failed;
use super::plan::{Plan, Planned, Told};
use super::refusal::Refusal;
use super::tries::Asked;
use super::{Context, End, Front, body, fingerprint, media};
use crate::metrics::{ErrorKind, OutcomeLabels};
use crate::prepare::ApiPath;
use crate::tenants::Admitted;
use crate::workers::Route;

/// Bodies up to this length are hashed where they are; it takes some 10 µs.
const INLINE_BYTES: usize = 64 << 10;

impl Front {
    pub(super) async fn complete(
        &self,
        client: &mut ServerSession,
        path: ApiPath,
        context: &Context,
        admitted: &mut Admitted,
    ) -> Result<End, Refusal> {
        let body_max = self.config.limits.body_max;
        let body_max = admitted.tenant().body_max.map_or(body_max, |most| ByteSize::b(most).min(body_max));
        let reading = body::read(client, &self.budget, body_max, context.turn);
        let reading = tokio::time::timeout(self.config.timeouts.client_body, reading);
        let (body, room) = reading.await.map_err(|_| body::timed_out())??;
        let mut plan = self.plan(path, body.clone(), context).await?;
        self.charge(admitted, &plan, context)?;
        self.retries.earn();
        let print = self.print(path, admitted.tenant().number, plan.body.as_ref().unwrap_or(&body)).await;
        let sent = AtomicBool::new(false);
        let mut asked = Asked { body: plan.body.as_ref().unwrap_or(&body), print, sent: &sent };
        let mut answered = Box::pin(self.answer_of_a_worker(client, &plan, &asked, context)).await;
        if let Err(Failed::Upstream(ErrorKind::NoWorker, _)) = answered {
            // The pool's workers have gone, or are in another pool by now: another one may serve the model.
            plan = self.plan(path, body.clone(), context).await?;
            asked = Asked { body: plan.body.as_ref().unwrap_or(&body), print, sent: &sent };
            answered = Box::pin(self.answer_of_a_worker(client, &plan, &asked, context)).await;
        }
        if sent.into_inner()
            && let Err(Failed::ClientGone | Failed::Upstream(ErrorKind::UpstreamTimeout, _)) = answered
        {
            // An engine has worked for it, whoever stays to hear the answer.
            admitted.served(None, Instant::now());
        }
        drop((body, room));
        let answered = match answered {
            Ok(answered) => answered,
            Err(failed) => return self.failed(failed, &plan, context),
        };
        let (upstream, route) = (&answered.upstream, &answered.route);
        if upstream.head().status.is_success() {
            plan.watch(route);
        }
        let told = plan.told(self.workers.mode(), route);
        self.count(&told, route);
        Ok(self.relay(client, answered, told, print, context, admitted).await)
    }

    /// Names the request, where there is a quarantine.
    async fn print(&self, path: ApiPath, tenant: u32, body: &Bytes) -> Option<Fingerprint> {
        if !self.suspects.enabled() {
            return None;
        }
        if body.len() <= INLINE_BYTES {
            return Some(fingerprint::of(path, tenant, body));
        }
        let body = body.clone();
        tokio::task::spawn_blocking(move || fingerprint::of(path, tenant, &body)).await.ok()
    }

    fn failed(&self, failed: Failed, plan: &Plan, context: &Context) -> Result<End, Refusal> {
        Err(match failed {
            Failed::ClientGone => {
                self.metrics.error(ErrorKind::ClientGone);
                return Ok(End::Broken);
            }
            Failed::Upstream(ErrorKind::NoWorker, _) => self.planner.no_worker(&plan.prepared.model, context.turn),
            Failed::Upstream(kind, _) => Refusal::new(kind, "the worker did not answer"),
            Failed::Poison(left) => Refusal::poison(left),
            Failed::NoTurn => {
                let message = "every worker of this model has enough to do; try again soon";
                let busy = Refusal::busy(ErrorKind::Saturated, message, context.turn);
                Refusal { status: Some(self.config.queue.status), ..busy }
            }
        })
    }

    /// Looks at the body, fetches what it wants fetched, and looks again with that at hand.
    async fn plan(&self, path: ApiPath, body: Bytes, context: &Context) -> Result<Box<Plan>, Refusal> {
        let urls = match self.look(path, body.clone(), None, context).await? {
            Planned::Ready(plan) => return Ok(plan),
            Planned::Wants(urls) => urls,
        };
        let media = media::fetch(&self.fetcher, &self.config.media, &urls).await?;
        match self.look(path, body, Some(media), context).await? {
            Planned::Ready(plan) => Ok(plan),
            Planned::Wants(_) => Err(Refusal::new(ErrorKind::Internal, "the request could not be prepared")),
        }
    }

    async fn look(
        &self,
        path: ApiPath,
        body: Bytes,
        media: Option<media::Media>,
        context: &Context,
    ) -> Result<Planned, Refusal> {
        let busy = || Refusal::busy(ErrorKind::Busy, "too many requests are waiting; try again soon", context.turn);
        let slot = tokio::time::timeout(self.config.timeouts.queue, self.permits.take(&body));
        let slot = slot.await.map_err(|_| busy())?.map_err(|_| busy())?;
        let (planner, began) = (Arc::clone(&self.planner), Instant::now());
        let (turn, videos) = (context.turn, context.videos);
        let tenant = context.caller.as_ref().ok().map(|caller| Arc::clone(&caller.tenant));
        let planned = tokio::task::spawn_blocking(move || {
            let planned = planner.plan(path, &body, turn, videos, media, tenant.as_deref());
            drop(slot);
            planned
        });
        let planned = planned.await.unwrap_or_else(|error| {
            tracing::error!(%error, request = context.id, "preparing a request failed");
            Err(Refusal::new(ErrorKind::Internal, "the request could not be prepared"))
        });
        self.metrics.prepare_seconds.observe(began.elapsed().as_secs_f64());
        planned
    }

    fn count(&self, told: &Told, route: &Route) {
        self.metrics.decisions.get_or_create(&OutcomeLabels { outcome: told.outcome }).inc();
        self.metrics.overlap_blocks.inc_by(u64::from(route.confirmed_blocks));
        self.metrics.prompt_tokens.inc_by(u64::from(told.prompt_tokens));
        self.metrics.reused_tokens_predicted.inc_by(u64::from(route.reused_tokens));
    }
}
