//! Where the media items of a chat stand in the expanded prompt, and the views that follow.
//!
//! Two views come out: what is *told* to the sidecar, with placeholders where an identity is not known, and what is *hashed*, which ends
//! before the first item that is not known whole. The hashed view is a prefix of the told one.

use fovea_gossip::preamble::Slot;
use fovea_kv::{MediaId, RoutingView};
use fovea_media::expand::{self, VideoItem, expand, expand_mixed, expand_prefix};
use fovea_media::family::{VideoModel, VisionModel};
use fovea_openai::MediaKind;

use super::dialect::Form;
use super::item::{Item, Made};
use super::view::Placeholders;
use super::{Media, Rendering, ViewKind};

/// Sizes at which a family is asked whether its images are a run of one token: one tile, and several each way.
const SAMPLES: [(u32, u32); 4] = [(64, 64), (448, 448), (2000, 500), (500, 2000)];

/// Longest prompt with images that is laid out, in tokens; engines take less.
const PROMPT_TOKENS_MAX: u32 = 1 << 22;

/// How images of one model are put into a prompt.
pub(super) struct Placer<'a> {
    pub vision: Option<&'a VisionModel>,
    /// Without one, no video has a place.
    pub video: Option<&'a VideoModel>,
    /// Ids of a text, special tokens in it parsed as such and none added.
    pub encode: &'a dyn Fn(&str) -> Option<Vec<u32>>,
    pub placeholders: &'a Placeholders,
    /// The token of which an image is a run and nothing else. Without a rule: as far as anyone knows.
    pub pad: Option<u32>,
    /// The engine keys the whole replacement of a placeholder (vLLM); else the run of feature tokens in it.
    pub whole: bool,
}

/// A prompt with its items in place.
pub(super) struct Placed {
    pub hashed: RoutingView,
    pub told: RoutingView,
    pub slots: Vec<Slot>,
    /// Items within the hashed view.
    pub media: Vec<Media>,
    pub kind: ViewKind,
    /// `told` reaches to the end of the prompt.
    pub whole: bool,
}

/// Positions of one item, in tokens from the start of the expanded prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    start: u32,
    len: u32,
}

/// The single token of which images of this family are runs, if they are.
pub(super) fn pad_of(vision: &VisionModel, token: Option<u32>) -> Option<u32> {
    let token = token?;
    for (width, height) in SAMPLES {
        let shape = vision.measure(width, height).ok()?;
        let count = shape.tokens();
        let image = expand::Item { id: MediaId([0; 32]), shape };
        let expanded = expand(&[token], &[image], vision).ok()?;
        match expanded.view.runs() {
            [run] if (run.token, run.count) == (token, count) => {}
            _ => return None,
        }
    }
    Some(token)
}

