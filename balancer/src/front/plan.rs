//! From a body to a pool and a prediction. CPU work: runs on the blocking pool.

use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use fovea_balancer_core::choose::Mode;
use fovea_balancer_core::embeddings::short_key;
use fovea_balancer_core::fleet::{Resolved, Served};
use fovea_gossip::message::HashScheme;
use fovea_gossip::preamble::{self, Preamble, Routed};
use fovea_kv::{BlockSize, SequenceHash};
use fovea_media::estimate::{Estimate, TOKENS_MAX, VideoHints};
use fovea_openai::MediaKind;

use super::media::{Media, Wanted};
use super::refusal::Refusal;
use super::truth::Demand;
use crate::estimate;
use crate::metrics::{ErrorKind, Outcome};
use crate::models::Models;
use crate::prepare::{self, ApiPath, Guess, Isolation, Prepared, Request, Target};
use crate::render::{Known, Renderer};
use crate::tenants::Tenant;
use crate::workers::{Ask, PoolRef, Route, Workers};

/// Stands in while an engine's block size is not known: identities do not depend on it, and no hash made with it is used.
const ANY_BLOCK_TOKENS: u32 = 16;

/// A request whose meaning is known as far as it can be.
pub struct Plan {
    pub pool: PoolRef,
    pub prepared: Prepared,
    /// Positions of media items, as far as their places are known.
    images: Vec<(u32, u32)>,
    /// Short names of the same items.
    image_keys: Vec<u64>,
    /// Where no block's hash is known: the estimator's chain.
    estimated: Vec<SequenceHash>,
    /// Tokens of the whole prompt; a guess where it is not known to its end.
    load_tokens: u32,
    /// As the client wrote it; lower goes first.
    pub priority: i64,
    /// The body for the sidecar, where it is not the client's: fetched images stand in it.
    pub body: Option<Bytes>,
}

/// What remains of a plan while its answer streams: a plan takes several times the memory of a long prompt, and streams are many.
pub struct Told {
    pub model: String,
    /// As far as known.
    pub prompt_tokens: u32,
    /// Blocks of the prompt, a last partial one included; 0 when the block size is not known.
    pub prompt_blocks: u32,
    pub outcome: Outcome,
    /// `exact`, `prefix;reason=…` or `none;reason=…`.
    pub view: String,
    /// Tokens of the whole prompt; a guess where it is not known to its end.
    pub load_tokens: u32,
    /// Of these, in place of images, as far as known.
    pub image_tokens: u32,
}

/// What a plan is made from besides the request.
pub struct Planner {
    pub workers: Arc<Workers>,
    pub models: Arc<Models>,
    /// `None` = sizes of images are asked of no engine.
    pub renderer: Option<Renderer>,
    /// Clients may send embeddings.
    pub embeddings_allowed: bool,
    /// Images given by URL can be fetched.
    pub fetches: bool,
    /// Most pixels of one image.
    pub pixels_max: u64,
    /// As `media.unmeasured_videos` of the config.
    pub unmeasured_videos: bool,
    /// As `estimate` of the config.
    pub estimate: Estimate,
    pub demand: Demand,
}

/// A plan, or what it needs first.
pub enum Planned {
    Ready(Box<Plan>),
    /// Media to be fetched.
    Wants(Vec<Wanted>),
}

