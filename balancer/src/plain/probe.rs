//! One question to an engine: is it well, and which models does it serve?

use std::net::SocketAddr;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderValue, Request, StatusCode, header};
use http_body_util::{BodyExt as _, Empty, Limited};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde::Deserialize;
use tokio::time::timeout;

use super::ProbeEnd;
use crate::config::plain::PlainConfig;

/// A whole question, with the resolving of the name.
const PROBE_TIME_MAX: Duration = Duration::from_secs(2);
/// The answer of `/v1/models`.
const MODELS_BYTES_MAX: usize = 1 << 20;
/// Names of one engine that are taken.
const NAMES_MAX: usize = 256;

/// What an engine serves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Served {
    pub address: SocketAddr,
    /// In order, each once.
    pub names: Vec<String>,
    /// What vLLM calls the model's root, or its first name.
    pub root: String,
    /// In tokens; 0 = not told.
    pub max_model_len: u32,
}

#[derive(Debug, thiserror::Error)]
pub enum Failure {
    #[error("its name does not resolve: correct `workers[].url`")]
    Unresolved,
    #[error("no connection to it, or it broke")]
    Unreachable(#[from] hyper_util::client::legacy::Error),
    #[error("{path} answered {status}")]
    Status { path: &'static str, status: StatusCode },
    #[error("the answer of /v1/models cannot be read")]
    Models,
    #[error("it serves none of the models in `workers[].models`")]
    NoModel,
    #[error("it did not answer in {PROBE_TIME_MAX:?}, several times")]
    Slow,
}

impl Failure {
    pub fn end(&self) -> ProbeEnd {
        match self {
            Self::Unresolved | Self::Unreachable(_) => ProbeEnd::Unreachable,
            Self::Status { .. } | Self::Models | Self::NoModel => ProbeEnd::Unhealthy,
            Self::Slow => ProbeEnd::Slow,
        }
    }
}

/// As vLLM, SGLang and TensorRT-LLM answer.
#[derive(Deserialize)]
struct Models {
    data: Vec<Model>,
}

#[derive(Deserialize)]
struct Model {
    id: String,
    root: Option<String>,
    max_model_len: Option<u32>,
}

/// Asks one engine.
pub struct Prober {
    client: Client<HttpConnector, Empty<Bytes>>,
    /// `authorization` that the engine wants; vLLM's `--api-key` guards `/v1/models`.
    key: Option<HeaderValue>,
    address: Option<SocketAddr>,
}

impl Prober {
    pub fn new(key: Option<HeaderValue>) -> Self {
        Self { client: Client::builder(TokioExecutor::new()).build_http(), key, address: None }
    }

    /// # Errors
    /// When the engine takes no requests, as far as can be seen.
    pub async fn ask(&mut self, config: &PlainConfig) -> Result<Served, Failure> {
        let asked = timeout(PROBE_TIME_MAX, self.ask_all(config)).await.unwrap_or(Err(Failure::Slow));
        if asked.is_err() {
            // The name may stand for another address by now.
            self.address = None;
        }
        asked
    }

    async fn ask_all(&mut self, config: &PlainConfig) -> Result<Served, Failure> {
        let address = match self.address {
            Some(address) => address,
            None => {
                let found = tokio::net::lookup_host(config.authority().unwrap_or_default()).await;
                found.ok().and_then(|mut all| all.next()).ok_or(Failure::Unresolved)?
            }
        };
        self.address = Some(address);
        self.get(address, "/health").await?;
        let models = self.get(address, "/v1/models").await?;
        served(config, address, &models)
    }

    async fn get(&self, address: SocketAddr, path: &'static str) -> Result<Bytes, Failure> {
        let uri = http::Uri::builder().scheme("http").authority(address.to_string()).path_and_query(path);
        let uri = uri.build().map_err(|_| Failure::Unresolved)?;
        let mut request = Request::new(Empty::new());
        *request.uri_mut() = uri;
        if let Some(key) = &self.key {
            request.headers_mut().insert(header::AUTHORIZATION, key.clone());
        }
        let answer = self.client.request(request).await?;
        if answer.status() != StatusCode::OK {
            return Err(Failure::Status { path, status: answer.status() });
        }
        let body = Limited::new(answer.into_body(), MODELS_BYTES_MAX).collect().await;
        Ok(body.map_err(|_| Failure::Models)?.to_bytes())
    }
}

/// The names that may be asked for: those of the config that the engine serves, or all.
fn served(config: &PlainConfig, address: SocketAddr, models: &[u8]) -> Result<Served, Failure> {
    let Models { data } = serde_json::from_slice(models).map_err(|_| Failure::Models)?;
    let is_wanted = |model: &&Model| config.models.is_empty() || config.models.contains(&model.id);
    let wanted: Vec<_> = data.iter().filter(is_wanted).take(NAMES_MAX).collect();
    let first = wanted.first().ok_or(Failure::NoModel)?;
    let mut names: Vec<_> = wanted.iter().map(|model| model.id.clone()).filter(|name| !name.is_empty()).collect();
    names.sort();
    names.dedup();
    let root = first.root.clone().unwrap_or_else(|| first.id.clone());
    Ok(Served { address, names, root, max_model_len: first.max_model_len.unwrap_or(0) })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(wanted: &[&str], answer: &str, expect: Option<(&[&str], &str, u32)>) {
        let models: Vec<_> = wanted.iter().map(|name| format!("{name:?}")).collect();
        let config: PlainConfig =
            serde_json::from_str(&format!(r#"{{"url":"http://e:1","models":[{}]}}"#, models.join(","))).unwrap();
        let got = served(&config, ([127, 0, 0, 1], 1).into(), answer.as_bytes()).ok();
        let got = got.as_ref().map(|served| {
            let names: Vec<_> = served.names.iter().map(String::as_str).collect();
            (names, served.root.as_str(), served.max_model_len)
        });
        assert_eq!(got, expect.map(|(names, root, length)| (names.to_vec(), root, length)), "{answer}");
    }

    #[test]
    fn names_are_those_that_are_served_and_wanted() {
        let two = r#"{"object":"list","data":[{"id":"b","root":"/m","max_model_len":99},{"id":"a"}]}"#;
        check(&[], two, Some((&["a", "b"], "/m", 99)));
        check(&["a", "c"], two, Some((&["a"], "a", 0)));
        check(&["c"], two, None);
        for broken in ["", "[]", r#"{"data":[]}"#, r#"{"data":[{"id":7}]}"#] {
            check(&[], broken, None);
        }
    }
}
