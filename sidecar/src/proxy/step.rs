//! A tower layer out of one async function: `step(|request, inner| async { … })`.
//!
//! Every failure is a response by then, so services here never fail. Dropping the future drops all that the step holds.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};

use http::{Request, Response};
use tower::{Layer, Service, ServiceExt};

use super::refusal::Refusal;
use crate::body::Body;

/// What stands below a step.
pub trait Next:
    Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send> + Clone + Send + 'static
{
}

impl<S> Next for S where
    S: Service<Request<Body>, Response = Response<Body>, Error = Infallible, Future: Send> + Clone + Send + 'static
{
}

/// Passes the request down.
pub async fn pass<N: Next>(request: Request<Body>, next: N) -> Response<Body> {
    match next.oneshot(request).await {
        Ok(response) => response,
        Err(never) => match never {},
    }
}

#[derive(Clone)]
pub struct Step<F>(F);

/// Makes a layer of `function`.
pub fn step<F>(function: F) -> Step<F> {
    Step(function)
}

#[derive(Clone)]
pub struct Stepped<F, S> {
    function: F,
    inner: S,
}

impl<F: Clone, S> Layer<S> for Step<F> {
    type Service = Stepped<F, S>;

    fn layer(&self, inner: S) -> Self::Service {
        Stepped { function: self.0.clone(), inner }
    }
}

impl<F, S, Fut> Service<Request<Body>> for Stepped<F, S>
where
    F: Fn(Request<Body>, S) -> Fut,
    Fut: Future<Output = Result<Response<Body>, Refusal>> + Send + 'static,
    S: Next,
{
    type Response = Response<Body>;
    type Error = Infallible;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Body>, Infallible>> + Send>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let answer = (self.function)(request, self.inner.clone());
        Box::pin(async move { Ok(answer.await.unwrap_or_else(Refusal::into_response)) })
    }
}
