//! Why the requests of a pool are not routed by what its engines hold, told from counts alone.
//!
//! Every mismatch between prediction and events (block size, template, topic, transport) looks the same from outside: routing goes on, by
//! load, and nobody notices. These counts tell the cases apart.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// Requests that make a judgement.
const ENOUGH: u64 = 20;
/// Of these, with blocks to be found.
const ENOUGH_PREDICTED: u64 = 10;
/// First blocks remembered.
const FIRST_BLOCKS_MAX: usize = 256;
/// By then an engine has told what it stored.
const TOLD_AFTER: Duration = Duration::from_secs(2);

/// Counts of one pool since its start; they only grow.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tally {
    /// Requests whose answer began.
    pub answered: u64,
    /// Of these, to a model whose tokenizer and template are not at hand.
    pub without_files: u64,
    /// Of these, with a full block that the engine may look up.
    pub predicted: u64,
    /// Of these, with a first block that was computed before.
    pub repeats: u64,
    /// Of these, with a block that a sidecar confirmed.
    pub hits: u64,
}

impl Tally {
    fn since(self, before: Self) -> Self {
        Self {
            answered: self.answered.saturating_sub(before.answered),
            without_files: self.without_files.saturating_sub(before.without_files),
            predicted: self.predicted.saturating_sub(before.predicted),
            repeats: self.repeats.saturating_sub(before.repeats),
            hits: self.hits.saturating_sub(before.hits),
        }
    }
}

/// A pool at a moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Sight {
    pub tally: Tally,
    /// (block, worker) pairs in its index.
    pub blocks_held: usize,
    /// Workers whose events are complete by their sidecars' word.
    pub with_events: usize,
    /// No sidecar has stopped to believe predictions of media.
    pub media_trusted: bool,
}

/// What is wrong with a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Finding {
    NoModelFiles,
    EventsIncomplete,
    NoEvents,
    NeverMatches,
    MediaDiverge,
}

impl Finding {
    pub const ALL: [Self; 5] =
        [Self::NoModelFiles, Self::EventsIncomplete, Self::NoEvents, Self::NeverMatches, Self::MediaDiverge];

    /// The likely cause, and what to look at.
    pub fn cause(self) -> &'static str {
        match self {
            Self::NoModelFiles => {
                "no tokenizer and template of this model: give it an entry in `models` (with `dir`, or pulled from its worker), by a name that the engine serves"
            }
            Self::EventsIncomplete => {
                "its sidecars cannot follow the engines' KV events: look at fovea-sidecar doctor and the sidecars' logs (publisher address, replay endpoint, engine kind)"
            }
            Self::NoEvents => {
                "requests are answered and no KV event ever came: is the engine started with KV events on, is its topic what the sidecar subscribes to, is prefix caching on, are prompts as long as a block?"
            }
            Self::NeverMatches => {
                "prompts come again and never match what the engines stored: compare block size, chat template, tokenizer and engine model string with `fovea-balancer explain`, and see /debug/divergences of its sidecars"
            }
            Self::MediaDiverge => {
                "what the engines cache of media is not what was predicted: see /debug/divergences of its sidecars, and compare preprocessor_config.json with the engines'"
            }
        }
    }
}

/// Judges a pool again and again.
#[derive(Clone, Copy, Debug, Default)]
pub struct Watch {
    judged: Tally,
    finding: Option<Finding>,
}

impl Watch {
    /// What is wrong, by the requests since the last judgement; as before while these are too few.
    pub fn look(&mut self, sight: &Sight) -> Option<Finding> {
        let since = sight.tally.since(self.judged);
        if since.answered >= ENOUGH {
            self.judged = sight.tally;
            self.finding = judge(since, sight);
        }
        self.finding
    }
}

