//! From tokens and images to a routing view, cut where knowledge ends.

use fovea_gossip::preamble::{Identity, Preamble};
use fovea_kv::{BlockSize, RoutingView, SequenceHash, root};
use fovea_media::family::VisionModel;
use fovea_openai::MediaKind;

use super::{Prepared, ViewKind};

/// Token ids that stand for one media item each before expansion.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Placeholders {
    image: Option<u32>,
    video: Option<u32>,
    audio: Option<u32>,
}

impl Placeholders {
    pub fn new(config: &serde_json::Value, vision: Option<&VisionModel>) -> Self {
        let id = |keys: &[&str]| keys.iter().find_map(|key| u32::try_from(config.get(key)?.as_u64()?).ok());
        Self {
            image: vision.map(VisionModel::image_token).or_else(|| id(&["image_token_id", "image_token_index"])),
            video: id(&["video_token_id", "video_token_index"]),
            audio: id(&["audio_token_id", "audio_token_index"]),
        }
    }

    /// Position in `tokens` of the place of an unknown item that has `images_before` images before it. `None` when it cannot be told.
    pub fn place(&self, tokens: &[u32], kind: MediaKind, images_before: usize) -> Option<usize> {
        let nth = |token: Option<u32>, n: usize| {
            let token = token?;
            tokens.iter().enumerate().filter(|(_, t)| **t == token).nth(n).map(|(at, _)| at)
        };
        match kind {
            MediaKind::Image => nth(self.image, images_before),
            MediaKind::Video => nth(self.video, 0),
            MediaKind::Audio => nth(self.audio, 0),
            MediaKind::Embedding | MediaKind::PromptEmbedding => None,
        }
    }
}

/// A view of plain tokens.
pub(super) fn of_tokens(tokens: &[u32]) -> RoutingView {
    let mut view = RoutingView::with_capacity(tokens.len());
    tokens.iter().for_each(|token| view.push(*token, 1));
    view
}

/// Sequence hashes of one prompt, appended to `out`.
pub(super) fn hash(view: &RoutingView, block_size: BlockSize, lora: &str, salt: &str, out: &mut Vec<SequenceHash>) {
    view.sequence_hashes(block_size, root(lora, salt), out);
}

impl Prepared {
    /// A request of which only the model is known.
    pub(super) fn unknown(common: &fovea_openai::Common<'_>, reason: &'static str) -> Self {
        Self {
            view: ViewKind::None { reason },
            prompt_tokens: 0,
            prompts: Vec::new(),
            hashes: Vec::new(),
            media: Vec::new(),
            session: super::session(common),
            model: common.model.as_deref().unwrap_or_default().to_owned(),
            stream: common.stream.on,
            preamble: Preamble::default(),
        }
    }

    /// Fills in what follows from a prompt's view and hashes.
    pub(super) fn with_view(mut self, kind: ViewKind, view: &RoutingView, hashes: Vec<SequenceHash>) -> Self {
        self.preamble.exact = kind == ViewKind::Exact;
        self.preamble.prompt_tokens = view.len();
        self.preamble.runs = view.runs().iter().map(|run| (run.token, run.count)).collect();
        self.preamble.spans = view.spans().iter().map(|span| (span.start, span.len, span.id)).collect();
        self.preamble.blocks = u32::try_from(hashes.len()).unwrap_or(u32::MAX);
        self.preamble.last = hashes.last().map_or(0, |hash| hash.0);
        self.prompt_tokens = view.len();
        self.hashes = hashes;
        self.view = kind;
        self
    }

    /// The edits that the sidecar makes to the body.
    pub(super) fn with_edits(mut self, identities: Vec<Identity>, mut cuts: Vec<std::ops::Range<usize>>) -> Self {
        cuts.sort_by_key(|cut| cut.start);
        self.preamble.identities = identities;
        self.preamble.cuts = cuts.into_iter().map(|cut| (cut.start as u64, cut.len() as u64)).collect();
        self
    }
}
