//! Placeholder expansion in the routing view, as vLLM does it on token ids.
//!
//! vLLM replaces the first N placeholders of the prompt, in order, by the expansions of its N images. A placeholder that the
//! client typed counts like any other, so an image may land on it and the template's own stay as they are. What an image becomes,
//! separators and marks included, is keyed by it as a whole. Videos have a placeholder of their own and are handled alike.

use std::ops::Range;

use fovea_kv::{MediaId, RoutingView};

use crate::family::{Newlines, Shape, VideoModel, VideoShape, VisionModel};

/// One image of the request, in prompt order.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    pub id: MediaId,
    pub shape: Shape,
}

/// One video of the request, in prompt order.
#[derive(Clone, Debug, PartialEq)]
pub struct VideoItem {
    pub id: MediaId,
    pub shape: VideoShape,
}

/// The expanded prompt of a request with videos.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MixedExpansion {
    pub view: RoutingView,
    /// Positions of each item, in tokens from the start of the expanded prompt.
    pub images: Vec<Range<u32>>,
    pub videos: Vec<Range<u32>>,
}

/// The expanded prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Expansion {
    pub view: RoutingView,
    /// First position of each item, in tokens from the start of the expanded prompt.
    pub placed: Vec<u32>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ExpandError {
    #[error(
        "prompt has {placeholders} image placeholders for {images} images: the chat template must write one for each"
    )]
    TooFewPlaceholders { images: usize, placeholders: usize },
    #[error("image {index} of the request is beyond those that can be predicted: send fewer")]
    TooManyImages { index: usize },
    #[error(
        "prompt has {placeholders} video placeholders for {videos} videos: the chat template must write one for each"
    )]
    TooFewVideoPlaceholders { videos: usize, placeholders: usize },
    #[error(
        "a time of the video at {index} of the request cannot be encoded: take the tokenizer's file from the publisher"
    )]
    VideoTime { index: usize },
    #[error("a line break follows an image directly: the engine would not find the image again")]
    LineBreakAfterImage,
}

/// More images than any engine takes in one request (vLLM: 999 unless told otherwise); bounds the length of a view.
const IMAGES_MAX: usize = 4096;

/// Replaces the first placeholders of `tokens` by `images`.
///
/// # Errors
/// When there are fewer placeholders than images, or vLLM refuses such a prompt for another reason.
pub fn expand(tokens: &[u32], images: &[Item], model: &VisionModel) -> Result<Expansion, ExpandError> {
    expand_some(tokens, images, model, false)
}

/// As [`expand`], for tokens that end in front of something unknown: what it may change is left out.
///
/// # Errors
/// As [`expand`].
pub fn expand_prefix(tokens: &[u32], images: &[Item], model: &VisionModel) -> Result<Expansion, ExpandError> {
    expand_some(tokens, images, model, true)
}

