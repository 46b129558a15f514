//! One block: canonical tokens, and the media over it.

use super::Media;
use crate::MediaId;
use crate::event::BlockExtra;

/// A token as it was sent.
#[derive(Clone, Copy, Debug)]
pub(super) enum Token<'a> {
    Id(u32),
    /// V2: the first position of an item is its digest.
    Digest(&'a str),
}

/// One entry of `mm_keys`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Key<'a> {
    pub(super) hash: &'a str,
    /// Number, within the item, of its first position in this block: 0 = the item starts here.
    pub(super) start: u32,
}

/// Reads the blocks of one chain in order.
pub(super) struct Reader {
    media: Media,
    /// The item seen last: V2 blocks without keys may continue it.
    last: Option<MediaId>,
}

/// Media positions of one block.
#[derive(Default)]
struct Seen {
    /// Where runs of media positions begin.
    runs: Vec<i32>,
    /// V2: where items begin.
    digests: Vec<(MediaId, i32)>,
    /// V2: start of an item that began before the block, counted from the block's start.
    continued: Option<i32>,
    is_v2: bool,
}

impl Reader {
    pub(super) fn new(media: Media) -> Self {
        Self { media, last: None }
    }

    /// Appends the canonical tokens to `out` and tells what the block is keyed by.
    pub(super) fn read(&mut self, tokens: &[Token<'_>], keys: &[Key<'_>], out: &mut Vec<u32>) -> BlockExtra {
        let seen = self.positions(tokens, out);
        let media = if keys.is_empty() { self.without_keys(&seen) } else { with_keys(&seen, keys) };
        self.last = match (keys.last(), seen.digests.last()) {
            (Some(key), _) => Some(MediaId::from_engine_id(key.hash)),
            (None, Some(&(id, _))) => Some(id),
            (None, None) => self.last,
        };
        // Without the placeholder V2 positions have no canonical form.
        let known = !seen.is_v2 || self.media.placeholder.is_some();
        match media.filter(|_| known) {
            Some(mut media) => {
                media.sort_by_key(|&(_, offset)| offset);
                BlockExtra { media, ..BlockExtra::default() }
            }
            None => BlockExtra { opaque: true, ..BlockExtra::default() },
        }
    }

    fn positions(&self, tokens: &[Token<'_>], out: &mut Vec<u32>) -> Seen {
        let Media { placeholder, vocab_size } = self.media;
        let mut seen = Seen::default();
        let mut in_run = false;
        for (position, &token) in (0..).zip(tokens) {
            let is_media = match token {
                Token::Digest(digest) => {
                    seen.digests.push((MediaId::from_engine_id(digest), position));
                    seen.is_v2 = true;
                    true
                }
                Token::Id(id) => match vocab_size.and_then(|first| id.checked_sub(first)) {
                    Some(number) => {
                        if seen.digests.is_empty() && seen.continued.is_none() {
                            seen.continued = Some(position.saturating_sub_unsigned(number));
                        }
                        seen.is_v2 = true;
                        true
                    }
                    None => Some(id) == placeholder,
                },
            };
            out.push(match token {
                Token::Id(id) if !is_media => id,
                _ => placeholder.unwrap_or(0),
            });
            if is_media && !in_run {
                seen.runs.push(position);
            }
            in_run = is_media;
        }
        seen
    }

    /// Builds that send no keys (NVIDIA/TensorRT-LLM#13589, #18810): V2 tokens tell, V1 tokens do not.
    fn without_keys(&self, seen: &Seen) -> Option<Vec<(MediaId, i32)>> {
        if !seen.is_v2 {
            return seen.runs.is_empty().then(Vec::new);
        }
        let mut media = seen.digests.clone();
        if let Some(start) = seen.continued {
            media.push((self.last?, start));
        }
        Some(media)
    }
}

/// Where each item starts, counted from the block's start; `None` when that cannot be told.
fn with_keys(seen: &Seen, keys: &[Key<'_>]) -> Option<Vec<(MediaId, i32)>> {
    let mut digests = seen.digests.iter();
    let mut media = Vec::with_capacity(keys.len());
    for (index, key) in keys.iter().enumerate() {
        let id = MediaId::from_engine_id(key.hash);
        let offset = match key.start {
            // Only the first item can have begun before the block.
            1.. if index > 0 => return None,
            1.. => 0_i32.checked_sub_unsigned(key.start)?,
            0 if seen.is_v2 => {
                let &(digest, position) = digests.next()?;
                // A key of another form is the uuid of the request.
                let same = digest == id || MediaId::from_hex(key.hash).is_none();
                same.then_some(position)?
            }
            // Text between the positions of one item makes more runs than items: then only the first is sure.
            0 if keys.len() == 1 || keys.len() == seen.runs.len() => *seen.runs.get(index)?,
            0 => return None,
        };
        media.push((id, offset));
    }
    (digests.next().is_none() && !seen.runs.is_empty()).then_some(media)
}
