//! What must be known of a body that reached an engine's front without a balancer; chat and completion bodies alike.

use std::ops::Range;

use crate::cut::CutPolicy;
use crate::error::ParseError;
use crate::guard::{self, Hazard};
use crate::json::Cursor;
use crate::top::Common;
use crate::{completion, message};

/// A body's edits and dangers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scan {
    /// Ranges that must not reach an engine, in order.
    pub cuts: Vec<Range<usize>>,
    /// Why the request must not reach an engine at all.
    pub hazard: Option<Hazard>,
}

/// Scans a body for what a client must not set or send.
///
/// # Errors
/// When it cannot be read: what we cannot read might carry anything.
pub fn scan(body: &str, policy: CutPolicy, embeddings_allowed: bool) -> Result<Scan, ParseError> {
    let mut cursor = Cursor::new(body);
    let (mut common, mut media, mut prompt_embeds) = (Common::default(), Vec::new(), false);
    let members = cursor.object(|cursor, key| {
        let read = match key {
            "messages" => message::parse_all(cursor, &mut media).map(drop),
            "prompt" => completion::prompt(cursor).map(drop),
            "prompt_embeds" => cursor.present().map(|present| prompt_embeds = present),
            _ => common.member(cursor, key, policy).and_then(|ours| if ours { Ok(()) } else { cursor.skip() }),
        };
        read.map_err(|error| error.within(key))
    })?;
    cursor.end()?;
    common.cut_top(&members, policy);
    let hazard = guard::of(&common, &media, prompt_embeds, embeddings_allowed);
    let mut cuts = common.cuts;
    if policy.uuids {
        cuts.extend(media.into_iter().filter_map(|part| part.uuid_cut));
        cuts.sort_by_key(|cut| cut.start);
    }
    Ok(Scan { cuts, hazard })
}
