//! A planned request at one worker, and the answer back.

use std::time::Instant;

use bytes::Bytes;
use fovea_balancer_core::quarantine::Fingerprint;
use pingora_core::protocols::http::ServerSession;

use super::forward::{self, Failed, Relayed, Upstream};
use super::plan::{Plan, Told};
use super::tries::Answered;
use super::usage::Usage;
use super::{Context, End, Front, dial, gate, headers, respond};
use crate::metrics::ErrorKind;
use crate::plain;
use crate::tenants::Admitted;
use crate::workers::Route;

/// How vLLM (0.32) begins the event of an engine that fails after the head of a streamed answer.
const ERROR_EVENT: &[u8] = b"data: {\"error\"";

impl Front {
    pub(super) async fn try_worker(
        &self,
        client: &mut ServerSession,
        plan: &Plan,
        route: &Route,
        body: &Bytes,
        context: &Context,
    ) -> Result<Upstream, Failed> {
        let invalid = |error| Failed::Upstream(ErrorKind::Internal, error);
        let target = dial::Target::new(&route.url)
            .ok_or_else(|| invalid(pingora_core::Error::new_str("worker has no usable address")))?;
        let (preamble, body) = match route.plain {
            true => (Bytes::new(), plain::body(&plan.prepared.preamble, body)),
            false => (Bytes::from(plan.preamble(route)), Some(body.clone())),
        };
        let body = body.ok_or_else(|| invalid(pingora_core::Error::new_str("the body cannot be cut")))?;
        let outgoing = headers::Outgoing {
            path: client.req_header().uri.path(),
            authority: &target.address.to_string(),
            request_id: &context.id,
            content_bytes: preamble.len() + body.len(),
            preamble_bytes: preamble.len(),
            key: self.key.as_ref().filter(|_| !route.plain),
            keys_stop: self.keys.stop_at_us(),
            engine_key: self.keys.engines.as_ref(),
        };
        let timeouts = &self.config.timeouts;
        let request = forward::Request {
            head: headers::to_sidecar(&client.req_header().headers, &outgoing).map_err(invalid)?,
            preamble,
            body,
            head_wait: if plan.prepared.stream { timeouts.first_byte } else { timeouts.total },
        };
        let answered = forward::exchange(&self.connector, client, target, &request, timeouts).await;
        if let Err(Failed::Upstream(_, error)) = &answered {
            forward::log_failure(&route.name, route.booked.key, error);
        }
        answered
    }

    pub(super) async fn relay(
        &self,
        client: &mut ServerSession,
        answered: Answered,
        told: Told,
        print: Option<Fingerprint>,
        context: &Context,
        admitted: &mut Admitted,
    ) -> End {
        let Answered { upstream, ref route, mut trial } = answered;
        if self.stop.is_cancelled() {
            // A connection that ends after this answer says so.
            client.set_keepalive(None);
        }
        let explained = self.config.debug_headers.then_some((&told, route));
        let head = respond::head(client, upstream.head(), &context.id, explained).and_then(|mut head| {
            gate::mark(&mut head, admitted.standing(Instant::now()))?;
            Ok(head)
        });
        let Ok(head) = head else {
            upstream.give_up().await;
            self.metrics.error(ErrorKind::Internal);
            return End::Broken;
        };
        let status = head.status;
        let (mut begun, mut usage, mut failed) = (false, Usage::default(), false);
        let piece_came = |piece: &[u8]| {
            failed |= piece.starts_with(ERROR_EVENT);
            if !std::mem::replace(&mut begun, true) {
                // The part of a request that ends engines most is over.
                trial = None;
                // An engine that refuses a request caches nothing of it.
                if status.is_success() {
                    route.booked.started();
                    admitted.served(None, Instant::now());
                }
                self.metrics.first_byte_seconds.observe(context.began.elapsed().as_secs_f64());
            }
            usage.feed(piece);
        };
        let relayed = forward::relay(&self.connector, client, upstream, head, piece_came).await;
        if status.is_success() {
            usage.settle(admitted, &told, route, &self.metrics.tenants);
        }
        tracing::debug!(
            request = context.id,
            model = told.model,
            worker = %route.name,
            status = status.as_u16(),
            prompt_tokens = told.prompt_tokens,
            reused_tokens = route.reused_tokens,
            seconds = context.began.elapsed().as_secs_f64(),
            end = ?relayed,
            "request served"
        );
        match relayed {
            Relayed::Whole => {
                if status.is_success() && !failed {
                    self.suspects.answered(print);
                }
                return End::Answered;
            }
            Relayed::ClientGone => self.metrics.error(ErrorKind::ClientGone),
            Relayed::UpstreamBroke(silent) => {
                self.broke_off(route.booked.key, print, silent);
                self.metrics.error(ErrorKind::UpstreamBroke);
            }
        }
        End::Broken
    }
}
