//! What the closed loop says of a request, and when it stops believing in predictions of media.

use fovea_kv::MediaId;
use serde::{Serialize, Serializer};

use super::FlightId;

/// Tokens and spans of one block that a [`Divergence`] keeps, per side.
const SHOWN_MAX: usize = 256;
/// Media verdicts looked back on.
const WINDOW: u32 = 20;
/// Media divergences among them that end the trust.
const DIVERGED_MAX: u32 = 5;
/// Exact media verdicts in a row that bring it back.
const EXACT_RUN: u32 = 20;

/// How one prediction turned out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    pub flight: FlightId,
    pub found: Found,
    /// Prompt tokens served from the cache: (predicted, as the engine says), where it says so.
    pub cached: Option<(u32, u32)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Found {
    /// All full blocks of the prompt were held or stored.
    Exact,
    /// `missing` of them were not, and nothing contradicts the prediction.
    Short {
        missing: u32,
        cause: ShortCause,
    },
    /// The engine did something else; `block` is the first that differs, where it is known.
    Diverged {
        block: Option<u32>,
        cause: Cause,
    },
    Unchecked(Reason),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShortCause {
    /// Nothing that was predicted was stored: the blocks were evicted unseen, or the engine did something that no event shows.
    NoEvents,
    /// The cache was cleared meanwhile.
    Evicted,
    /// The first of them came and the rest did not.
    Cut,
}

/// Where a prompt left its prediction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Cause {
    Text,
    /// A media item is keyed otherwise.
    MediaIdentity,
    /// A media item fills another number of positions.
    MediaCount,
    /// Blocks of the request stand elsewhere; where they left was not seen.
    Unknown,
}

impl Cause {
    pub(super) fn is_media(self) -> bool {
        matches!(self, Self::MediaIdentity | Self::MediaCount)
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Reason {
    /// The prediction does not reach to the end of the prompt.
    Inexact,
    /// The request failed or was given up.
    Failed,
    /// The prompt has no full block.
    NoBlocks,
    /// All blocks are held, but another chain was stored where they might have been.
    Ambiguous,
    /// The epoch ended.
    Reset,
}

impl Found {
    /// A closed set of names, for metrics.
    pub fn label(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Short { cause: ShortCause::NoEvents, .. } => "short_no_events",
            Self::Short { cause: ShortCause::Evicted, .. } => "short_evicted",
            Self::Short { cause: ShortCause::Cut, .. } => "short_cut",
            Self::Diverged { cause: Cause::Text, .. } => "diverged_text",
            Self::Diverged { cause: Cause::MediaIdentity, .. } => "diverged_media_identity",
            Self::Diverged { cause: Cause::MediaCount, .. } => "diverged_media_count",
            Self::Diverged { cause: Cause::Unknown, .. } => "diverged_unknown",
            Self::Unchecked(Reason::Inexact) => "unchecked_inexact",
            Self::Unchecked(Reason::Failed) => "unchecked_failed",
            Self::Unchecked(Reason::NoBlocks) => "unchecked_no_blocks",
            Self::Unchecked(Reason::Ambiguous) => "unchecked_ambiguous",
            Self::Unchecked(Reason::Reset) => "unchecked_reset",
        }
    }
}

/// Evidence of one divergence, for people.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Divergence {
    pub flight: FlightId,
    pub session: Option<String>,
    pub cause: Cause,
    pub block: Option<u32>,
    /// Position of the first token shown, in tokens from the start of the prompt.
    pub first: u32,
    /// Tokens of the block, at most 256; nothing when no event showed them.
    pub expected: Vec<u32>,
    pub actual: Vec<u32>,
    pub expected_media: Vec<Media>,
    pub actual_media: Vec<Media>,
    /// Whole prompt in tokens: predicted, and as the engine says.
    pub prompt_tokens: (u32, Option<u32>),
}

/// A media item over a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Media {
    /// Its start less the block's, in tokens.
    pub offset: i32,
    /// `None` = not predicted, or inside the tokens.
    #[serde(serialize_with = "hex")]
    pub id: Option<MediaId>,
}

fn hex<S: Serializer>(id: &Option<MediaId>, serializer: S) -> Result<S::Ok, S::Error> {
    match id {
        Some(id) => serializer.collect_str(id),
        None => serializer.serialize_none(),
    }
}

pub(super) fn bounded<T: Clone>(list: &[T]) -> Vec<T> {
    list[..list.len().min(SHOWN_MAX)].to_vec()
}

/// Whether predictions of media may be used: not after 5 media divergences among the last 20 media verdicts, and again after 20 exact
/// ones in a row.
#[derive(Debug, Default)]
pub(super) struct Trust {
    /// Last verdicts, the newest in bit 0; 1 = diverged.
    last: u32,
    exact_run: u32,
    lost: bool,
}

impl Trust {
    pub(super) fn add(&mut self, diverged: bool) {
        self.last = (self.last << 1 | u32::from(diverged)) & ((1 << WINDOW) - 1);
        self.exact_run = if diverged { 0 } else { self.exact_run.saturating_add(1) };
        if self.last.count_ones() >= DIVERGED_MAX {
            self.lost = true;
        } else if self.exact_run >= EXACT_RUN {
            self.lost = false;
        }
    }

    pub(super) fn is_kept(&self) -> bool {
        !self.lost
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `x` = diverged, `.` = exact; gives `t` or `f` after each.
    fn trust(verdicts: &str) -> String {
        let mut trust = Trust::default();
        let mut after = |verdict| {
            trust.add(verdict == 'x');
            if trust.is_kept() { 't' } else { 'f' }
        };
        verdicts.chars().map(&mut after).collect()
    }

    #[test]
    fn five_of_twenty_end_the_trust_and_twenty_exact_ones_bring_it_back() {
        assert_eq!(trust("xxxxx"), "ttttf");
        assert_eq!(trust(&format!("x{}xxxx", ".".repeat(15))), "t".repeat(19) + "f");
        assert_eq!(trust(&format!("x{}xxxx", ".".repeat(16))), "t".repeat(21));
        assert_eq!(trust(&format!("xxxxx{}", ".".repeat(20))), format!("tttt{}t", "f".repeat(20)));
        assert_eq!(trust(&format!("xxxxx{}x", ".".repeat(19))), format!("tttt{}", "f".repeat(21)));
    }
}
