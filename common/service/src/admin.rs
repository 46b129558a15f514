//! The admin port: metrics, health, readiness and read-only JSON pages. Never on the port that clients reach.
//!
//! One request a connection, everything bounded: header size, time, connections.

use std::convert::Infallible;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, header};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use prometheus_client::registry::Registry;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Connections served at a time; more wait to be accepted.
const CONNECTIONS_MAX: usize = 64;
/// Request line and headers, in bytes.
const HEAD_BYTES_MAX: usize = 16 << 10;
/// From accept to the last byte of the answer.
const REQUEST_TIME_MAX: Duration = Duration::from_secs(10);
/// Of an action, from its request to its answer.
pub const ACTION_TIME_MAX: Duration = Duration::from_secs(3600);
/// After a failed accept, most often for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

const OPENMETRICS: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";
const JSON: &str = "application/json";
const TEXT: &str = "text/plain; charset=utf-8";

/// Does the program take requests?
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Readiness {
    Ready,
    /// Why not, for people: `draining`, `no worker`.
    NotReady(String),
}

/// A JSON page, made anew for each request. Must not block.
pub type Page = Arc<dyn Fn() -> serde_json::Value + Send + Sync>;

/// A request that takes its time, given the query; for the caller to wait on, [`ACTION_TIME_MAX`] at most. Served by GET and POST.
pub type Action = Arc<dyn Fn(&str) -> Pin<Box<dyn Future<Output = serde_json::Value> + Send>> + Send + Sync>;

/// What the admin port serves. `/healthz` answers 200 as long as the process runs.
#[derive(Clone)]
pub struct Admin {
    /// `/metrics`
    pub registry: Arc<Registry>,
    /// `/readyz`
    pub ready: Arc<dyn Fn() -> Readiness + Send + Sync>,
    /// Further paths, e.g. `/workers`.
    pub routes: Vec<(&'static str, Page)>,
    pub actions: Vec<(&'static str, Action)>,
}

impl Admin {
    pub fn new(registry: Arc<Registry>, ready: impl Fn() -> Readiness + Send + Sync + 'static) -> Self {
        Self { registry, ready: Arc::new(ready), routes: Vec::new(), actions: Vec::new() }
    }

    /// Adds a JSON page.
    #[must_use]
    pub fn route(mut self, path: &'static str, page: impl Fn() -> serde_json::Value + Send + Sync + 'static) -> Self {
        self.routes.push((path, Arc::new(page)));
        self
    }

    /// Adds an action.
    #[must_use]
    pub fn action<F>(mut self, path: &'static str, action: impl Fn(&str) -> F + Send + Sync + 'static) -> Self
    where
        F: Future<Output = serde_json::Value> + Send + 'static,
    {
        self.actions.push((path, Arc::new(move |query| Box::pin(action(query)))));
        self
    }

    fn answer(&self, method: &Method, path: &str) -> Response<Full<Bytes>> {
        if method != Method::GET && method != Method::HEAD {
            let mut refused = response(StatusCode::METHOD_NOT_ALLOWED, TEXT, "only GET\n".to_owned());
            refused.headers_mut().insert(header::ALLOW, header::HeaderValue::from_static("GET, HEAD"));
            return refused;
        }
        match path {
            "/metrics" => self.metrics(),
            "/healthz" => response(StatusCode::OK, TEXT, "ok\n".to_owned()),
            "/readyz" => match (self.ready)() {
                Readiness::Ready => response(StatusCode::OK, TEXT, "ready\n".to_owned()),
                Readiness::NotReady(reason) => response(StatusCode::SERVICE_UNAVAILABLE, TEXT, reason + "\n"),
            },
            _ => match self.routes.iter().find(|(route, _)| *route == path) {
                Some((_, page)) => response(StatusCode::OK, JSON, page().to_string() + "\n"),
                None => response(StatusCode::NOT_FOUND, TEXT, "no such page\n".to_owned()),
            },
        }
    }

    fn metrics(&self) -> Response<Full<Bytes>> {
        let mut page = String::new();
        match prometheus_client::encoding::text::encode(&mut page, &self.registry) {
            Ok(()) => response(StatusCode::OK, OPENMETRICS, page),
            Err(error) => {
                response(StatusCode::INTERNAL_SERVER_ERROR, TEXT, format!("cannot encode metrics: {error}\n"))
            }
        }
    }
}

fn response(status: StatusCode, content_type: &'static str, body: String) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(Bytes::from(body)));
    *response.status_mut() = status;
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(content_type));
    response
}

/// Serves until `stop`; then the requests in progress end within their time limit.
pub async fn serve(listener: TcpListener, admin: Admin, stop: CancellationToken) {
    let (admin, slots, tasks) = (Arc::new(admin), Arc::new(Semaphore::new(CONNECTIONS_MAX)), TaskTracker::new());
    let accept = async {
        while let Ok(slot) = Arc::clone(&slots).acquire_owned().await {
            match listener.accept().await {
                Ok((stream, _)) => {
                    let admin = Arc::clone(&admin);
                    tasks.spawn(async move {
                        let _slot = slot;
                        connection(stream, admin).await;
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept on the admin port");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    };
    stop.run_until_cancelled(accept).await;
    drop(listener);
    tasks.close();
    tasks.wait().await;
}

async fn connection(stream: TcpStream, admin: Arc<Admin>) {
    let acting = Arc::new(AtomicBool::new(false));
    let flag = Arc::clone(&acting);
    let service = service_fn(move |request: Request<Incoming>| {
        let (admin, flag) = (Arc::clone(&admin), Arc::clone(&flag));
        async move { Ok::<_, Infallible>(respond(&admin, &request, &flag).await) }
    });
    let mut served = pin!(
        http1::Builder::new()
            .keep_alive(false)
            .max_buf_size(HEAD_BYTES_MAX)
            .timer(TokioTimer::new())
            .header_read_timeout(REQUEST_TIME_MAX)
            .serve_connection(TokioIo::new(stream), service)
    );
    loop {
        match tokio::time::timeout(REQUEST_TIME_MAX, served.as_mut()).await {
            Ok(Ok(())) => return,
            Ok(Err(error)) => return tracing::debug!(%error, "admin connection failed"),
            // An action has its own limit, and its answer is sent within this one.
            Err(_) if acting.load(Relaxed) => {}
            Err(_) => return tracing::debug!("admin request took too long, connection closed"),
        }
    }
}

/// `acting` is set while an action runs.
async fn respond(admin: &Admin, request: &Request<Incoming>, acting: &AtomicBool) -> Response<Full<Bytes>> {
    let (method, path) = (request.method(), request.uri().path());
    let action = admin.actions.iter().find(|(at, _)| *at == path && [Method::GET, Method::POST].contains(method));
    let Some((_, action)) = action else { return admin.answer(method, path) };
    acting.store(true, Relaxed);
    let done = tokio::time::timeout(ACTION_TIME_MAX, action(request.uri().query().unwrap_or_default())).await;
    acting.store(false, Relaxed);
    match done {
        Ok(page) => response(StatusCode::OK, JSON, page.to_string() + "\n"),
        Err(_) => response(StatusCode::GATEWAY_TIMEOUT, TEXT, "not done in time\n".to_owned()),
    }
}

#[cfg(test)]
mod tests;
