//! All that is asked of the engine, in one place: sockets first, then pages, then the probe. The checks only read what is here.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use futures_util::future::join_all;
use http::header;

use super::ask::{Answer, Ask, http_date};
use super::family::{self, Family, Told};
use super::host::{self, Open};
use super::listen::{self, Link};
use super::probe::{self, Plan, Probe};
use crate::config::Config;
use crate::engine::discover::Discovered;
use crate::engine::version::Version;

/// Ranks whose sockets are tried.
const RANKS_TRIED: usize = 16;

/// What was found out.
pub struct Evidence<'a> {
    pub config: &'a Config,
    /// Name that was asked for.
    pub model: Option<&'a str>,
    pub found: Discovered,
    pub version: Option<Version>,
    pub family: &'static Family,
    pub told: Told,
    /// By rank, as many as were tried.
    pub links: Vec<Link>,
    pub probe: Probe,
    pub open: Open,
    /// Engine's clock less ours; `None` without a date.
    pub skew: Option<Skew>,
    /// Open files that this process may have.
    pub files_max: Option<u64>,
}

/// Seconds that the engine's clock is ahead, at least and at most: its date has whole seconds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Skew(pub i64, pub i64);

/// Asks everything. `health` is the answer that showed that the engine is there.
pub async fn gather<'a>(
    ask: &Ask,
    config: &'a Config,
    model: Option<&'a str>,
    found: Discovered,
    skew: Option<Skew>,
    probing: bool,
) -> Evidence<'a> {
    let kind = found.facts.kind;
    let (version, family) = (Version::parse(&found.facts.version), family::family(kind));
    // Boxed: a socket's future is large.
    let opened = found.ranks.iter().take(RANKS_TRIED).map(|rank| Box::pin(listen::open(rank, ask)));
    let (links, mut listeners): (Vec<_>, Vec<_>) = join_all(opened).await.into_iter().unzip();
    let told = family::told(kind, ask, version).await;
    let first = found.ranks.first();
    let plan = Plan {
        kind,
        model: model.or(found.facts.served_names.first().map(String::as_str)).unwrap_or_default(),
        block_size: first.map_or(0, |rank| rank.block_size),
        max_model_len: found.facts.max_model_len,
        picture: told.takes_images != Some(false),
        sessions: told.sessions,
        rank: first.filter(|_| found.ranks.len() > 1).map(|rank| rank.rank),
    };
    let listener = if listeners.is_empty() { None } else { listeners.swap_remove(0) };
    let probe = match probing {
        true => Box::pin(probe::run(ask, &plan, listener)).await,
        false => Probe::Skipped("not probed: --no-probe"),
    };
    let (open, files_max) = (host::open(ask, family.dangers).await, host::files_max().await);
    Evidence { config, model, version, family, told, links, probe, open, skew, files_max, found }
}

/// From the `Date` of an answer that has just come.
pub fn skew(answer: &Answer) -> Option<Skew> {
    let date = http_date(answer.headers.get(header::DATE)?.to_str().ok()?)?;
    let now = SystemTime::now().duration_since(UNIX_EPOCH).ok()?;
    Some(between(date, now.saturating_sub(answer.took), now))
}

/// The answer was written between these two, in a second that had begun by then.
fn between(date: i64, asked: Duration, answered: Duration) -> Skew {
    let whole = |time: Duration| i64::try_from(time.as_secs()).unwrap_or(i64::MAX);
    Skew(date - whole(answered), date - whole(asked))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_slow_answer_widens_what_is_known_of_the_clock() {
        let at = Duration::from_millis;
        assert_eq!(between(100, at(100_200), at(100_300)), Skew(0, 0));
        assert_eq!(between(100, at(97_900), at(103_100)), Skew(-3, 3));
        assert_eq!(between(110, at(100_000), at(100_100)), Skew(10, 10));
    }
}
