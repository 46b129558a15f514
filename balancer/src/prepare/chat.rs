//! `/v1/chat/completions`: template, tokens, images into their placeholders.

use std::borrow::Cow;
use std::ops::Range;

use fovea_gossip::preamble::Identity;
use fovea_kv::{MediaId, RoutingView};
use fovea_media::expand::{self, Item};
use fovea_media::family::{Shape, VisionModel};
use fovea_media::identity::{Options, Source, vllm_item_id};
use fovea_openai::{ChatRequest, MediaKind, MediaPart};
use fovea_prompt::{ChatInput, Placeholders, clock};
use serde_json::{Map, Value};

use super::image::{Facts, TOO_MANY_PIXELS};
use super::view::{hash, of_tokens};
use super::{ClientUuid, Media, Prepared, Preparer, Target, ViewKind};

/// Options of `media_io_kwargs.image` that change the identity alone, not the count.
const IMAGE_IO_OPTIONS: [&str; 1] = ["rgba_background_color"];

/// One request on its way.
struct Chat<'a> {
    model: &'a Preparer,
    request: &'a ChatRequest<'a>,
    target: Target<'a>,
    /// The image rule under the request's own options; the reason why there is none.
    vision: Result<Cow<'a, VisionModel>, &'static str>,
}

/// An image with everything that its expansion needs.
struct Known {
    facts: Facts,
    /// As the engine keys it.
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
    pub(super) fn chat<'a>(&'a self, request: &'a ChatRequest<'a>, target: Target<'a>) -> Prepared {
        let vision = self.vision_under(&request.common.mm_processor_kwargs);
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
}

impl Chat<'_> {
    fn prepare(&self) -> Prepared {
        let all: Vec<_> = self.request.media.iter().map(|part| self.look_at(part)).collect();
        let (identities, cuts) = self.edits(&all);
        let oversized = all.iter().position(|item| item.as_ref().err() == Some(&TOO_MANY_PIXELS));
        let prepared = self.predict(all);
        let prepared = prepared.unwrap_or_else(|reason| Prepared::unknown(&self.request.common, reason));
        Prepared { oversized, ..prepared.with_edits(identities, cuts) }
    }

    /// The prediction, or why there is none at all.
    fn predict(&self, all: Vec<Result<Known, &'static str>>) -> Result<Prepared, &'static str> {
        let common = &self.request.common;
        if common.truncate_prompt_tokens {
            return Err("truncate_prompt_tokens");
        }
        let tokens = self.tokens()?;
        let seen = Seen::until_unknown(self.request, all);
        let (view, media, kind) = self.view(&tokens, &seen)?;
        let salt = common.cache_salt.as_deref().unwrap_or_default();
        let mut hashes = Vec::new();
        hash(&view, self.target.block_size, self.target.lora, salt, &mut hashes);
        let mut prepared = Prepared::unknown(common, "").with_view(kind, &view, hashes);
        prepared.media = media;
        Ok(prepared)
    }

    /// Token ids of the prompt before expansion.
    fn tokens(&self) -> Result<Vec<u32>, &'static str> {
        let request = self.request;
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
        let prompt = &self.model.prompt;
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

    /// The expanded view, images with their places, and how far it holds.
    fn view(&self, tokens: &[u32], seen: &Seen) -> Result<(RoutingView, Vec<Media>, ViewKind), &'static str> {
        let vision = self.vision.as_deref().ok();
        let (tokens, kind) = match seen.reason {
            None => (tokens, ViewKind::Exact),
            Some(reason) => {
                let end = self.model.placeholders.end(tokens, seen.known.len(), &seen.left, vision).ok_or(reason)?;
                (&tokens[..end], ViewKind::Prefix { reason })
            }
        };
        let Some(vision) = vision else { return Ok((of_tokens(tokens), Vec::new(), kind)) };
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

    fn look_at(&self, part: &MediaPart<'_>) -> Result<Known, &'static str> {
        let (engine, options) = (self.target.engine, self.options()?);
        let facts = self.target.media.look_at(part, options, &engine.engine_model, self.target.pixels_max)?;
        let vision = self.vision.as_ref().map_err(|reason| *reason)?;
        let size = if engine.exif { facts.upright } else { facts.stored };
        let shape = vision.measure(size.0, size.1).map_err(|_| "engine_refuses")?;
        let under = |uuid: &str| vllm_item_id(Source::Uuid(uuid), options, &engine.engine_model);
        let id = match (self.model.client_uuid, &part.uuid) {
            (ClientUuid::Keep, Some(uuid)) => under(uuid),
            (ClientUuid::Replace, _) if facts.travels => under(&facts.content.to_string()),
            _ => facts.unnamed,
        };
        Ok(Known { facts, id, size, shape })
    }

    /// Options of the request that enter identities.
    fn options(&self) -> Result<Options<'_>, &'static str> {
        let common = &self.request.common;
        let media_io = match common.media_io_kwargs.get("image") {
            None => None,
            Some(Value::Object(map)) if map.keys().all(|key| IMAGE_IO_OPTIONS.contains(&key.as_str())) => Some(map),
            Some(_) => return Err("request media kwargs"),
        };
        Ok(Options { mm_processor: Some(&common.mm_processor_kwargs), media_io })
    }

    /// Identities for the parts whose bytes travel along; cuts of what clients must not set.
    fn edits(&self, all: &[Result<Known, &'static str>]) -> (Vec<Identity>, Vec<Range<usize>>) {
        let (mut identities, mut cuts) = (Vec::new(), self.request.common.cuts.clone());
        if self.model.client_uuid == ClientUuid::Keep {
            return (identities, cuts);
        }
        for (part, known) in self.request.media.iter().zip(all) {
            cuts.extend(part.uuid_cut.clone());
            if let Ok(Known { facts, shape, .. }) = known
                && facts.travels
            {
                identities.push(Identity {
                    insert_at: part.insert_at as u64,
                    id: facts.content,
                    tokens: shape.tokens(),
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
