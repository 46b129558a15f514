//! From tokens and images to a routing view, cut where knowledge ends.

use fovea_gossip::preamble::{Identity, Preamble};
use fovea_kv::{RoutingView, SequenceHash};
use fovea_media::family::VisionModel;
use fovea_openai::MediaKind;

use super::{Prepared, ViewKind};

/// Token ids that stand for one media item each before expansion.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Placeholders {
    /// A family with a rule knows its own places.
    pub image: Option<u32>,
    video: Option<u32>,
    audio: Option<u32>,
}

impl Placeholders {
    pub fn new(config: &serde_json::Value) -> Self {
        let id = |keys: &[&str]| keys.iter().find_map(|key| u32::try_from(config.get(key)?.as_u64()?).ok());
        Self {
            image: id(&["image_token_id", "image_token_index"]),
            video: id(&["video_token_id", "video_token_index"]),
            audio: id(&["audio_token_id", "audio_token_index"]),
        }
    }

    /// Where a view ends that knows the first `images` images and `videos` videos, and of all later items only their kinds, `left`.
    /// `None` when it cannot be told.
    ///
    /// Engines give the n-th item of a kind the n-th placeholder of that kind, wherever it stands and whoever wrote it; so the view
    /// ends at the first placeholder that any of the later items may take.
    pub fn end(
        &self,
        tokens: &[u32],
        (images, videos): (usize, usize),
        left: &[MediaKind],
        vision: Option<&VisionModel>,
    ) -> Option<usize> {
        let nth = |token: Option<u32>, n: usize| {
            let token = token?;
            tokens.iter().enumerate().filter(|(_, t)| **t == token).nth(n).map(|(at, _)| at)
        };
        if left.iter().any(|kind| matches!(kind, MediaKind::Embedding | MediaKind::PromptEmbedding)) {
            return None;
        }
        let has = |kind| left.contains(&kind);
        let image = has(MediaKind::Image).then(|| match vision {
            Some(vision) => {
                let later = left.iter().filter(|kind| **kind == MediaKind::Image).count();
                vision.place(tokens, images, images + later)
            }
            None => nth(self.image, images),
        });
        // Qwen3-VL replaces the start mark before a video, too.
        let video = has(MediaKind::Video).then(|| nth(self.video, videos)?.checked_sub(1));
        let audio = has(MediaKind::Audio).then(|| nth(self.audio, 0));
        [image, video, audio].into_iter().flatten().try_fold(tokens.len(), |end, at| Some(end.min(at?)))
    }
}

/// A view of plain tokens.
pub(super) fn of_tokens(tokens: &[u32]) -> RoutingView {
    let mut view = RoutingView::with_capacity(tokens.len());
    tokens.iter().for_each(|token| view.push(*token, 1));
    view
}

/// Longest `session_id` that is passed on, in bytes; of a longer one only that it is there.
const SESSION_BYTES_MAX: usize = 1024;

impl Prepared {
    /// A request of which only the model is known.
    pub(super) fn unknown(common: &fovea_openai::Common<'_>, reason: &'static str) -> Self {
        Self {
            view: ViewKind::None { reason },
            prompt_tokens: 0,
            prompts: Vec::new(),
            hashes: Vec::new(),
            media: Vec::new(),
            oversized: None,
            unreadable: None,
            affinity: None,
            counted: false,
            reads_cache: true,
            session: super::session(common),
            model: common.model.as_deref().unwrap_or_default().to_owned(),
            stream: common.stream.on,
            preamble: Preamble {
                session: common.session_id.as_deref().map(|id| match id.len() {
                    0..=SESSION_BYTES_MAX => id.to_owned(),
                    _ => String::new(),
                }),
                body_at: common.insert_at as u64,
                ..Preamble::default()
            },
        }
    }

    /// Fills in what follows from a prompt's view and hashes; `told` = the view as far as its tokens are known.
    pub(super) fn with_view(
        mut self,
        kind: ViewKind,
        told: &RoutingView,
        hashes: Vec<SequenceHash>,
        root: SequenceHash,
    ) -> Self {
        self.preamble.exact = kind.is_whole();
        self.preamble.prompt_tokens = told.len();
        self.preamble.runs = told.runs().iter().map(|run| (run.token, run.count)).collect();
        self.preamble.spans = told.spans().iter().map(|span| (span.start, span.len, span.id)).collect();
        self.preamble.blocks = u32::try_from(hashes.len()).unwrap_or(u32::MAX);
        self.preamble.last = hashes.last().map_or(0, |hash| hash.0);
        self.preamble.root = root.0;
        self.prompt_tokens = told.len();
        self.counted = kind.is_whole();
        self.hashes = hashes;
        self.view = kind;
        self
    }

    /// The same request, but nothing of it will be found in a cache.
    pub fn without_hashes(self, reason: &'static str) -> Self {
        let preamble = Preamble { exact: false, blocks: 0, last: 0, ..self.preamble };
        Self { view: ViewKind::None { reason }, hashes: Vec::new(), preamble, ..self }
    }

    /// The edits that the sidecar makes to the body.
    pub(super) fn with_edits(mut self, identities: Vec<Identity>, mut cuts: Vec<std::ops::Range<usize>>) -> Self {
        cuts.sort_by_key(|cut| cut.start);
        self.preamble.identities = identities;
        self.preamble.cuts = cuts.into_iter().map(|cut| (cut.start as u64, cut.len() as u64)).collect();
        self
    }
}
