//! `/v1/chat/completions`: template, tokens, images into their placeholders.

use fovea_gossip::preamble::Identity;
use fovea_kv::{MediaId, RoutingView};
use fovea_media::expand::{self, Item};
use fovea_media::family::VisionModel;
use fovea_openai::{ChatRequest, MediaKind, MediaPart};
use fovea_prompt::{ChatInput, Placeholders, clock};

use super::image::Facts;
use super::view::{hash, of_tokens};
use super::{ClientUuid, Media, Prepared, Preparer, Target, ViewKind};

/// An image with everything that its expansion needs.
#[derive(Clone, Copy)]
struct Known {
    facts: Facts,
    id: MediaId,
    tokens: u32,
}

/// Images known from the first on, and what ends the knowledge.
struct Seen {
    known: Vec<Known>,
    unknown: Option<(MediaKind, &'static str)>,
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
                image: self.vision.as_ref().map_or("", VisionModel::image_text),
                ..Placeholders::default()
            },
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
        let (tokens, kind) = match seen.unknown {
            None => (tokens, ViewKind::Exact),
            Some((unknown, reason)) => {
                let end = self.placeholders.place(tokens, unknown, seen.known.len()).ok_or(reason)?;
                (&tokens[..end], ViewKind::Prefix { reason })
            }
        };
        let Some(vision) = self.vision.as_ref().filter(|_| !seen.known.is_empty()) else {
            return Ok((of_tokens(tokens), Vec::new(), kind));
        };
        let items: Vec<_> = seen.known.iter().map(|known| Item { id: known.id, tokens: known.tokens }).collect();
        let expansion = expand::expand(tokens, &items, vision).map_err(|_| "placeholders")?;
        let place = |(known, start): (&Known, &u32)| {
            let (width, height) = known.facts.upright;
            Media { id: known.id, width, height, tokens: known.tokens, start: *start }
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
        let (width, height) = if target.engine.exif { facts.upright } else { facts.stored };
        let tokens = vision.image_tokens(width, height).map_err(|_| "image that an engine would refuse")?;
        let id = match &part.uuid {
            Some(uuid) if self.client_uuid == ClientUuid::Keep => MediaId::from_engine_id(uuid),
            _ => facts.id,
        };
        Ok(Known { facts, id, tokens })
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
                identities.push(Identity { insert_at: part.insert_at as u64, id: known.id, tokens: known.tokens });
            }
        }
        (identities, cuts)
    }
}

impl Seen {
    fn until_unknown(request: &ChatRequest<'_>, all: Vec<Result<Known, &'static str>>) -> Self {
        let mut known = Vec::with_capacity(all.len());
        for (part, item) in request.media.iter().zip(all) {
            match item {
                Ok(item) => known.push(item),
                Err(reason) => return Self { known, unknown: Some((part.kind, reason)) },
            }
        }
        Self { known, unknown: None }
    }
}
