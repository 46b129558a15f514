//! Cuts alone, for whoever need not know what a body means.

use std::ops::Range;

use crate::cut::CutPolicy;
use crate::error::ParseError;
use crate::json::Cursor;
use crate::top::Common;
use crate::{completion, message};

/// Cuts for a body that reached an engine's front without a balancer; chat and completion bodies alike.
pub fn scan_cuts(body: &str, policy: CutPolicy) -> Result<Vec<Range<usize>>, ParseError> {
    let mut cursor = Cursor::new(body);
    let (mut common, mut media) = (Common::default(), Vec::new());
    let members = cursor.object(|cursor, key| {
        let read = match key {
            "messages" => message::parse_all(cursor, &mut media).map(drop),
            "prompt" => completion::prompt(cursor).map(drop),
            _ => common.member(cursor, key, policy).and_then(|ours| if ours { Ok(()) } else { cursor.skip() }),
        };
        read.map_err(|error| error.within(key))
    })?;
    cursor.end()?;
    common.cut_top(&members, policy);
    let mut cuts = common.cuts;
    if policy.uuids {
        cuts.extend(media.into_iter().filter_map(|part| part.uuid_cut));
        cuts.sort_by_key(|cut| cut.start);
    }
    Ok(cuts)
}