/// Replaces the first placeholders of `tokens` by images and videos, each kind in its own order. Also right for tokens that end in
/// front of something unknown. `encode` gives the ids of a text: those of the times that a video's family writes.
///
/// No family with videos joins line breaks.
///
/// # Errors
/// As [`expand`], for either kind.
pub fn expand_mixed(
    tokens: &[u32],
    (images, vision): (&[Item], Option<&VisionModel>),
    (videos, model): (&[VideoItem], &VideoModel),
    mut encode: impl FnMut(&str) -> Option<Vec<u32>>,
) -> Result<MixedExpansion, ExpandError> {
    if images.len().max(videos.len()) > IMAGES_MAX {
        return Err(ExpandError::TooManyImages { index: IMAGES_MAX });
    }
    let mut out = MixedExpansion { view: RoutingView::with_capacity(tokens.len()), images: vec![], videos: vec![] };
    let (mut rest, view) = (tokens, &mut out.view);
    loop {
        // Of what is left of each kind, whichever stands first.
        let image = images.get(out.images.len()).and_then(|item| {
            let place = vision?.placeholder(rest, out.images.len())?;
            Some((item, place))
        });
        let video = videos.get(out.videos.len()).and_then(|item| Some((item, model.place(rest)?)));
        let (item, place) = match (image, video) {
            (Some((item, place)), None) => (Ok(item), place),
            (Some((item, place)), Some((_, at))) if place.start < at => (Ok(item), place),
            (_, Some((item, at))) => (Err(item), at..at + 1),
            (None, None) => break,
        };
        rest[..place.start].iter().for_each(|&token| view.push(token, 1));
        let start = view.len();
        let (id, placed) = match item {
            Ok(image) => {
                let index = out.images.len();
                let pushed = vision.is_some_and(|vision| vision.push(&image.shape, index, view));
                (pushed.then_some(image.id).ok_or(ExpandError::TooManyImages { index })?, &mut out.images)
            }
            Err(video) => {
                let pushed = model.push(&video.shape, &mut encode, view);
                let index = out.videos.len();
                (pushed.then_some(video.id).ok_or(ExpandError::VideoTime { index })?, &mut out.videos)
            }
        };
        view.mark(start, view.len() - start, id);
        placed.push(start..view.len());
        rest = &rest[place.end..];
    }
    if out.images.len() < images.len() {
        return Err(ExpandError::TooFewPlaceholders { images: images.len(), placeholders: out.images.len() });
    }
    if out.videos.len() < videos.len() {
        return Err(ExpandError::TooFewVideoPlaceholders { videos: videos.len(), placeholders: out.videos.len() });
    }
    rest.iter().for_each(|&token| view.push(token, 1));
    Ok(out)
}

/// `more` = something unknown follows `tokens`.
fn expand_some(tokens: &[u32], images: &[Item], model: &VisionModel, more: bool) -> Result<Expansion, ExpandError> {
    if images.len() > IMAGES_MAX {
        return Err(ExpandError::TooManyImages { index: IMAGES_MAX });
    }
    let mut view = RoutingView::with_capacity(tokens.len());
    let mut placed = Vec::with_capacity(images.len());
    let mut rest = tokens;
    for (index, image) in images.iter().enumerate() {
        let Some(place) = model.placeholder(rest, index) else {
            return Err(ExpandError::TooFewPlaceholders { images: images.len(), placeholders: placed.len() });
        };
        rest[..place.start].iter().for_each(|&token| view.push(token, 1));
        let start = view.len();
        if !model.push(&image.shape, index, &mut view) {
            return Err(ExpandError::TooManyImages { index });
        }
        view.mark(start, view.len() - start, image.id);
        placed.push(start);
        rest = &rest[place.end..];
    }
    rest.iter().for_each(|&token| view.push(token, 1));
    match model.newlines() {
        Some(newlines) => join_line_breaks(&view, placed, newlines, more),
        None => Ok(Expansion { view, placed }),
    }
}

/// Joins line breaks that the expansion brought together. A span keeps its length, and may share its last token with what follows.
fn join_line_breaks(
    view: &RoutingView,
    mut placed: Vec<u32>,
    newlines: Newlines,
    more: bool,
) -> Result<Expansion, ExpandError> {
    let mut tokens = Vec::with_capacity(view.len() as usize);
    view.runs().iter().for_each(|run| tokens.extend(std::iter::repeat_n(run.token, run.count as usize)));
    if more {
        tokens.truncate(newlines.settled(&tokens));
    }
    let settled = tokens.len() as u32;
    // Every expansion holds features between its line breaks, so a cut leaves part of it.
    let ends: Vec<_> = view.spans().iter().map(|span| (span.start + span.len).min(settled)).collect();
    if !newlines.merge(&mut tokens, &mut placed, &ends) {
        return Err(ExpandError::LineBreakAfterImage);
    }
    let mut joined = RoutingView::with_capacity(tokens.len());
    tokens.iter().for_each(|&token| joined.push(token, 1));
    for ((span, start), end) in view.spans().iter().zip(&placed).zip(&ends) {
        joined.mark(*start, end - span.start, span.id);
    }
    Ok(Expansion { view: joined, placed })
}

#[cfg(test)]
mod mixed_tests;
#[cfg(test)]
mod tests;
