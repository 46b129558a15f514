//! `/v1/chat/completions`: template, tokens, images into their placeholders.

use std::borrow::Cow;
use std::ops::Range;

use fovea_gossip::preamble::Identity;
use fovea_media::family::VisionModel;
use fovea_openai::{ChatRequest, MediaKind};
use fovea_prompt::{ChatInput, Placeholders, clock};
use serde_json::{Map, Value};

use super::files::encode;
use super::image::TOO_MANY_PIXELS;
use super::item::{Item, Made};
use super::place::Placer;
use super::{ClientUuid, Prepared, Preparer, Target};

/// One request on its way.
pub(super) struct Chat<'a> {
    pub model: &'a Preparer,
    pub request: &'a ChatRequest<'a>,
    pub target: Target<'a>,
    /// The image rule under the request's own options; the reason why there is none.
    pub vision: Result<Cow<'a, VisionModel>, &'static str>,
}

impl Preparer {
    pub(super) fn chat<'a>(&'a self, request: &'a ChatRequest<'a>, target: Target<'a>) -> Prepared {
        static NONE: std::sync::LazyLock<Map<String, Value>> = std::sync::LazyLock::new(Map::new);
        // Other engines do not read these options as vLLM does.
        let kwargs = if target.sets_identities() { &request.common.mm_processor_kwargs } else { &NONE };
        let vision = self.vision_under(kwargs);
        Chat { model: self, request, target, vision }.prepare()
    }

    /// The image rule under a request's `mm_processor_kwargs`.
    fn vision_under(&self, kwargs: &Map<String, Value>) -> Result<Cow<'_, VisionModel>, &'static str> {
        if kwargs.is_empty() {
            return self.vision.as_ref().map(Cow::Borrowed).ok_or("images of an unknown model family");
        }
        self.files.vision(&self.prompt, Some(&Value::Object(kwargs.clone()))).map(Cow::Owned).map_err(|error| {
            tracing::debug!(%error, "request options are not predicted");
            "request processor kwargs"
        })
    }

    /// Token ids of a chat before expansion.
    pub(super) fn chat_tokens(
        &self,
        request: &ChatRequest<'_>,
        vision: Option<&VisionModel>,
    ) -> Result<Vec<u32>, &'static str> {
        let images = request.media.iter().filter(|part| part.kind == MediaKind::Image).count();
        let image_text = vision.map_or(Some(""), |vision| vision.image_text(images));
        let input = ChatInput {
            messages: &request.messages,
            tools: request.tools.as_deref(),
            documents: request.documents.as_deref(),
            chat_template: request.chat_template.as_deref(),
            chat_template_kwargs: &request.chat_template_kwargs,
            reasoning_effort: request.reasoning_effort.as_ref(),
            add_generation_prompt: request.add_generation_prompt,
            continue_final_message: request.continue_final_message,
            placeholders: Placeholders {
                image: image_text.ok_or("numbered placeholders")?,
                // Every family with a video rule writes this.
                video: if self.video.is_some() { "<|vision_start|><|video_pad|><|vision_end|>" } else { "" },
                audio: "",
            },
            now: clock::local_now(),
        };
        let prompt = &self.prompt;
        let text = prompt.render_chat(&input).map_err(|error| {
            tracing::debug!(%error, "chat cannot be rendered");
            "template"
        })?;
        let mut tokens = Vec::with_capacity(text.len() / 3);
        // Chat templates write the model's special tokens themselves: vLLM adds none unless asked.
        let add_special_tokens = request.common.add_special_tokens.unwrap_or(false);
        prompt.encode(&text, add_special_tokens, &mut tokens).map_err(|_| "tokenizer")?;
        Ok(tokens)
    }
}

impl Chat<'_> {
    fn prepare(&self) -> Prepared {
        let common = &self.request.common;
        let items: Vec<_> = self.request.media.iter().map(|part| self.item(part)).collect();
        let (identities, cuts) = self.edits(&items);
        let oversized = items.iter().position(|item| item.fault == Some(TOO_MANY_PIXELS));
        let unreadable = items.iter().enumerate().find_map(|(place, item)| Some((place, item.unreadable?)));
        let prepared = self.predict(&items).unwrap_or_else(|reason| Prepared::unknown(common, reason));
        let affinity = items.first().and_then(|item| item.affinity);
        // vLLM 0.32: `echo` of a chat makes prompt logprobs of `top_logprobs`, which is never null.
        let reads_cache = !common.prompt_logprobs && !common.echo;
        Prepared { oversized, unreadable, affinity, reads_cache, ..prepared.with_edits(identities, cuts) }
    }

    /// The prediction, or why there is none at all.
    fn predict(&self, items: &[Item]) -> Result<Prepared, &'static str> {
        let common = &self.request.common;
        if common.truncate_prompt_tokens {
            return Err("truncate_prompt_tokens");
        }
        if let Some(reason) = self.target.blurred(common).or(self.target.ids_given(common)) {
            return Err(reason);
        }
        let tokens = self.model.chat_tokens(self.request, self.vision.as_deref().ok())?;
        let placer = Placer {
            vision: self.vision.as_deref().ok(),
            video: self.model.video.as_ref(),
            encode: &|text| encode(&self.model.prompt, text),
            placeholders: &self.model.placeholders,
            pad: self.model.pad,
            whole: self.target.sets_identities(),
        };
        let placed = placer.place(&tokens, items)?;
        let (root, mut hashes) = (self.target.root(common), Vec::new());
        self.target.hash(&placed.hashed, root, &mut hashes);
        let mut prepared = Prepared::unknown(common, "").with_view(placed.kind, &placed.told, hashes, root);
        prepared.media = placed.media;
        prepared.counted = placed.whole;
        prepared.preamble.slots = placed.slots;
        self.target.speak(&mut prepared.preamble, placed.told);
        Ok(prepared)
    }

    /// Identities for the parts whose bytes travel along; cuts of what clients must not set.
    fn edits(&self, items: &[Item]) -> (Vec<Identity>, Vec<Range<usize>>) {
        let (mut identities, mut cuts) = (Vec::new(), self.request.common.cuts.clone());
        let kept = self.model.client_uuid == ClientUuid::Keep && self.target.encoder.is_none();
        if kept && self.target.sets_identities() {
            return (identities, cuts);
        }
        for (part, item) in self.request.media.iter().zip(items) {
            cuts.extend(part.uuid_cut.clone());
            if let Some(id) = item.set {
                let tokens = item.shape.as_ref().map_or(0, Made::tokens);
                identities.push(Identity { insert_at: part.insert_at as u64, id, tokens });
            }
        }
        (identities, cuts)
    }
}
