//! A small HTTP client: whole answers, and streams with the time of their first token.

use std::time::{Duration, Instant};

use anyhow::Context;
use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client as Pool;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

/// Longest wait for a whole answer.
const ANSWER_MAX: Duration = Duration::from_secs(120);

#[derive(Clone)]
pub struct Client {
    pool: Pool<HttpConnector, Full<Bytes>>,
}

#[derive(Debug)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

/// What a streamed chat completion showed.
#[derive(Debug)]
pub struct Streamed {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub first_token: Duration,
    pub total: Duration,
    /// The last `usage` object seen.
    pub usage: Value,
    /// Whole text of the events.
    pub text: String,
}

impl Default for Client {
    fn default() -> Self {
        let mut connector = HttpConnector::new();
        connector.set_nodelay(true);
        Self { pool: Pool::builder(TokioExecutor::new()).build(connector) }
    }
}

impl Client {
    /// Sends a request and gives the answer with its body still to be read.
    pub async fn open(
        &self,
        method: Method,
        url: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> anyhow::Result<Response<Incoming>> {
        let mut request = Request::builder().method(method).uri(url).header("content-type", "application/json");
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        Ok(self.pool.request(request.body(Full::new(body))?).await?)
    }

    pub async fn send(
        &self,
        method: Method,
        url: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> anyhow::Result<Answer> {
        let whole = async {
            let (head, body) = self.open(method, url, headers, body).await?.into_parts();
            let body = body.collect().await?.to_bytes();
            anyhow::Ok(Answer { status: head.status, headers: head.headers, body })
        };
        tokio::time::timeout(ANSWER_MAX, whole).await.with_context(|| format!("no answer from {url}"))?
    }

    pub async fn get(&self, url: &str) -> anyhow::Result<Answer> {
        self.send(Method::GET, url, &[], Bytes::new()).await
    }

    /// GET that must answer 200 with JSON.
    pub async fn get_json(&self, url: &str) -> anyhow::Result<Value> {
        let answer = self.get(url).await?;
        anyhow::ensure!(answer.status == StatusCode::OK, "{url}: {} {:?}", answer.status, answer.body);
        answer.json()
    }

    pub async fn post(&self, url: &str, body: impl Into<Bytes>) -> anyhow::Result<Answer> {
        self.send(Method::POST, url, &[], body.into()).await
    }

    /// Posts a body that asks for a stream with usage, and reads it to its end.
    pub async fn stream(&self, url: &str, body: Bytes) -> anyhow::Result<Streamed> {
        let start = Instant::now();
        let whole = async {
            let (head, mut body) = self.open(Method::POST, url, &[], body).await?.into_parts();
            let (mut text, mut first_token) = (Vec::new(), None);
            while let Some(frame) = body.frame().await {
                if let Ok(data) = frame?.into_data() {
                    first_token.get_or_insert_with(|| start.elapsed());
                    text.extend_from_slice(&data);
                }
            }
            let text = String::from_utf8(text)?;
            let usage =
                text.lines().filter_map(|line| serde_json::from_str::<Value>(line.strip_prefix("data: ")?).ok());
            let usage = usage.filter_map(|event| event.get("usage").filter(|u| !u.is_null()).cloned()).next_back();
            let total = start.elapsed();
            anyhow::Ok(Streamed {
                status: head.status,
                headers: head.headers,
                first_token: first_token.unwrap_or(total),
                total,
                usage: usage.unwrap_or(Value::Null),
                text,
            })
        };
        tokio::time::timeout(ANSWER_MAX, whole).await.with_context(|| format!("no end of the stream from {url}"))?
    }
}

impl Answer {
    pub fn json(&self) -> anyhow::Result<Value> {
        serde_json::from_slice(&self.body).with_context(|| format!("not JSON: {:?}", self.body))
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }
}

impl Streamed {
    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).and_then(|value| value.to_str().ok()).unwrap_or_default()
    }

    /// (prompt tokens, cached tokens) as the engine counted them.
    pub fn tokens(&self) -> (u64, u64) {
        let prompt = self.usage.pointer("/prompt_tokens").and_then(Value::as_u64).unwrap_or_default();
        let cached =
            self.usage.pointer("/prompt_tokens_details/cached_tokens").and_then(Value::as_u64).unwrap_or_default();
        (prompt, cached)
    }
}
