//! What stands in the body in place of what the client wrote: fetched images for their URLs, so that what was identified here is what
//! the engine sees; and a tenant's own salt.

use std::collections::HashMap;
use std::ops::Range;

use bytes::Bytes;
use fovea_gossip::preamble::Preamble;
use fovea_media::data_url;
use fovea_openai::edit::Edits;
use fovea_openai::{Common, MediaPart};

/// A text in place of a range of the body; an empty range is an insertion.
pub(super) type Replacement = (Range<usize>, Vec<u8>);

/// Fetched images in place of their URLs.
pub(super) fn images(
    media: &[MediaPart<'_>],
    files: &HashMap<String, Result<Bytes, &'static str>>,
) -> Vec<Replacement> {
    let replaced = |part: &MediaPart<'_>| {
        let bytes = files.get(part.url.as_deref()?)?.as_ref().ok()?;
        Some((part.url_at.clone()?, format!("\"{}\"", data_url::encode(bytes)).into_bytes()))
    };
    media.iter().filter_map(replaced).collect()
}

/// `salt`, which needs no escapes, in place of the client's own or as a member in front of all others.
pub(super) fn salt(common: &Common<'_>, salt: &str) -> Replacement {
    match &common.cache_salt_at {
        Some(at) => (at.clone(), format!("\"{salt}\"").into_bytes()),
        None => (common.insert_at..common.insert_at, format!("\"cache_salt\":\"{salt}\",").into_bytes()),
    }
}

/// The body with its replacements, and the preamble's offsets moved along. `None` when there are none.
pub(super) fn replace(body: &[u8], mut replacements: Vec<Replacement>, preamble: &mut Preamble) -> Option<Vec<u8>> {
    if replacements.is_empty() {
        return None;
    }
    replacements.sort_by_key(|(at, _)| at.start);
    // Edits of the preamble lie between values, never inside one.
    let moved = |offset: u64| {
        let before = replacements.iter().take_while(|(at, _)| at.end as u64 <= offset);
        before.fold(offset, |offset, (at, text)| offset + text.len() as u64 - at.len() as u64)
    };
    preamble.identities.iter_mut().for_each(|identity| identity.insert_at = moved(identity.insert_at));
    preamble.body_at = match preamble.body_at {
        0 => 0,
        at => moved(at),
    };
    for (offset, length) in &mut preamble.cuts {
        let end = moved(*offset + *length);
        *offset = moved(*offset);
        *length = end - *offset;
    }
    let (cuts, inserts): (Vec<_>, Vec<_>) =
        replacements.into_iter().map(|(at, text)| (at.clone(), (at.start, text))).unzip();
    Edits::new(cuts, inserts).ok().map(|edits| edits.apply(body))
}
