//! What an image becomes in the prompt, as an engine's own renderer showed it: stands in for a family's rule.

use fovea_kv::RoutingView;

/// Tokens of the prompt that stand for one image before expansion; families write one or a few.
const PLACEHOLDER_TOKENS_MAX: usize = 32;
/// Runs of one expansion; bounds what an engine can make us keep. A hundred tiles with marks and line breaks take fewer.
const RUNS_MAX: usize = 4096;
/// Positions of one image.
const EXPANSION_TOKENS_MAX: usize = 1 << 20;

/// The expansion of images of one size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rendering {
    placeholder: Box<[u32]>,
    expansion: RoutingView,
    /// Later images of a prompt become something else, such as one with another number in it.
    first_only: bool,
}

impl Rendering {
    /// `None` when a part is empty or too long.
    pub fn new(placeholder: &[u32], expansion: &[u32]) -> Option<Self> {
        let lengths = (1..=PLACEHOLDER_TOKENS_MAX).contains(&placeholder.len())
            && (1..=EXPANSION_TOKENS_MAX).contains(&expansion.len());
        if !lengths {
            return None;
        }
        let mut view = RoutingView::default();
        expansion.iter().for_each(|token| view.push(*token, 1));
        (view.runs().len() <= RUNS_MAX).then(|| Self {
            placeholder: placeholder.into(),
            expansion: view,
            first_only: false,
        })
    }

    /// The same, for the first image of a prompt alone.
    pub fn of_the_first(self) -> Self {
        Self { first_only: true, ..self }
    }

    pub fn is_first_only(&self) -> bool {
        self.first_only
    }

    /// What is replaced: the n-th image takes the n-th of these.
    pub fn placeholder(&self) -> &[u32] {
        &self.placeholder
    }

    /// What stands in its place, all of which the engine keys by the image.
    pub fn expansion(&self) -> &RoutingView {
        &self.expansion
    }
}
