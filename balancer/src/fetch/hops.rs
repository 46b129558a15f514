//! One fetch: hop by hop through its redirects, to a file or a refusal.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use http::header;
use tokio::time::Instant;

use super::client::{Answer, Conditions};
use super::deadline::by;
use super::error::{FetchError, Reason};
use super::keep::{Entry, freshness, strong_tag};
use super::url::Target;
use super::{Fetched, Inner, Source, Want, read};

/// Where a hop led.
enum Hop {
    File(Box<Entry>, Keep),
    Redirect(Target),
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Keep {
    Yes,
    No,
}

/// Fetches `first`; `kept` is what an earlier fetch of the same left here.
pub(super) async fn run(
    inner: Arc<Inner>,
    first: Target,
    want: Want,
    kept: Option<Entry>,
) -> Result<Fetched, FetchError> {
    let deadline = Instant::now() + inner.config.timeout;
    let key = (first.as_str().to_owned(), want);
    let (mut target, mut last) = (first, FetchError::from(Reason::Redirect));
    for _ in 0..=inner.config.redirects_max {
        match inner.hop(&target, want, kept.as_ref(), deadline, &mut last).await? {
            Hop::Redirect(next) => target = next,
            Hop::File(entry, keep) => {
                let fetched = entry.fetched.clone();
                match keep {
                    Keep::Yes => inner.kept.insert(key, *entry),
                    Keep::No => _ = inner.kept.remove(&key),
                }
                return Ok(fetched);
            }
        }
    }
    Err(last)
}

impl Inner {
    /// One exchange. `last` remembers its address and status, in case this was one redirect too many.
    async fn hop(
        &self,
        target: &Target,
        want: Want,
        kept: Option<&Entry>,
        deadline: Instant,
        last: &mut FetchError,
    ) -> Result<Hop, FetchError> {
        let host = target.host();
        let _place = by(deadline, Reason::Busy, self.hosts.enter(&host)).await?;
        let addresses = self.addresses_of(target, &host, deadline).await?;
        let asked = Instant::now();
        // A tag says something of the very URL that it came from.
        let kept = kept.filter(|entry| entry.tag.is_some() && entry.final_url == target.as_str());
        let conditions = Conditions { first: want.first(), if_none_match: kept.and_then(|entry| entry.tag.clone()) };
        let answer = by(deadline, Reason::Timeout, self.client.get(target, &addresses, conditions)).await;
        let tried = addresses.first().map(|address| SocketAddr::new(*address, target.port));
        let answer = answer
            .map_err(|cause| FetchError { cause, address: tried, status: None })?
            .map_err(|(cause, address)| FetchError { cause, address, status: None })?;
        let status = answer.response.status().as_u16();
        *last = FetchError { cause: Reason::Redirect, address: Some(answer.address), status: Some(status) };
        let failed = FetchError { ..*last };
        let fail = |cause| FetchError { cause, ..failed };
        match (status, kept) {
            (301 | 302 | 303 | 307 | 308, _) => self.redirect(target, &answer).map(Hop::Redirect).map_err(fail),
            (304, Some(entry)) => Ok(self.unchanged(entry, &answer, asked)),
            (200, _) => self.file(answer, target, want, asked, deadline).await.map_err(fail),
            (206, _) if want != Want::Whole => self.file(answer, target, want, asked, deadline).await.map_err(fail),
            _ => Err(fail(Reason::Status)),
        }
    }

    /// All addresses of the host, each of them open.
    async fn addresses_of(&self, target: &Target, host: &str, deadline: Instant) -> Result<Vec<IpAddr>, FetchError> {
        let addresses = match target.address() {
            Some(address) => vec![address],
            None => by(deadline, Reason::Timeout, self.resolver.resolve(host)).await?.map_err(|error| {
                tracing::debug!(%error, "media: name not resolved");
                Reason::Dns
            })?,
        };
        if addresses.is_empty() {
            return Err(Reason::Dns.into());
        }
        match addresses.iter().find(|address| !self.addresses.allows(**address)) {
            Some(address) => {
                let address = Some(SocketAddr::new(*address, target.port));
                Err(FetchError { cause: Reason::Address, address, status: None })
            }
            None => Ok(addresses),
        }
    }

    fn redirect(&self, from: &Target, answer: &Answer) -> Result<Target, Reason> {
        let location = answer.response.headers().get(header::LOCATION).and_then(|location| location.to_str().ok());
        self.urls.next(from, location.ok_or(Reason::Redirect)?).map_err(|reason| match reason {
            Reason::BadUrl => Reason::Redirect,
            other => other,
        })
    }

    /// The origin confirmed what is kept.
    fn unchanged(&self, entry: &Entry, answer: &Answer, asked: Instant) -> Hop {
        let fresh = freshness(answer.response.headers(), self.config.fresh_for);
        let fetched = Fetched { source: Source::Revalidated, address: answer.address, ..entry.fetched.clone() };
        let entry = Entry { fetched, fresh_until: asked + fresh.unwrap_or_default(), ..entry.clone() };
        Hop::File(Box::new(entry), if fresh.is_some() { Keep::Yes } else { Keep::No })
    }

    async fn file(
        &self,
        answer: Answer,
        target: &Target,
        want: Want,
        asked: Instant,
        deadline: Instant,
    ) -> Result<Hop, Reason> {
        let headers = answer.response.headers();
        let (fresh, tag) = (freshness(headers, self.config.fresh_for), strong_tag(headers));
        let mut fetched = read::file(self, answer, want, deadline).await?;
        fetched.etag = tag.as_ref().and_then(|tag| Some(tag.to_str().ok()?.to_owned()));
        let useful = tag.is_some() || fresh.is_some_and(|fresh| !fresh.is_zero());
        let keep = if fresh.is_some() && useful { Keep::Yes } else { Keep::No };
        let fresh_until = asked + fresh.unwrap_or_default();
        Ok(Hop::File(Box::new(Entry { fetched, final_url: target.as_str().to_owned(), tag, fresh_until }), keep))
    }
}