impl Placer<'_> {
    /// Puts `items` into `tokens`, the prompt before expansion.
    ///
    /// # Errors
    /// When not even the front of the prompt can be told.
    pub fn place(&self, tokens: &[u32], items: &[Item]) -> Result<Placed, &'static str> {
        let known = items.iter().take_while(|item| item.reason().is_none() && self.count(item).is_some()).count();
        let counted = items.iter().take_while(|item| item.fault.is_none() && self.count(item).is_some()).count();
        if counted > known
            && let Ok(placed) = self.place_some(tokens, items, counted)
        {
            return Ok(placed);
        }
        self.place_some(tokens, items, known)
    }

    /// As [`Self::place`], with the first `counted` items in their places.
    fn place_some(&self, tokens: &[u32], items: &[Item], counted: usize) -> Result<Placed, &'static str> {
        let (front, rest) = items.split_at(counted);
        let reason = |item: &Item| item.reason().unwrap_or("media_layout");
        let end = match rest.first() {
            None => tokens.len(),
            Some(next) => self.end(tokens, front, rest).ok_or(reason(next))?,
        };
        let (base, ranges) = self.expanded(&tokens[..end], front, !rest.is_empty()).ok_or("placeholders")?;
        let known = front.iter().zip(&ranges).take_while(|(item, range)| believed(item, range).is_ok()).count();
        let (mut told, mut slots, starts) = dress(&base, front, &ranges);
        let mut hashed = told.clone();
        let unknown = match front.get(known) {
            Some(item) => {
                hashed.truncate(starts[known]);
                believed(item, &ranges[known]).err()
            }
            None => rest.first().map(reason),
        };
        if let (Some(next), Some(pad)) = (rest.first(), self.pad)
            && tokens.get(end) == Some(&pad)
        {
            tell_uncounted(next, pad, &mut told, &mut slots);
        }
        let learnt = front
            .iter()
            .any(|item| item.keyed.as_ref().is_ok_and(|keyed| keyed.learnt || keyed.tokens > 0 && item.shape.is_err()));
        let kind = match unknown {
            Some(reason) => ViewKind::Prefix { reason },
            None if front.iter().any(|item| rendering(item).is_some()) => ViewKind::Rendered,
            None if learnt => ViewKind::Learnt,
            None => ViewKind::Exact,
        };
        let media = front[..known].iter().zip(&starts).zip(&ranges);
        let media = media.map(|((item, start), range)| Media {
            kind: item.kind,
            id: item.id(),
            width: item.size.0,
            height: item.size.1,
            tokens: item.shape.as_ref().map_or(range.len, Made::tokens),
            start: *start,
        });
        Ok(Placed { media: media.collect(), hashed, told, slots, kind, whole: rest.is_empty() })
    }

    /// Where the prompt ends that holds the items of `front` and none of `rest`, which come after them.
    fn end(&self, tokens: &[u32], front: &[Item], rest: &[Item]) -> Option<usize> {
        let kinds: Vec<MediaKind> = rest.iter().map(|item| item.kind).collect();
        let videos = front.iter().filter(|item| item.kind == MediaKind::Video).count();
        let mut placeholders = *self.placeholders;
        if let Some([shown]) = front.iter().find_map(rendering).map(Rendering::placeholder) {
            placeholders.image = Some(*shown);
        }
        placeholders.end(tokens, (front.len() - videos, videos), &kinds, self.vision)
    }

    /// Positions that an item fills; `None` = not known, or not known how they are laid out.
    fn count(&self, item: &Item) -> Option<u32> {
        let seen = item.keyed.as_ref().map_or(0, |keyed| keyed.tokens);
        match (&item.shape, self.pad) {
            // A URL may stand for another file by now, of which the header tells.
            (Ok(shape), _) if item.by_name => Some(shape.tokens()),
            (Ok(shape @ Made::Video(_)), _) => Some(shape.tokens()),
            (_, Some(_)) if seen > 0 => Some(seen),
            (Ok(shape), _) => Some(shape.tokens()),
            (Err(_), _) => None,
        }
    }

    /// Placeholders only, and what the engine keys of each item. `more` = something unknown follows.
    fn expanded(&self, tokens: &[u32], items: &[Item], more: bool) -> Option<(RoutingView, Vec<Range>)> {
        match (self.pad, self.vision) {
            _ if items.iter().any(|item| item.kind == MediaKind::Video) => self.mixed(tokens, items),
            (None, Some(vision)) => self.by_rule(vision, tokens, items, more),
            (Some(_), _) | (None, None) => self.in_turn(tokens, items),
        }
    }

    /// Images that are runs of the pad, or as a renderer showed them. Engines give the n-th image the n-th placeholder, whoever wrote it.
    fn in_turn(&self, tokens: &[u32], items: &[Item]) -> Option<(RoutingView, Vec<Range>)> {
        let (mut view, mut ranges) = (RoutingView::with_capacity(tokens.len()), Vec::with_capacity(items.len()));
        let mut rest = tokens;
        while let Some((&token, after)) = rest.split_first() {
            let start = view.len();
            match items.get(ranges.len()).and_then(|item| self.put(item, rest, &mut view)) {
                Some(left) => {
                    ranges.push(Range { start, len: view.len() - start });
                    rest = left;
                }
                None => {
                    view.push(token, 1);
                    rest = after;
                }
            }
        }
        (ranges.len() == items.len()).then_some((view, ranges))
    }

    /// Appends an item where `tokens` begin with its placeholder, and gives what follows that.
    fn put<'t>(&self, item: &Item, tokens: &'t [u32], view: &mut RoutingView) -> Option<&'t [u32]> {
        let fits = |count: u32| count <= PROMPT_TOKENS_MAX - view.len().min(PROMPT_TOKENS_MAX);
        if let Some(rendering) = rendering(item) {
            let left = tokens.strip_prefix(rendering.placeholder()).filter(|_| fits(rendering.expansion().len()))?;
            rendering.expansion().runs().iter().for_each(|run| view.push(run.token, run.count));
            return Some(left);
        }
        let pad = self.pad?;
        let left = tokens.strip_prefix(&[pad])?;
        let count = self.count(item).filter(|count| fits(*count))?;
        view.push(pad, count);
        Some(left)
    }

    fn by_rule(
        &self,
        vision: &VisionModel,
        tokens: &[u32],
        items: &[Item],
        more: bool,
    ) -> Option<(RoutingView, Vec<Range>)> {
        let images = items.iter().map(image).collect::<Option<Vec<_>>>()?;
        let expanded = if more { expand_prefix } else { expand }(tokens, &images, vision).ok()?;
        let spans = expanded.view.spans();
        let ranges = spans.iter().zip(&images).map(|(span, image)| {
            let whole = Range { start: span.start, len: span.len };
            if self.whole { Some(whole) } else { self.run_in(&expanded.view, whole, image.shape.tokens()) }
        });
        let ranges = ranges.collect::<Option<Vec<_>>>()?;
        (ranges.len() == items.len()).then_some((expanded.view, ranges))
    }

    /// Images and videos, each kind in its own order.
    fn mixed(&self, tokens: &[u32], items: &[Item]) -> Option<(RoutingView, Vec<Range>)> {
        let (video, true) = (self.video?, self.whole) else { return None };
        let is_video = |item: &&Item| item.kind == MediaKind::Video;
        let images = items.iter().filter(|item| !is_video(item)).map(image).collect::<Option<Vec<_>>>()?;
        let shape = |item: &Item| match &item.shape {
            Ok(Made::Video(shape)) => Some(VideoItem { id: MediaId([0; 32]), shape: shape.clone() }),
            _ => None,
        };
        let videos = items.iter().filter(is_video).map(shape).collect::<Option<Vec<_>>>()?;
        let expanded = expand_mixed(tokens, (&images, self.vision), (&videos, video), self.encode).ok()?;
        let (mut images, mut videos) = (expanded.images.into_iter(), expanded.videos.into_iter());
        let range = |item| if is_video(&item) { videos.next() } else { images.next() };
        let ranges: Option<Vec<_>> = items.iter().map(range).collect();
        let ranges: Vec<_> = ranges?.into_iter().map(|at| Range { start: at.start, len: at.end - at.start }).collect();
        // A slot is told by its place: items that stand in another order than they were sent in have none.
        ranges.is_sorted_by_key(|range| range.start).then_some((expanded.view, ranges))
    }

    /// The one run of feature tokens inside an image's expansion. `None` when there are several: no slot can stand for it.
    fn run_in(&self, view: &RoutingView, whole: Range, features: u32) -> Option<Range> {
        let token = self.placeholders.image?;
        let mut start = 0;
        let mut found = None;
        for run in view.runs() {
            let (from, to) = (start.max(whole.start), (start + run.count).min(whole.start + whole.len));
            if run.token == token && from < to && found.replace(Range { start: from, len: to - from }).is_some() {
                return None;
            }
            start += run.count;
        }
        found.filter(|range| range.len == features)
    }
}

