//! What differs from engine to engine in how a request enters the cache: whose identity a media item gets, and what sets prompts apart.
//!
//! Mirrors vLLM 0.32–0.33, SGLang 0.5.16–0.5.23 (identity = pad tokens in place of the item; learnt) and TensorRT-LLM 1.3
//! (identity = digest of the pixels beside the placeholders; learnt).

use fovea_gossip::message::{EngineKind, HashScheme, LearntValue};
use fovea_gossip::preamble::Preamble;
use fovea_kv::{MediaId, MediaKey, RoutingView, SequenceHash, root};
use fovea_media::identity::encoded_id;
use fovea_openai::Common;

use super::Target;

/// How an engine keys one item.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Form {
    /// By a span over its positions, which carry placeholders.
    Span(MediaId),
    /// By the tokens that fill its positions, in turn.
    Pads(Vec<u32>),
}

/// [`Form`] with where it comes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Keyed {
    pub form: Form,
    /// Positions seen; 0 = not seen.
    pub tokens: u32,
    /// Believed because an engine was seen to use it.
    pub learnt: bool,
}

/// More positions than an item of any engine fills; bounds what a sidecar can make of a view.
const ITEM_TOKENS_MAX: u32 = 1 << 20;

/// First versions of SGLang whose events tell a request's salt, and its adapter.
const SGLANG_SALT: [u32; 3] = [0, 5, 18];
const SGLANG_LORA: [u32; 3] = [0, 5, 23];

impl Target<'_> {
    /// Identities are set on media parts of the body. SGLang and TensorRT-LLM take none in a chat.
    pub(super) fn sets_identities(&self) -> bool {
        self.engine.kind == EngineKind::Vllm
    }

    /// What we call a media item with this content: where we name it to the engine, a tenant's own name.
    pub(super) fn named(&self, content: MediaId) -> MediaId {
        match self.isolation {
            Some(isolation) if self.sets_identities() => isolation.media_id(content),
            _ => content,
        }
    }

    /// [`Self::named`] of an image: where an encoder makes its rows, under a name that changes with the encoder.
    pub(super) fn image_named(&self, content: MediaId) -> MediaId {
        let named = self.named(content);
        self.encoder.map_or(named, |fingerprint| encoded_id(&named, &fingerprint))
    }

    /// How the engine keys an item: `own` = the identity that follows from the request alone (vLLM).
    pub(super) fn keyed(
        &self,
        key: Option<&MediaKey>,
        own: Result<MediaId, &'static str>,
    ) -> Result<Keyed, &'static str> {
        if !self.media_trusted {
            return Err("media_not_trusted");
        }
        let learnt = key.and_then(|key| self.learnt.get(key)).filter(|learnt| learnt.tokens <= ITEM_TOKENS_MAX);
        let unknown = if key.is_some() { "media_not_learnt" } else { "media_without_name" };
        match (self.engine.kind, learnt, own) {
            (
                EngineKind::Vllm | EngineKind::TrtLlm,
                Some(super::LearntMedia { tokens, value: LearntValue::Id(id) }),
                _,
            ) => Ok(Keyed { form: Form::Span(id), tokens, learnt: own != Ok(id) }),
            (EngineKind::Sglang, Some(super::LearntMedia { tokens, value: LearntValue::Pads(pads) }), _)
                if !pads.is_empty() =>
            {
                Ok(Keyed { form: Form::Pads(pads), tokens, learnt: true })
            }
            (EngineKind::Vllm, _, Ok(id)) => Ok(Keyed { form: Form::Span(id), tokens: 0, learnt: false }),
            (EngineKind::Vllm, _, Err(reason)) => Err(reason),
            (EngineKind::Sglang | EngineKind::TrtLlm, ..) => Err(unknown),
        }
    }

    /// Why the blocks of this request cannot be told from others', if so.
    pub(super) fn blurred(&self, common: &Common<'_>) -> Option<&'static str> {
        let salted = self.isolation.is_some() || common.cache_salt.as_deref().is_some_and(|salt| !salt.is_empty());
        match self.engine.kind {
            EngineKind::Vllm => None,
            // No event of any version names them.
            EngineKind::Sglang if common.namespace.is_some() => common.namespace,
            EngineKind::Sglang if salted && self.older_than(SGLANG_SALT) => Some("cache_salt"),
            EngineKind::Sglang if !self.lora.is_empty() && self.older_than(SGLANG_LORA) => Some("lora"),
            EngineKind::TrtLlm if !self.lora.is_empty() => Some("lora"),
            EngineKind::Sglang | EngineKind::TrtLlm => None,
        }
    }

    /// The field of a chat that holds its token ids, where this engine reads it: its messages are not rendered.
    pub(super) fn ids_given(&self, common: &Common<'_>) -> Option<&'static str> {
        let read = match self.engine.kind {
            EngineKind::Vllm => "",
            EngineKind::Sglang => "input_ids",
            EngineKind::TrtLlm => "prompt_token_ids",
        };
        common.prompt_ids.filter(|field| *field == read)
    }

    /// Where the chains of this request start.
    pub(super) fn root(&self, common: &Common<'_>) -> SequenceHash {
        let client = common.cache_salt.as_deref().unwrap_or_default();
        match self.isolation {
            None => root(self.lora, client),
            Some(isolation) => root(self.lora, &isolation.salt(client)),
        }
    }

    /// Turns what is told of a prompt into what the engine hashes.
    pub(super) fn speak(&self, preamble: &mut Preamble, mut told: RoutingView) {
        if self.engine.hash_scheme != HashScheme::Fovea1Pairs {
            return;
        }
        // Of an item at the very end the last position has no pair, so nothing is said of it.
        while let Some(slot) = preamble.slots.pop_if(|slot| slot.start + slot.len >= told.len()) {
            told.truncate(slot.start);
        }
        preamble.runs = told.to_pairs().runs().iter().map(|run| (run.token, run.count)).collect();
    }

    /// Sequence hashes of one prompt, appended to `out`.
    pub(super) fn hash(&self, view: &RoutingView, root: SequenceHash, out: &mut Vec<SequenceHash>) {
        match self.engine.hash_scheme {
            HashScheme::Fovea1 => view.sequence_hashes(self.block_size, root, out),
            HashScheme::Fovea1Pairs => view.to_pairs().sequence_hashes(self.block_size, root, out),
        }
    }

    /// By its version as `major.minor.patch`; an engine of unknown version counts as new.
    fn older_than(&self, first: [u32; 3]) -> bool {
        let digits =
            |part: &str| part.split(|c: char| !c.is_ascii_digit()).next().and_then(|digits| digits.parse().ok());
        let parts: Vec<u32> = self.engine.version.trim_start_matches('v').split('.').map_while(digits).collect();
        parts.first_chunk::<3>().is_some_and(|version| *version < first)
    }
}
