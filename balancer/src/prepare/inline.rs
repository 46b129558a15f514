//! Fetched images in place of their URLs: what was identified here is what the engine sees.

use std::collections::HashMap;

use bytes::Bytes;
use fovea_gossip::preamble::Preamble;
use fovea_media::data_url;
use fovea_openai::MediaPart;
use fovea_openai::edit::Edits;

/// The body with the URLs of `files` replaced by their bytes, and the preamble's offsets moved along. `None` when nothing is replaced.
pub(super) fn inline(
    body: &[u8],
    media: &[MediaPart<'_>],
    files: &HashMap<String, Result<Bytes, &'static str>>,
    preamble: &mut Preamble,
) -> Option<Vec<u8>> {
    let replaced = |part: &MediaPart<'_>| {
        let bytes = files.get(part.url.as_deref()?)?.as_ref().ok()?;
        Some((part.url_at.clone()?, format!("\"{}\"", data_url::encode(bytes)).into_bytes()))
    };
    let mut replacements: Vec<_> = media.iter().filter_map(replaced).collect();
    replacements.sort_by_key(|(at, _)| at.start);
    if replacements.is_empty() {
        return None;
    }
    // Edits of the preamble lie between URLs, never inside one.
    let moved = |offset: u64| {
        let before = replacements.iter().take_while(|(at, _)| at.end as u64 <= offset);
        before.fold(offset, |offset, (at, text)| offset + text.len() as u64 - at.len() as u64)
    };
    preamble.identities.iter_mut().for_each(|identity| identity.insert_at = moved(identity.insert_at));
    for (offset, length) in &mut preamble.cuts {
        let end = moved(*offset + *length);
        *offset = moved(*offset);
        *length = end - *offset;
    }
    let (cuts, inserts): (Vec<_>, Vec<_>) =
        replacements.into_iter().map(|(at, text)| (at.clone(), (at.start, text))).unzip();
    Edits::new(cuts, inserts).ok().map(|edits| edits.apply(body))
}
