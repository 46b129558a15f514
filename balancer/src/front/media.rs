//! Images that a request gives by URL, fetched between two looks at it.

use std::time::Duration;

use fovea_kv::MediaId;

use super::refusal::Refusal;
use crate::config::media::{IdentityPolicy, MediaConfig};
use crate::fetch::{Fetched, Fetcher, PartError};
use crate::metrics::ErrorKind;
use crate::prepare::MediaSource;

/// Images by URL in one request; engines allow far fewer.
const URLS_MAX: usize = 64;
/// One fetch is bounded by `media.timeout`; this bounds all of a request, should the fetcher fail to.
const SLACK: Duration = Duration::from_secs(1);

/// What was fetched for one request.
#[derive(Default)]
pub struct Media {
    pub source: MediaSource,
    /// Name of the first image where its bytes were not read.
    pub affinity: Option<MediaId>,
}

/// Fetches the images at `urls` (places among the media parts, and URLs), all at once.
///
/// # Errors
/// The first refusal or failure, with the part's place: an engine must not be sent where we would not go, and what our fetch cannot
/// read an engine's would not either.
pub async fn fetch(fetcher: &Fetcher, config: &MediaConfig, urls: &[(usize, String)]) -> Result<Media, Refusal> {
    if urls.len() > URLS_MAX {
        let message = format!("more than {URLS_MAX} images by URL: send fewer");
        return Err(Refusal { param: Some("messages"), ..Refusal::new(ErrorKind::BadRequest, message) });
    }
    let parts: Vec<_> = urls.iter().map(|(place, url)| (*place, url.as_str())).collect();
    let bound = config.timeout + SLACK;
    let late =
        |_| Refusal::new(ErrorKind::BadRequest, "media could not be fetched in time: try again, or send it inline");
    match fetcher.policy() {
        IdentityPolicy::Content => {
            let fetched = tokio::time::timeout(bound, fetcher.fetch_parts(&parts)).await.map_err(late)?;
            let files = urls.iter().zip(fetched).map(|((_, url), file)| Ok((url.clone(), Ok(whole(file)?.bytes))));
            let files = files.collect::<Result<_, Refusal>>()?;
            Ok(Media { source: MediaSource::Fetched { files, inline: config.inline }, affinity: None })
        }
        policy @ (IdentityPolicy::Validator | IdentityPolicy::Url) => {
            let looks =
                parts.iter().map(|(place, url)| async { fetcher.look(url).await.map_err(|error| error.at(*place)) });
            let looks = tokio::time::timeout(bound, futures_util::future::join_all(looks)).await.map_err(late)?;
            let seen = looks.into_iter().map(whole).collect::<Result<Vec<_>, _>>()?;
            let affinity = seen.first().zip(parts.first()).and_then(|(seen, (_, url))| seen.key(policy, url));
            Ok(Media { source: MediaSource::EngineOnly, affinity })
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
