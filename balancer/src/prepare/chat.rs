//! `/v1/chat/completions`: template, tokens, images into their placeholders.

use fovea_gossip::preamble::Identity;
use fovea_kv::{MediaId, RoutingView};
use fovea_media::expand::{self, Item};
use fovea_media::family::Shape;
use fovea_openai::{ChatRequest, MediaKind, MediaPart};
use fovea_prompt::{ChatInput, Placeholders, clock};

use super::image::Facts;
use super::view::{hash, of_tokens};
use super::{ClientUuid, Media, Prepared, Preparer, Target, ViewKind};

/// An image with everything that its expansion needs.
struct Known {
    facts: Facts,
    id: MediaId,
    /// As the engine measures it.
    size: (u32, u32),
    shape: Shape,
}

/// Images known from the first on, and what ends the knowledge.
struct Seen {
    known: Vec<Known>,
    /// Why the item after them is not known.
    reason: Option<&'static str>,
    /// Kinds of that item and all after it.
    left: Vec<MediaKind>,
}

impl Preparer {
    pub(super) fn chat(&self, request: &ChatRequest<'_>, target: Target<'_>) -> Prepared {
        let all: Vec<_> = request.media.iter().map(|part| self.look_at(part, request, target)).collect();
        let (identities, cuts) = self.edits(request, &all);
        let prepared = self.predict(request, all, target);
        prepared.unwrap_or_else(|reason| Prepared::unknown(&request.common, reason)).with_edits(identities, cuts)
    }

    /// The prediction, or why there is none at all.
    fn predict(
        &self,
        request: &ChatRequest<'_>,
        all: Vec<Result<Known, &'static str>>,
        target: Target<'_>,
    ) -> Result<Prepared, &'static str> {
        let common = &request.common;
        if common.truncate_prompt_tokens {
            return Err("truncate_prompt_tokens");
        }
        let tokens = self.tokens(request)?;
        let seen = Seen::until_unknown(request, all);
        let (view, media, kind) = self.view(&tokens, &seen)?;
        let salt = common.cache_salt.as_deref().unwrap_or_default();
        let mut hashes = Vec::new();
        hash(&view, target.block_size, target.lora, salt, &mut hashes);
        let mut prepared = Prepared::unknown(common, "").with_view(kind, &view, hashes);
        prepared.media = media;
        Ok(prepared)
    }

    /// Token ids of the prompt before expansion.
    fn tokens(&self, request: &ChatRequest<'_>) -> Result<Vec<u32>, &'static str> {
        let images = request.media.iter().filter(|part| part.kind == MediaKind::Image).count();
        let image_text = self.vision.as_ref().map_or(Some(""), |vision| vision.image_text(images));
        let input = ChatInput {
            messages: &request.messages,
            tools: request.tools.as_deref(),
            documents: request.documents.as_deref(),
            chat_template: request.chat_template.as_deref(),
            chat_template_kwargs: &request.chat_template_kwargs,
            reasoning_effort: request.reasoning_effort.as_ref(),
            add_generation_prompt: request.add_generation_prompt,
            continue_final_message: request.continue_final_message,
            placeholders: Placeholders { image: image_text.ok_or("numbered placeholders")?, ..Placeholders::default() },
            now: clock::local_now(),
        };
        let text = self.prompt.render_chat(&input).map_err(|error| {
            tracing::debug!(%error, "chat cannot be rendered");
            "template"
        })?;
        let mut tokens = Vec::with_capacity(text.len() / 3);
        // Chat templates write the model's special tokens themselves: vLLM adds none unless asked.
        self.prompt
            .encode(&text, request.common.add_special_tokens.unwrap_or(false), &mut tokens)
            .map_err(|_| "tokenizer")?;
        Ok(tokens)
    }

    /// The expanded view, images with their places, and how far it holds.
    fn view(&self, tokens: &[u32], seen: &Seen) -> Result<(RoutingView, Vec<Media>, ViewKind), &'static str> {
        let (tokens, kind) = match seen.reason {
            None => (tokens, ViewKind::Exact),
            Some(reason) => {
                let vision = self.vision.as_ref();
                let end = self.placeholders.end(tokens, seen.known.len(), &seen.left, vision).ok_or(reason)?;
                (&tokens[..end], ViewKind::Prefix { reason })
            }
        };
        let Some(vision) = self.vision.as_ref() else { return Ok((of_tokens(tokens), Vec::new(), kind)) };
        let item = |known: &Known| Item { id: known.id, shape: known.shape.clone() };
        let items: Vec<_> = seen.known.iter().map(item).collect();
        let expand = if kind == ViewKind::Exact { expand::expand } else { expand::expand_prefix };
        let expansion = expand(tokens, &items, vision).map_err(|_| "placeholders")?;
        let place = |(known, start): (&Known, &u32)| {
            let (width, height) = known.size;
            Media { id: known.id, width, height, tokens: known.shape.tokens(), start: *start }
        };
        let media = seen.known.iter().zip(&expansion.placed).map(place).collect();
        Ok((expansion.view, media, kind))
    }

    fn look_at(
        &self,
        part: &MediaPart<'_>,
        request: &ChatRequest<'_>,
        target: Target<'_>,
    ) -> Result<Known, &'static str> {
        if !request.common.mm_processor_kwargs.is_empty() || !request.common.media_io_kwargs.is_empty() {
            return Err("request processor kwargs");
        }
        let facts = self.images.look_at(part, &target.engine.engine_model)?;
        let vision = self.vision.as_ref().ok_or("images of an unknown model family")?;
        let size = if target.engine.exif { facts.upright } else { facts.stored };
        let shape = vision.measure(size.0, size.1).map_err(|_| "engine_refuses")?;
        let id = match &part.uuid {
            Some(uuid) if self.client_uuid == ClientUuid::Keep => MediaId::from_engine_id(uuid),
            _ => facts.id,
        };
        Ok(Known { facts, id, size, shape })
    }

    /// Identities for the parts whose bytes travel along; cuts of what clients must not set.
    fn edits(
        &self,
        request: &ChatRequest<'_>,
        all: &[Result<Known, &'static str>],
    ) -> (Vec<Identity>, Vec<std::ops::Range<usize>>) {
        let (mut identities, mut cuts) = (Vec::new(), request.common.cuts.clone());
        for (part, known) in request.media.iter().zip(all) {
            if self.client_uuid == ClientUuid::Keep && part.uuid.is_some() {
                continue;
            }
            cuts.extend(part.uuid_cut.clone());
            if let Ok(known) = known
                && known.facts.inline
            {
                identities.push(Identity {
                    insert_at: part.insert_at as u64,
                    id: known.id,
                    tokens: known.shape.tokens(),
                });
            }
        }
        (identities, cuts)
    }
}

impl Seen {
    fn until_unknown(request: &ChatRequest<'_>, all: Vec<Result<Known, &'static str>>) -> Self {
        let reason = all.iter().find_map(|item| item.as_ref().err().copied());
        let known: Vec<_> = all.into_iter().map_while(Result::ok).collect();
        let left = request.media[known.len()..].iter().map(|part| part.kind).collect();
        Self { known, reason, left }
    }
}
