//! Placeholder expansion in the routing view, as vLLM does it on token ids.
//!
//! vLLM replaces the first N placeholder ids of the prompt, in order, by the runs of its N images. A placeholder that the
//! client typed counts like any other, so an image may land on it and the template's own stay single.

use fovea_kv::{MediaId, RoutingView};

use crate::family::VisionModel;

/// One image of the request, in prompt order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Item {
    pub id: MediaId,
    /// Placeholder tokens it fills.
    pub tokens: u32,
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
}

/// Replaces the first placeholders of `tokens` by `images`.
///
/// # Errors
/// When there are fewer placeholders than images; vLLM refuses such a request.
pub fn expand(tokens: &[u32], images: &[Item], model: &VisionModel) -> Result<Expansion, ExpandError> {
    let placeholder = model.image_token();
    let mut view = RoutingView::with_capacity(tokens.len());
    let mut placed = Vec::with_capacity(images.len());
    let mut rest = tokens;
    for image in images {
        let Some(at) = rest.iter().position(|&token| token == placeholder) else {
            return Err(ExpandError::TooFewPlaceholders { images: images.len(), placeholders: placed.len() });
        };
        rest[..at].iter().for_each(|&token| view.push(token, 1));
        let start = view.len();
        view.push(placeholder, image.tokens);
        view.mark(start, view.len() - start, image.id);
        placed.push(start);
        rest = &rest[at + 1..];
    }
    rest.iter().for_each(|&token| view.push(token, 1));
    Ok(Expansion { view, placed })
}

#[cfg(test)]
mod tests {
    use fovea_kv::Run;

    use super::*;

    const PAD: u32 = 593;

    #[track_caller]
    fn check(tokens: &[u32], images: &[u32], runs: &[(u32, u32)], placed: &[u32]) {
        let config = serde_json::json!({ "model_type": "qwen3_vl", "image_token_id": PAD });
        let model = VisionModel::from_config(&config, None).unwrap();
        let items: Vec<_> = images.iter().map(|&tokens| Item { id: MediaId([7; 32]), tokens }).collect();
        let got = expand(tokens, &items, &model).unwrap();
        let runs: Vec<_> = runs.iter().map(|&(token, count)| Run { token, count }).collect();
        assert_eq!(got.view.runs(), runs);
        assert_eq!(got.placed, placed);
        let spans: Vec<_> = got.view.spans().iter().map(|span| (span.start, span.len)).collect();
        assert_eq!(spans, placed.iter().copied().zip(images.iter().copied()).collect::<Vec<_>>());
    }

    #[test]
    fn each_placeholder_becomes_a_run() {
        check(&[1, PAD, 2, PAD, 3], &[4, 6], &[(1, 1), (PAD, 4), (2, 1), (PAD, 6), (3, 1)], &[1, 6]);
    }

    #[test]
    fn a_typed_placeholder_before_the_template_s_takes_the_image() {
        check(&[PAD, 1, PAD], &[4], &[(PAD, 4), (1, 1), (PAD, 1)], &[0]);
    }

    #[test]
    fn text_alone_is_unchanged() {
        check(&[1, 1, PAD], &[], &[(1, 2), (PAD, 1)], &[]);
    }

    #[test]
    fn an_image_without_placeholder_is_an_error() {
        let config = serde_json::json!({ "model_type": "qwen3_vl", "image_token_id": PAD });
        let model = VisionModel::from_config(&config, None).unwrap();
        let items = [Item { id: MediaId([7; 32]), tokens: 4 }; 2];
        let error = expand(&[1, PAD], &items, &model).unwrap_err();
        assert_eq!(error, ExpandError::TooFewPlaceholders { images: 2, placeholders: 1 });
    }
}