fn judge(since: Tally, sight: &Sight) -> Option<Finding> {
    let predicted = since.predicted >= ENOUGH_PREDICTED;
    if since.without_files == since.answered {
        return Some(Finding::NoModelFiles);
    }
    if predicted && sight.with_events == 0 {
        return Some(Finding::EventsIncomplete);
    }
    if predicted && sight.blocks_held == 0 {
        return Some(Finding::NoEvents);
    }
    if since.repeats >= ENOUGH_PREDICTED && since.hits == 0 {
        return Some(Finding::NeverMatches);
    }
    (!sight.media_trusted).then_some(Finding::MediaDiverge)
}

/// First blocks of the last prompts.
#[derive(Clone, Debug, Default)]
pub struct FirstBlocks {
    seen: VecDeque<(u64, Instant)>,
}

impl FirstBlocks {
    /// Whether a prompt with this first block came before, long enough ago for its engine to have told. Remembers it.
    pub fn repeats(&mut self, first: u64, now: Instant) -> bool {
        if let Some((_, at)) = self.seen.iter().find(|(block, _)| *block == first) {
            return now.saturating_duration_since(*at) >= TOLD_AFTER;
        }
        if self.seen.len() >= FIRST_BLOCKS_MAX {
            self.seen.pop_front();
        }
        self.seen.push_back((first, now));
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: Tally = Tally { answered: 100, without_files: 0, predicted: 90, repeats: 50, hits: 40 };

    #[track_caller]
    fn check(tally: Tally, blocks_held: usize, with_events: usize, media_trusted: bool, expect: Option<Finding>) {
        assert_eq!(Watch::default().look(&Sight { tally, blocks_held, with_events, media_trusted }), expect);
    }

    #[test]
    fn each_mismatch_has_its_own_finding() {
        check(GOOD, 500, 2, true, None);
        check(Tally { without_files: 100, predicted: 0, ..GOOD }, 0, 2, true, Some(Finding::NoModelFiles));
        check(Tally { hits: 0, ..GOOD }, 0, 0, true, Some(Finding::EventsIncomplete));
        check(Tally { hits: 0, ..GOOD }, 0, 2, true, Some(Finding::NoEvents));
        check(Tally { hits: 0, ..GOOD }, 500, 2, true, Some(Finding::NeverMatches));
        check(GOOD, 500, 2, false, Some(Finding::MediaDiverge));
    }

    #[test]
    fn what_is_normal_is_no_finding() {
        // Short prompts have no block; prompts that never come again cannot hit.
        check(Tally { predicted: 0, repeats: 0, hits: 0, ..GOOD }, 0, 2, true, None);
        check(Tally { repeats: 0, hits: 0, ..GOOD }, 500, 2, true, None);
        check(Tally { answered: 19, hits: 0, ..GOOD }, 0, 2, true, None);
    }

    #[test]
    fn a_finding_stays_until_enough_requests_speak_against_it() {
        let mut watch = Watch::default();
        let sight = |tally| Sight { tally, blocks_held: 0, with_events: 1, media_trusted: true };
        let bad = Tally { answered: 20, predicted: 20, ..Tally::default() };
        assert_eq!(watch.look(&sight(bad)), Some(Finding::NoEvents));
        let good = |answered| Sight { blocks_held: 5, ..sight(Tally { answered, ..bad }) };
        assert_eq!(watch.look(&good(39)), Some(Finding::NoEvents));
        assert_eq!(watch.look(&good(40)), None);
    }

    #[test]
    fn a_first_block_repeats_once_its_engine_had_time_to_tell() {
        let (mut first, start) = (FirstBlocks::default(), Instant::now());
        assert!(!first.repeats(1, start));
        assert!(!first.repeats(1, start + TOLD_AFTER / 2));
        assert!(first.repeats(1, start + TOLD_AFTER));
        (2..=FIRST_BLOCKS_MAX as u64 + 1).for_each(|block| assert!(!first.repeats(block, start)));
        assert_eq!(first.seen.len(), FIRST_BLOCKS_MAX);
        assert!(!first.repeats(1, start + TOLD_AFTER), "it was forgotten");
    }
}