impl Planner {
    /// Finds the pool for `body` and predicts what its engines will cache. `videos` = what the request's headers say of them; `media` = what was fetched for an earlier [`Planned::Wants`].
    ///
    /// # Errors
    /// For a body no engine would take, an unknown model, or a model without a ready worker.
    pub fn plan(
        &self,
        path: ApiPath,
        body: &[u8],
        turn: u64,
        videos: VideoHints,
        media: Option<Media>,
        tenant: Option<&Tenant>,
    ) -> Result<Planned, Refusal> {
        let request = Request::parse(path, body)?;
        self.check(&request, tenant)?;
        let isolation = tenant.and_then(|tenant| tenant.isolation.as_ref());
        let (model, priority) = (request.model(), request.priority());
        let (pool, served, base_names) = self.pool(model, turn)?;
        let guess = |pool| request.guessed_tokens(body.len(), self.guess(pool, videos));
        let estimated = || self.estimated(path, body, &request, (served, &base_names), isolation, videos);
        let preparer = self.models.find(&base_names, &pool.facts.engine).filter(|_| !pool.facts.is_plain);
        let Some(preparer) = preparer else {
            let ((prepared, body), load_tokens) = (prepare::unprepared_body(&request, isolation, body), guess(&pool));
            let (body, estimated) = (body.map(Bytes::from), estimated());
            let (images, image_keys) = (Vec::new(), Vec::new());
            let plan = Plan { pool, prepared, images, image_keys, estimated, load_tokens, priority, body };
            return Ok(Planned::Ready(Box::new(plan)));
        };
        let urls = request.media_urls(preparer.predicts_videos());
        if media.is_none() && self.fetches && preparer.predicts_images() && !urls.is_empty() {
            let wanted = |(place, kind, url): (usize, _, &str)| Wanted { place, kind, url: url.to_owned() };
            return Ok(Planned::Wants(urls.into_iter().map(wanted).collect()));
        }
        let media = media.unwrap_or_default();
        let lora = if served == Served::Lora { model } else { "" };
        let known = BlockSize::new(pool.facts.block_size);
        let block_size = known.or(BlockSize::new(ANY_BLOCK_TOKENS)).expect("ANY_BLOCK_TOKENS is not 0");
        let facts =
            Known { pool: &pool, base_names: &base_names, preparer: &preparer, renderer: self.renderer.as_ref() };
        let target = Target {
            engine: &pool.facts.engine,
            block_size,
            lora,
            media: &media.source,
            pixels_max: self.pixels_max,
            learnt: &facts,
            media_trusted: self.workers.media_trusted(&pool),
            unmeasured_videos: self.unmeasured_videos,
            isolation,
            encoder: pool.facts.encoder,
        };
        let (mut prepared, body) = preparer.prepare_body(&request, target, body);
        self.check_media(&prepared)?;
        if known.is_none() {
            prepared = prepared.without_hashes("block_size_unknown");
        }
        let (images, image_keys) = images(&prepared.preamble);
        let estimated = if prepared.hashes.is_empty() { estimated() } else { Vec::new() };
        let load_tokens =
            if prepared.counted { prepared.prompt_tokens } else { prepared.prompt_tokens.max(guess(&pool)) };
        let body = body.map(Bytes::from);
        Ok(Planned::Ready(Box::new(Plan {
            pool,
            prepared,
            images,
            image_keys,
            estimated,
            load_tokens,
            priority,
            body,
        })))
    }
}

impl Planner {
    /// What no engine of any model would take, or this balancer must not pass on.
    fn check(&self, request: &Request<'_>, tenant: Option<&Tenant>) -> Result<(), Refusal> {
        if let Some(hazard) = request.hazard(self.embeddings_allowed) {
            let param = Some(hazard.field());
            return Err(Refusal { param, ..Refusal::new(ErrorKind::BadRequest, hazard.to_string()) });
        }
        let most = tenant.and_then(|tenant| tenant.media_max).map_or(usize::MAX, |most| most as usize);
        if request.media_count() > most {
            let message = format!("more than {most} images, videos and sounds in one request: send fewer");
            return Err(Refusal { param: Some("messages"), ..Refusal::new(ErrorKind::Media, message) });
        }
        if request.model().is_empty() {
            let message = "`model` is missing; GET /v1/models lists the models served here";
            return Err(Refusal { param: Some("model"), ..Refusal::new(ErrorKind::BadRequest, message) });
        }
        Ok(())
    }

