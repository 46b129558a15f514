//! Reads an engine's HTTP pages, each within a limit of time and length.

use std::time::Duration;

use bytes::Bytes;
use http::{Method, Request, StatusCode};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use serde::de::DeserializeOwned;

use super::DiscoverError;
use crate::body::{self, Body, BoxError};

pub type EngineClient = Client<HttpConnector, Body>;

/// Longest page read from the engine, in bytes; a real metrics page is about 100 kB.
const PAGE_BYTES_MAX: usize = 8 << 20;

/// The pages of one engine.
#[derive(Clone, Copy)]
pub struct Pages<'a> {
    pub client: &'a EngineClient,
    /// Base URL.
    pub base: &'a str,
    /// Of one page.
    pub limit: Duration,
}

impl Pages<'_> {
    /// # Errors
    /// No answer in time, or one that is no success.
    pub async fn get(&self, path: &'static str) -> Result<Bytes, DiscoverError> {
        self.ask(Method::GET, path).await
    }

    /// # Errors
    /// As [`Self::get`].
    pub async fn ask(&self, method: Method, path: &'static str) -> Result<Bytes, DiscoverError> {
        let unreachable = |source: BoxError| DiscoverError::Unreachable { path, source };
        let uri = format!("{}{path}", self.base.trim_end_matches('/'));
        let request = Request::builder().method(method).uri(uri).body(body::empty());
        let request = request.map_err(|error| unreachable(error.into()))?;
        let answer = tokio::time::timeout(self.limit, self.client.request(request)).await;
        let answer = answer.map_err(|_| DiscoverError::TooSlow { path, limit: self.limit })?;
        let answer = answer.map_err(|error| unreachable(error.into()))?;
        if !answer.status().is_success() {
            return Err(DiscoverError::Status { path, status: answer.status() });
        }
        let page = body::read(body::boxed(answer.into_body()), PAGE_BYTES_MAX, self.limit).await;
        page.map_err(|source| DiscoverError::Read { path, source })
    }

    /// # Errors
    /// As [`Self::get`], or the page is not of this shape.
    pub async fn json<T: DeserializeOwned>(&self, path: &'static str) -> Result<T, DiscoverError> {
        let page = self.get(path).await?;
        serde_json::from_slice(&page).map_err(|source| DiscoverError::Shape { path, source })
    }

    /// `None` = the engine has no such page.
    ///
    /// # Errors
    /// As [`Self::json`].
    pub async fn optional<T: DeserializeOwned>(&self, path: &'static str) -> Result<Option<T>, DiscoverError> {
        present(self.json(path).await)
    }

    /// The page as text, empty when the engine has none.
    ///
    /// # Errors
    /// As [`Self::get`].
    pub async fn text(&self, path: &'static str) -> Result<String, DiscoverError> {
        let page = present(self.get(path).await)?.unwrap_or_default();
        Ok(String::from_utf8_lossy(&page).into_owned())
    }
}

fn present<T>(page: Result<T, DiscoverError>) -> Result<Option<T>, DiscoverError> {
    match page {
        Ok(page) => Ok(Some(page)),
        Err(DiscoverError::Status { status: StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED, .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
