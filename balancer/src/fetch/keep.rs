//! Files kept for the next request, and what their origins say about keeping.
//!
//! **Invariant:** with `fresh_for` at 0 a kept file is used only after its origin has confirmed its strong `ETag` at the same final URL.
//! `Last-Modified` is no proof: it cannot tell two files of one second apart, nor a file from an older one put back.

use std::time::Duration;

use http::header::{self, HeaderMap, HeaderValue};
use quick_cache::Weighter;
use quick_cache::sync::Cache;
use tokio::time::Instant;

use super::{Fetched, Want};

/// Memory of an entry besides its bytes and URLs, and what the byte budget rounds up.
const ENTRY_BYTES: u64 = 1536;

/// (URL without fragment, how much of the file).
pub(super) type Key = (String, Want);

#[derive(Clone)]
pub(super) struct Entry {
    pub fetched: Fetched,
    /// Where redirects led to; the tag means nothing elsewhere.
    pub final_url: String,
    pub tag: Option<HeaderValue>,
    pub fresh_until: Instant,
}

#[derive(Clone)]
pub(super) struct Weigh;

impl Weighter<Key, Entry> for Weigh {
    fn weight(&self, key: &Key, entry: &Entry) -> u64 {
        ENTRY_BYTES + (key.0.len() + entry.final_url.len() + entry.fetched.bytes.len()) as u64
    }
}

pub(super) type Kept = Cache<Key, Entry, Weigh>;

pub(super) fn kept(bytes_max: u64) -> Kept {
    // The estimate sizes tables alone: files of 64 KiB.
    Cache::with_weighter(usize::try_from(bytes_max >> 16).unwrap_or(usize::MAX).clamp(16, 1 << 16), bytes_max, Weigh)
}

/// For how long an answer may be used unasked; `None` = it must not be kept.
pub(super) fn freshness(headers: &HeaderMap, fresh_for: Duration) -> Option<Duration> {
    let mut fresh = fresh_for;
    let lines = headers.get_all(header::CACHE_CONTROL).iter().filter_map(|line| line.to_str().ok());
    let directives = lines.flat_map(|line| line.split(',')).map(str::trim);
    for directive in directives {
        let (name, value) = directive.split_once('=').unwrap_or((directive, ""));
        match name.trim().to_ascii_lowercase().as_str() {
            "no-store" | "private" => return None,
            "no-cache" => fresh = Duration::ZERO,
            "max-age" | "s-maxage" => {
                // Unreadable = stale, as RFC 9111 4.2.1 advises.
                let seconds = value.trim().trim_matches('"').parse().unwrap_or(0);
                fresh = fresh.min(Duration::from_secs(seconds).saturating_sub(age(headers)));
            }
            _ => {}
        }
    }
    // Our requests for one URL differ in nothing else that an origin could name here.
    if headers.get(header::VARY).is_some_and(|vary| vary == "*") { Some(Duration::ZERO) } else { Some(fresh) }
}

fn age(headers: &HeaderMap) -> Duration {
    let age = headers.get(header::AGE).and_then(|age| age.to_str().ok()?.trim().parse().ok());
    Duration::from_secs(age.unwrap_or(0))
}

/// The answer's `ETag` when it is strong: equal tags then mean equal bytes.
pub(super) fn strong_tag(headers: &HeaderMap) -> Option<HeaderValue> {
    let tag = headers.get(header::ETAG)?;
    let text = tag.as_bytes();
    (text.len() >= 2 && text.len() <= 256 && text.starts_with(b"\"") && text.ends_with(b"\"")).then(|| tag.clone())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn headers(lines: &[(&'static str, &'static str)]) -> HeaderMap {
        lines.iter().map(|(name, value)| (name.parse().unwrap(), HeaderValue::from_static(value))).collect()
    }

    #[track_caller]
    fn check(lines: &[(&'static str, &'static str)], fresh_for: u64, expect: Option<u64>) {
        let got = freshness(&headers(lines), Duration::from_secs(fresh_for));
        assert_eq!(got, expect.map(Duration::from_secs), "{lines:?}");
    }

    #[test]
    fn the_shorter_of_config_and_origin_counts() {
        check(&[], 0, Some(0));
        check(&[], 60, Some(60));
        check(&[("cache-control", "public, max-age=10")], 60, Some(10));
        check(&[("cache-control", "max-age=100000")], 60, Some(60));
        check(&[("cache-control", "max-age=50"), ("age", "45")], 60, Some(5));
        check(&[("cache-control", "max-age=nonsense")], 60, Some(0));
        check(&[("cache-control", "max-age=50"), ("vary", "accept-encoding")], 60, Some(50));
        check(&[("cache-control", "max-age=50"), ("vary", "*")], 60, Some(0));
    }

    #[test]
    fn no_store_and_no_cache_are_respected() {
        check(&[("cache-control", "no-store")], 60, None);
        check(&[("cache-control", "max-age=50"), ("cache-control", "No-Store")], 60, None);
        check(&[("cache-control", "private, max-age=50")], 60, None);
        check(&[("cache-control", "no-cache")], 60, Some(0));
    }

    #[test]
    fn only_strong_tags_count() {
        let tag = |text| strong_tag(&headers(&[("etag", text)])).is_some();
        assert!(tag(r#""abc""#) && !tag(r#"W/"abc""#) && !tag("abc") && !tag(r#"""#));
        assert!(strong_tag(&headers(&[])).is_none());
    }
}