    /// Media that were looked into and cannot be served.
    fn check_media(&self, prepared: &Prepared) -> Result<(), Refusal> {
        if let Some(part) = prepared.oversized {
            return Err(oversized(part, self.pixels_max));
        }
        if let Some((part, error)) = &prepared.unreadable {
            let message = format!("media part {part}: {error}");
            return Err(Refusal { param: Some("messages"), ..Refusal::new(ErrorKind::Media, message) });
        }
        Ok(())
    }

    /// The pool for a model name, and the names of its base model.
    fn pool(&self, model: &str, turn: u64) -> Result<(PoolRef, Served, Arc<[String]>), Refusal> {
        match self.workers.resolve(model, Instant::now()) {
            Resolved::Pool { pool, served, base_names } => Ok((pool, served, base_names)),
            Resolved::Unknown if !self.models.declares(model) => {
                self.demand.refused(model, &self.models);
                Err(Refusal::unknown_model(clipped(model)))
            }
            Resolved::Unknown | Resolved::NoneReady => Err(self.no_worker(model, turn)),
        }
    }

    /// No worker of the model takes requests: counted, as demand.
    pub fn no_worker(&self, model: &str, turn: u64) -> Refusal {
        self.demand.refused(model, &self.models);
        no_worker(model, turn)
    }

    /// The estimator's chain, where this balancer routes by caches at all.
    fn estimated(
        &self,
        path: ApiPath,
        body: &[u8],
        request: &Request<'_>,
        (served, base_names): (Served, &[String]),
        isolation: Option<&Isolation>,
        videos: VideoHints,
    ) -> Vec<SequenceHash> {
        if !matches!(self.workers.mode(), Mode::Precise | Mode::Approximate) {
            return Vec::new();
        }
        let adapter = if served == Served::Lora { request.model() } else { "" };
        let names = [base_names.first().map_or("", String::as_str), "\0", adapter].concat();
        let salt = isolation.map(|isolation| isolation.salt(request.cache_salt()));
        let salt = salt.as_deref().unwrap_or(request.cache_salt());
        estimate::approximate(path, body, &names, salt, &self.estimate, videos)
    }

    /// An engine refuses a prompt that is longer than its model's context.
    fn guess(&self, pool: &PoolRef, videos: VideoHints) -> Guess<'_> {
        let longest = Some(pool.facts.engine.max_model_len).filter(|&longest| longest > 0);
        Guess { estimate: &self.estimate, videos, media_max: longest.unwrap_or(TOKENS_MAX) }
    }
}

/// Positions of the media items, and the short names of their identities; 0 where that is not known.
fn images(record: &Preamble) -> (Vec<(u32, u32)>, Vec<u64>) {
    let key = |at: u32| {
        let after = record.spans.partition_point(|(start, ..)| *start <= at);
        let span = record.spans[..after].last().filter(|(start, length, _)| at - start < *length);
        span.map_or(0, |(.., id)| short_key(&id.0))
    };
    record.slots.iter().map(|slot| ((slot.start, slot.len), key(slot.start))).unzip()
}

fn oversized(part: usize, pixels_max: u64) -> Refusal {
    let message = format!("media part {part}: the image has more than {pixels_max} pixels (pixels): scale it down");
    Refusal { param: Some("messages"), ..Refusal::new(ErrorKind::Media, message) }
}

/// No worker of the model takes requests.
pub fn no_worker(model: &str, turn: u64) -> Refusal {
    let message = format!("no worker of the model `{}` takes requests at this moment; try again soon", clipped(model));
    Refusal::busy(ErrorKind::NoWorker, &message, turn)
}

/// Longest name of a model that is told back, in bytes.
const MODEL_SHOWN_MAX: usize = 256;

fn clipped(model: &str) -> &str {
    &model[..model.floor_char_boundary(MODEL_SHOWN_MAX)]
}