/// What a renderer showed of an item's like.
fn rendering(item: &Item) -> Option<&Rendering> {
    match &item.shape {
        Ok(Made::Rendered(rendering)) => Some(rendering),
        _ => None,
    }
}

fn image(item: &Item) -> Option<expand::Item> {
    match &item.shape {
        Ok(Made::Image(shape)) => Some(expand::Item { id: MediaId([0; 32]), shape: shape.clone() }),
        _ => None,
    }
}

/// How the engine keys an item in this place, or why that is not known.
fn believed<'i>(item: &'i Item, range: &Range) -> Result<&'i Form, &'static str> {
    let keyed = item.keyed.as_ref().map_err(|reason| *reason)?;
    // What was seen does not fit the place: another file under the same name, or a rule that is not the engine's.
    if keyed.tokens != 0 && keyed.tokens != range.len { Err("media_count") } else { Ok(&keyed.form) }
}

/// The view as the engine caches it, as far as items are known; the rest keep their placeholders. Also slots, and where each item starts.
fn dress(base: &RoutingView, items: &[Item], ranges: &[Range]) -> (RoutingView, Vec<Slot>, Vec<u32>) {
    let mut view = RoutingView::with_capacity(base.runs().len());
    let mut slots = Vec::with_capacity(items.len());
    let mut base_runs = Runs { view: base, run: 0, used: 0 };
    let mut position = 0;
    for (item, range) in items.iter().zip(ranges) {
        // Neighbours may share a token where line breaks were joined: it is the first one's.
        let end = range.start + range.len;
        let start = range.start.max(position);
        let len = end.saturating_sub(start);
        base_runs.copy(start - position, &mut view);
        let form = believed(item, range);
        match &form {
            Ok(Form::Pads(pads)) => {
                base_runs.copy(len, &mut RoutingView::default());
                view.push_cycle(pads, len);
            }
            _ => base_runs.copy(len, &mut view),
        }
        if let Ok(Form::Span(id)) = form {
            view.mark(range.start, range.len, *id);
        }
        if let (Some(key), true) = (item.key, len > 0 && start == range.start) {
            slots.push(Slot { start, len, key, known: form.is_ok() });
        }
        position = start + len;
    }
    base_runs.copy(base.len() - position, &mut view);
    (view, slots, ranges.iter().map(|range| range.start).collect())
}

/// Tells of an item whose length is not known: one placeholder stands for it, and the view ends there.
fn tell_uncounted(item: &Item, pad: u32, told: &mut RoutingView, slots: &mut Vec<Slot>) {
    if let (Some(key), None) = (item.key, item.fault) {
        slots.push(Slot { start: told.len(), len: 1, key, known: false });
        told.push(pad, 1);
    }
}

/// Runs of a view, taken piece by piece.
struct Runs<'a> {
    view: &'a RoutingView,
    run: usize,
    used: u32,
}

impl Runs<'_> {
    fn copy(&mut self, mut count: u32, out: &mut RoutingView) {
        while let Some(run) = self.view.runs().get(self.run).filter(|_| count > 0) {
            let take = count.min(run.count - self.used);
            out.push(run.token, take);
            (self.used, count) = (self.used + take, count - take);
            if self.used == run.count {
                (self.run, self.used) = (self.run + 1, 0);
            }
        }
    }
}

#[cfg(test)]
mod tests;
