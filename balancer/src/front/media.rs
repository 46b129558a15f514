//! Images and videos that a request gives by URL, fetched between two looks at it.

use std::collections::HashMap;
use std::time::Duration;

use fovea_openai::MediaKind;

use super::refusal::Refusal;
use crate::config::media::{IdentityPolicy, MediaConfig};
use crate::fetch::{Fetched, Fetcher, PartError, Reason};
use crate::metrics::ErrorKind;
use crate::prepare::{MediaSource, Named};

/// Files by URL in one request; engines allow far fewer.
const URLS_MAX: usize = 64;
/// One fetch is bounded by `media.timeout`; this bounds all of a request, should the fetcher fail to.
const SLACK: Duration = Duration::from_secs(1);

/// A file that a request names by URL.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Among the media parts.
    pub place: usize,
    pub kind: MediaKind,
    pub url: String,
}

impl Wanted {
    /// An engine may take what is too much for us: of a video that is no fault, and it stays with its engine.
    fn left_to_the_engine(&self, failed: &PartError) -> Option<&'static str> {
        let too_much = matches!(failed.error.cause, Reason::BodyTooLarge | Reason::Timeout | Reason::Busy);
        (self.kind == MediaKind::Video && too_much).then(|| failed.error.reason())
    }
}

/// What was fetched for one request.
#[derive(Default)]
pub struct Media {
    pub source: MediaSource,
}

/// Fetches the files at `urls`, all at once.
///
/// # Errors
/// The first refusal or failure, with the part's place: an engine must not be sent where we would not go, and what our fetch cannot
/// read an engine's would not either.
pub async fn fetch(fetcher: &Fetcher, config: &MediaConfig, urls: &[Wanted]) -> Result<Media, Refusal> {
    if urls.len() > URLS_MAX {
        let message = format!("more than {URLS_MAX} images and videos by URL: send fewer");
        return Err(Refusal { param: Some("messages"), ..Refusal::new(ErrorKind::BadRequest, message) });
    }
    let parts: Vec<_> = urls.iter().map(|wanted| (wanted.place, wanted.url.as_str())).collect();
    let bound = config.timeout + SLACK;
    let late =
        |_| Refusal::new(ErrorKind::BadRequest, "media could not be fetched in time: try again, or send it inline");
    match fetcher.policy() {
        IdentityPolicy::Content => {
            let fetched = tokio::time::timeout(bound, fetcher.fetch_parts(&parts)).await.map_err(late)?;
            let files = urls.iter().zip(fetched).map(|(wanted, file)| {
                let left = file.as_ref().err().and_then(|failed| wanted.left_to_the_engine(failed));
                let bytes = match left {
                    Some(reason) => Err(reason),
                    None => Ok(whole(file)?.bytes),
                };
                Ok((wanted.url.clone(), bytes))
            });
            let files = files.collect::<Result<_, Refusal>>()?;
            Ok(Media { source: MediaSource::Fetched { files, inline: config.inline } })
        }
        policy @ (IdentityPolicy::Validator | IdentityPolicy::Url) => {
            let looks =
                parts.iter().map(|(place, url)| async { fetcher.look(url).await.map_err(|error| error.at(*place)) });
            let looks = tokio::time::timeout(bound, futures_util::future::join_all(looks)).await.map_err(late)?;
            let mut names = HashMap::new();
            for (wanted, seen) in urls.iter().zip(looks) {
                if seen.as_ref().is_err_and(|failed| wanted.left_to_the_engine(failed).is_some()) {
                    continue;
                }
                let seen = whole(seen)?;
                if let Some(key) = seen.key(policy, &wanted.url) {
                    names.insert(wanted.url.clone(), Named { key, header: seen.header.ok() });
                }
            }
            Ok(Media { source: MediaSource::Named(names) })
        }
    }
}

fn whole(fetched: Result<Fetched, PartError>) -> Result<Fetched, Refusal> {
    fetched.map_err(|error| {
        let kind = match error.error.http_status() {
            503 => ErrorKind::Busy,
            _ => ErrorKind::Media,
        };
        Refusal { param: Some("messages"), ..Refusal::new(kind, error.to_string()) }
    })
}
