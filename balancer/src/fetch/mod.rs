//! Media by URL: fetched under a policy, bounded in bytes, time and connections, kept for the next request.
//!
//! Knows nothing of requests or engines: a URL in, bytes or a refusal out.
//!
//! **Invariant:** every hop of every redirect has its URL checked, its name resolved, every answer checked, and is dialled at a checked address.
//! **Invariant:** changed content under an unchanged URL is seen: what is kept is used within `media.fresh_for` or after its origin confirmed it.

mod address;
mod client;
mod deadline;
mod error;
mod flight;
mod gate;
mod hops;
mod keep;
mod metrics;
mod read;
mod resolve;
mod url;

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use fovea_kv::MediaKey;
use fovea_media::header::{HeaderError, ImageHeader};
use futures_util::FutureExt as _;
use futures_util::future::join_all;
use tokio::time::Instant;

use crate::config::media::{IdentityPolicy, MediaConfig};

pub use client::SetupError;
pub use error::{Blame, FetchError, PartError, Reason};
pub use metrics::{MediaMetrics, RefusalLabels, Source, SourceLabels};
pub use resolve::{Resolve, System};

/// First piece asked for where only an image's header is wanted, in bytes …
const HEAD_FIRST: u32 = 4 << 10;
/// … and the largest.
const HEAD_MAX: u32 = 64 << 10;

/// How much of a file is wanted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
enum Want {
    Whole,
    /// So many bytes from its start; more when they came unasked.
    Head(u32),
}

/// A file, or its first bytes.
#[derive(Clone, Debug)]
pub struct Fetched {
    /// Counted against `media.bytes_max` until the last clone is dropped.
    pub bytes: Bytes,
    /// `bytes` is the whole file.
    pub complete: bool,
    /// Length of the whole file, as far as its origin told.
    pub length: Option<u64>,
    /// What the bytes say of an image. Other media have none here.
    pub header: Result<ImageHeader, HeaderError>,
    /// Strong `ETag`, quotes included.
    pub etag: Option<String>,
    /// Address of the origin.
    pub address: SocketAddr,
    /// Status of the answer that carried the bytes.
    pub status: u16,
    pub source: Source,
}

/// Fetches media. Clones share everything.
#[derive(Clone)]
pub struct Fetcher(Arc<Inner>);

struct Inner {
    config: MediaConfig,
    urls: url::Urls,
    addresses: address::Addresses,
    resolver: Arc<dyn Resolve>,
    client: client::Client,
    hosts: gate::Hosts,
    budget: gate::Budget,
    flights: flight::Flights,
    kept: keep::Kept,
    metrics: MediaMetrics,
}

impl Fetcher {
    /// With the system's resolver.
    ///
    /// # Errors
    /// When `media.ca_file` cannot be used.
    pub fn new(config: &MediaConfig, metrics: MediaMetrics) -> Result<Self, SetupError> {
        Self::with_resolver(config, metrics, Arc::new(System::default()))
    }

    /// # Errors
    /// When `media.ca_file` cannot be used.
    pub fn with_resolver(
        config: &MediaConfig,
        metrics: MediaMetrics,
        resolver: Arc<dyn Resolve>,
    ) -> Result<Self, SetupError> {
        Ok(Self(Arc::new(Inner {
            urls: url::Urls::new(config),
            addresses: address::Addresses::new(&config.allow, &config.deny),
            resolver,
            client: client::Client::new(config)?,
            hosts: gate::Hosts::new(config.per_host_max, config.fetches_max),
            budget: gate::Budget::new(config.bytes_max.as_u64()),
            flights: flight::Flights::default(),
            kept: keep::kept(config.cache_max.as_u64()),
            metrics,
            config: config.clone(),
        })))
    }

    /// What names an image behind a URL: decides between [`fetch`](Self::fetch) and [`look`](Self::look).
    pub fn policy(&self) -> IdentityPolicy {
        self.0.config.identity
    }

    /// The whole file. Takes `media.timeout` at most; cancel-safe. Equal URLs asked for at one time share one exchange.
    ///
    /// # Errors
    /// Every refusal and failure, counted once.
    pub async fn fetch(&self, url: &str) -> Result<Fetched, FetchError> {
        self.get(url, Want::Whole).await
    }

    /// As much of an image as tells its size: the first 4 KiB, or 64. A whole small file comes along as it is.
    ///
    /// # Errors
    /// Every refusal and failure, counted once.
    pub async fn look(&self, url: &str) -> Result<Fetched, FetchError> {
        let first = self.get(url, Want::Head(HEAD_FIRST)).await?;
        let short = !first.complete && first.bytes.len() <= HEAD_FIRST as usize;
        match first.header {
            Err(HeaderError::Truncated { .. }) if short => self.get(url, Want::Head(HEAD_MAX)).await,
            _ => Ok(first),
        }
    }

    /// Whole files of several media parts at a time, in the order given.
    pub async fn fetch_parts(&self, parts: &[(usize, &str)]) -> Vec<Result<Fetched, PartError>> {
        let one = async |part: usize, url: &str| self.fetch(url).await.map_err(|error| error.at(part));
        join_all(parts.iter().map(|(part, url)| one(*part, url))).await
    }

    async fn get(&self, url: &str, want: Want) -> Result<Fetched, FetchError> {
        let started = Instant::now();
        let got = self.kept_or_fetched(url, want).await;
        let metrics = &self.0.metrics;
        metrics.seconds.observe(started.elapsed().as_secs_f64());
        match &got {
            Ok(Fetched { source, .. }) => metrics.fetches.get_or_create(&SourceLabels { source: *source }).inc(),
            Err(error) => {
                tracing::debug!(reason = error.reason(), address = ?error.address, status = ?error.status, "media refused");
                metrics.refusals.get_or_create(&RefusalLabels { reason: error.cause }).inc()
            }
        };
        got
    }

    async fn kept_or_fetched(&self, url: &str, want: Want) -> Result<Fetched, FetchError> {
        let inner = &self.0;
        if !inner.config.enabled {
            return Err(Reason::Disabled.into());
        }
        let target = inner.urls.first(url)?;
        let key = (target.as_str().to_owned(), want);
        let kept = inner.kept.get(&key);
        if let Some(entry) = kept.as_ref().filter(|entry| Instant::now() < entry.fresh_until) {
            return Ok(Fetched { source: Source::Cache, ..entry.fetched.clone() });
        }
        let start = || hops::run(Arc::clone(inner), target, want, kept).boxed();
        let (flight, joined) = inner.flights.join(&key, start);
        if joined {
            inner.metrics.shared.inc();
        }
        flight.await
    }
}

impl Fetched {
    /// Name of the image behind `url` under a policy that does not read it whole; `None` when the policy reads the bytes
    /// (`content`), or when its origin told too little. The name says which policy made it.
    pub fn key(&self, policy: IdentityPolicy, url: &str) -> Option<MediaKey> {
        let name = match policy {
            IdentityPolicy::Content => return None,
            IdentityPolicy::Url => format!("url {}", url::normalised(url)?),
            IdentityPolicy::Validator => {
                let place = url::without_query(url)?;
                let (etag, length) = (self.etag.as_deref()?, self.length?);
                format!("validator {place} {etag} {length}")
            }
        };
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"fovea-url").update(name.as_bytes());
        Some(MediaKey(*hasher.finalize().as_bytes()))
    }
}