impl Plan {
    pub fn ask(&self) -> Ask<'_> {
        let prepared = &self.prepared;
        Ask {
            model: &prepared.model,
            prompt_tokens: self.load_tokens,
            hashes: if self.estimated.is_empty() { self.first_prompt() } else { &self.estimated },
            estimated_block_tokens: if self.estimated.is_empty() { 0 } else { estimate::BLOCK_TOKENS },
            no_reuse: !prepared.reads_cache,
            images: &self.images,
            image_keys: &self.image_keys,
            media: prepared.affinity.and_then(|name| name.first_chunk().copied()).map(u64::from_le_bytes),
            session: prepared.session,
        }
    }

    /// Tokens of the whole prompt; a guess where it is not known to its end.
    pub fn load_tokens(&self) -> u32 {
        self.load_tokens
    }

    /// An engine began to answer: one more to judge the pool by.
    pub fn watch(&self, route: &Route) {
        let without_files = self.prepared.view.lacks_model();
        let first = self.first_prompt().first().copied().filter(|_| self.prepared.reads_cache);
        self.pool.watched.answered(without_files, first, route.confirmed_blocks, Instant::now());
    }

    /// Hashes of the first prompt: several are one after another, and only one chain can be looked up.
    fn first_prompt(&self) -> &[fovea_kv::SequenceHash] {
        let hashes = &self.prepared.hashes;
        let facts = &self.pool.facts;
        let pairs = u32::from(facts.engine.hash_scheme == HashScheme::Fovea1Pairs);
        let blocks = |tokens: &u32| tokens.saturating_sub(pairs).checked_div(facts.block_size);
        let first = self.prepared.prompts.first().and_then(blocks);
        &hashes[..first.map_or(hashes.len(), |blocks| hashes.len().min(blocks as usize))]
    }

    /// The record for the sidecar.
    pub fn preamble(&self, route: &Route) -> Vec<u8> {
        let routed =
            Routed { dp_rank: route.dp_rank, prompt_tokens: self.load_tokens, reused_tokens: route.reused_tokens };
        let whole = &self.prepared.preamble;
        let encoded = preamble::encode_routed(whole, routed);
        if encoded.len() <= preamble::MAX_PREAMBLE_BYTES {
            return encoded;
        }
        let (identities, cuts, session) = (whole.identities.clone(), whole.cuts.clone(), whole.session.clone());
        let Preamble { root, body_at, .. } = *whole;
        let short = Preamble { identities, cuts, session, root, body_at, ..Preamble::default() };
        preamble::encode_routed(&short, routed)
    }

    /// All that is still needed once an answer has begun.
    pub fn told(self, mode: Mode, route: &Route) -> Told {
        let (outcome, prompt_blocks) = (self.outcome(mode, route), self.prompt_blocks());
        let (load_tokens, media) = (self.load_tokens, self.prepared.media.iter());
        let image_tokens = media.filter(|media| media.kind == MediaKind::Image).map(|media| media.tokens).sum();
        let Prepared { view, model, prompt_tokens, .. } = self.prepared;
        Told { model, prompt_tokens, prompt_blocks, outcome, view: view.to_string(), load_tokens, image_tokens }
    }

    /// What decided for `route`.
    fn outcome(&self, mode: Mode, route: &Route) -> Outcome {
        match mode {
            Mode::RoundRobin => Outcome::RoundRobin,
            Mode::Session if self.prepared.session.is_some() => Outcome::Session,
            Mode::Load | Mode::Session => Outcome::Load,
            _ if route.approximate => Outcome::Approximate,
            Mode::Approximate => Outcome::Load,
            Mode::Precise if !route.precise => Outcome::Load,
            Mode::Precise if self.pool.facts.engine.hybrid && !self.prepared.hashes.is_empty() => Outcome::Approximate,
            Mode::Precise if self.prepared.view.is_whole() => Outcome::Precise,
            Mode::Precise if self.prepared.hashes.is_empty() => Outcome::Load,
            Mode::Precise => Outcome::Prefix,
        }
    }

    /// Blocks of the prompt, a last partial one included; 0 when the block size is not known.
    fn prompt_blocks(&self) -> u32 {
        match self.pool.facts.block_size {
            0 => 0,
            size => self.prepared.prompt_tokens.div_ceil(size),
        }
    }
}
