//! The engine's answer on its way back: frame by frame, and with it what must end when it ends.

use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http_body::{Frame, SizeHint};
use tokio::time::{Instant, Sleep};
use tokio_util::task::task_tracker::TaskTrackerToken;

use super::flight::Flight;
use crate::body::{Body, BodyError};
use crate::encode::Leases;
use crate::load::Charge;

/// A response body that keeps a request charged until it ends or is dropped, and that gives up on a silent engine.
pub struct Answer {
    inner: Body,
    charge: Option<Charge>,
    flight: Option<Flight>,
    idle: Duration,
    /// Runs while a frame is waited for: a client that takes its time is not the engine's silence.
    silent: Pin<Box<Sleep>>,
    waiting: bool,
    /// Of those that a drain waits for.
    held: Option<TaskTrackerToken>,
    /// What the engine may read until it has ended the request.
    leases: Option<Leases>,
}

#[derive(Debug, thiserror::Error)]
#[error("the engine sent nothing for {limit:?}; raise timeouts.stream_idle in sidecar.yaml if it is only slow")]
struct Silent {
    limit: Duration,
}

impl Answer {
    pub fn new(inner: Body, charge: Option<Charge>, flight: Option<Flight>, idle: Duration) -> Self {
        Self {
            inner,
            charge,
            flight,
            idle,
            silent: Box::pin(tokio::time::sleep(idle)),
            waiting: false,
            held: None,
            leases: None,
        }
    }

    /// Keeps a drain waiting until it ends or is dropped.
    #[must_use]
    pub fn holding(self, token: TaskTrackerToken) -> Self {
        Self { held: Some(token), ..self }
    }

    /// Keeps what the engine may read.
    #[must_use]
    pub fn leasing(self, leases: Option<Leases>) -> Self {
        Self { leases, ..self }
    }
}

impl http_body::Body for Answer {
    type Data = Bytes;
    type Error = BodyError;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BodyError>>> {
        let Poll::Ready(frame) = Pin::new(&mut self.inner).poll_frame(cx) else {
            if !std::mem::replace(&mut self.waiting, true) {
                let limit = Instant::now() + self.idle;
                self.silent.as_mut().reset(limit);
            }
            ready!(self.silent.as_mut().poll(cx));
            return Poll::Ready(Some(Err(BodyError::new(Silent { limit: self.idle }))));
        };
        self.waiting = false;
        match &frame {
            Some(Ok(frame)) => {
                if let Some(charge) = &mut self.charge {
                    charge.first_byte();
                }
                let this = &mut *self;
                if this.inner.is_end_stream() {
                    this.leases.take().into_iter().for_each(Leases::ended);
                }
                if let Some((flight, piece)) = this.flight.as_mut().zip(frame.data_ref()) {
                    flight.piece(piece);
                    // Nobody asks a body that says so for its end.
                    if this.inner.is_end_stream() {
                        flight.ended();
                    }
                }
            }
            Some(Err(_)) => (self.charge, self.flight) = (None, None),
            None => {
                (self.charge, self.held) = (None, None);
                self.leases.take().into_iter().for_each(Leases::ended);
                self.flight.take().into_iter().for_each(|mut flight| flight.ended());
            }
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use http_body_util::{BodyExt, StreamBody};
    use tokio::sync::{mpsc, watch};

    use super::*;
    use crate::load::RankLoad;

    fn stream() -> (mpsc::Sender<&'static str>, Body) {
        let (sender, mut receiver) = mpsc::channel::<&'static str>(4);
        let frames = futures_util::stream::poll_fn(move |cx| {
            receiver.poll_recv(cx).map(|text| text.map(|text| Ok::<_, BodyError>(Frame::data(Bytes::from(text)))))
        });
        (sender, StreamBody::new(frames).boxed_unsync())
    }

    #[tokio::test]
    async fn a_request_runs_from_the_first_byte_to_the_last() {
        let load = RankLoad::new(Arc::new(watch::channel(0).0));
        let counts = || (load.message(0).waiting, load.message(0).running);
        let (sender, body) = stream();
        let mut answer = Answer::new(body, Some(load.charge(10, 10)), None, Duration::from_secs(9));
        assert_eq!(counts(), (1, 0));
        sender.send("a").await.unwrap();
        assert!(answer.frame().await.unwrap().is_ok());
        assert_eq!(counts(), (0, 1));
        drop(sender);
        assert!(answer.frame().await.is_none());
        assert_eq!(counts(), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn a_slow_client_is_no_silent_engine() {
        let (sender, body) = stream();
        let mut answer = Answer::new(body, None, None, Duration::from_secs(9));
        sender.send("a").await.unwrap();
        assert!(answer.frame().await.unwrap().is_ok());
        tokio::time::advance(Duration::from_secs(20)).await;
        assert!(futures_util::FutureExt::now_or_never(answer.frame()).is_none());
        sender.send("b").await.unwrap();
        assert!(answer.frame().await.unwrap().is_ok());
    }

    #[tokio::test(start_paused = true)]
    async fn a_silent_engine_is_given_up_on() {
        let (sender, body) = stream();
        let mut answer = Answer::new(body, None, None, Duration::from_secs(9));
        sender.send("a").await.unwrap();
        assert!(answer.frame().await.unwrap().is_ok());
        assert!(answer.frame().await.unwrap().unwrap_err().to_string().contains("stream_idle"));
    }
}
