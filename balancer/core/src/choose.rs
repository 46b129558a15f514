//! Who gets a request: plain data in, a decision and its reasons out.
//!
//! `precise` and `approximate` differ in what they know of caches. Both pick the worker with the least work before the request's first
//! output, in tokens:
//! waiting prefill + weight × ((prompt − reused, by tier) + image tokens still to encode) + weight × decode load.
//! An engine always computes at least one prompt token, so reuse is at most ⌊(prompt − 1) / block⌋ blocks.

use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::fleet::WorkerKey;

/// How a pool's requests are spread.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
pub enum Mode {
    /// By what the workers' caches hold, and load.
    #[default]
    Precise,
    /// By what this balancer sent where, and load.
    Approximate,
    /// By load alone.
    Load,
    /// One after another.
    RoundRobin,
    /// By rendezvous hash of the session key; by load without one.
    Session,
}

/// `docs/operate/choice.md` has the figures that the defaults come from.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub mode: Mode,
    /// Cost of one prompt token of a running request, in prefill tokens. A decode step reads that token's KV, which costs a small part
    /// of computing it; a high weight makes workers look busy that would begin at once, and moves requests off their caches.
    pub decode_weight: f64,
    /// Cost of encoding one image token, in prefill tokens. Below what it takes, because many images are in the engine's encoder cache.
    pub image_weight: f64,
    /// Cost of a token of the request's own work, in tokens that wait before it. Above 1, because its own work delays everybody after it
    /// too, while a wait is over once it is over; much higher, a hot prefix queues where it is in place of being copied.
    pub work_weight: f64,
    /// What a reused token saves, by level (GPU, CPU, storage), in prefill tokens.
    pub tier_weights: [f64; 3],
    /// A worker with more than this × the mean of outstanding tokens loses its affinity …
    pub guard_factor: f64,
    /// … once it is also this many tokens above the mean: below that nothing is hot.
    pub guard_floor_tokens: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            mode: Mode::Precise,
            decode_weight: 0.03,
            image_weight: 0.1,
            work_weight: 2.0,
            tier_weights: [1.0, 0.8, 0.5],
            guard_factor: 1.5,
            guard_floor_tokens: 16_384,
        }
    }
}

/// A worker that takes requests.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    pub key: WorkerKey,
    /// Stable identity for rendezvous hashing: the same after a reconnect.
    pub affinity: u64,
    /// Held leading blocks by level; zeros when stale or unknown.
    pub overlap_blocks: [u32; 3],
    /// Bit i: its encoder holds image i of the query, so that it has not to be encoded again. The 65th and later ones count as not held.
    pub embedded: u64,
    pub waiting_tokens: u64,
    pub decode_tokens: u64,
}

/// What matters of a request.
#[derive(Clone, Copy, Debug, Default)]
pub struct Query<'a> {
    pub prompt_tokens: u32,
    /// Tokens per block; 0 = unknown: nothing is reused.
    pub block_tokens: u32,
    /// (start, length) of each image in the prompt, in tokens.
    pub images: &'a [(u32, u32)],
    /// Hash of the first media identity: equal images meet at one worker.
    pub media: Option<u64>,
    /// Hash of the session key.
    pub session: Option<u64>,
    /// Counts requests: rotates what nothing else decides.
    pub turn: u64,
}

/// The reasons for one worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Explained {
    pub key: WorkerKey,
    pub overlap_blocks: [u32; 3],
    /// Prompt tokens that this worker would not compute.
    pub reused_tokens: u32,
    /// What encoding its images there takes, weighted, in tokens.
    pub encode_tokens: u64,
    /// Work before the first output, weighted, in tokens.
    pub cost: f64,
    /// The load guard took its affinity.
    pub guarded: bool,
}

/// Picks one of `candidates`; `None` when there is none. The reasons replace what `explained` held. O(candidates × images).
pub fn choose(
    candidates: &[Candidate],
    query: &Query,
    settings: &Settings,
    explained: &mut Vec<Explained>,
) -> Option<Explained> {
    explained.clear();
    let limit = guard_limit(candidates, settings);
    explained.extend(candidates.iter().map(|candidate| explain(candidate, query, settings, limit)));
    let ranked = || candidates.iter().zip(explained.iter());
    let by_cost = |(a, x): &(&Candidate, &Explained), (b, y): &(&Candidate, &Explained)| {
        x.cost.total_cmp(&y.cost).then_with(|| tie(a, query).cmp(&tie(b, query)))
    };
    let chosen = match (settings.mode, query.session) {
        (Mode::RoundRobin, _) => nth(query.turn, explained),
        (Mode::Session, Some(session)) => {
            ranked().max_by_key(|(candidate, _)| rendezvous(session, candidate.affinity)).map(|(_, why)| why)
        }
        (Mode::Precise | Mode::Approximate | Mode::Load | Mode::Session, _) => {
            ranked().min_by(by_cost).map(|(_, why)| why)
        }
    };
    chosen.copied()
}

fn nth(turn: u64, explained: &[Explained]) -> Option<&Explained> {
    let count = u64::try_from(explained.len()).ok().filter(|count| *count > 0)?;
    explained.get(usize::try_from(turn % count).ok()?)
}

/// Outstanding tokens above which a worker is a hot spot.
fn guard_limit(candidates: &[Candidate], settings: &Settings) -> f64 {
    let total: u64 = candidates.iter().map(outstanding).sum();
    let mean = tokens(total) / tokens(candidates.len().max(1) as u64);
    (mean * settings.guard_factor).max(mean + tokens(settings.guard_floor_tokens))
}

fn outstanding(candidate: &Candidate) -> u64 {
    candidate.waiting_tokens + candidate.decode_tokens
}

fn explain(candidate: &Candidate, query: &Query, settings: &Settings, limit: f64) -> Explained {
    let reused = candidate.overlap_blocks.map(|blocks| reused_tokens(blocks, query));
    let guarded = tokens(outstanding(candidate)) > limit;
    let load = tokens(candidate.waiting_tokens) + settings.decode_weight * tokens(candidate.decode_tokens);
    let encode = |reused| settings.image_weight * tokens(unencoded_tokens(query.images, candidate.embedded, reused));
    let work = match settings.mode {
        Mode::Precise | Mode::Approximate => {
            let counted = if guarded { [0; 3] } else { reused };
            let saved = settings.tier_weights[0] * f64::from(counted[0])
                + settings.tier_weights[1] * f64::from(counted[1] - counted[0])
                + settings.tier_weights[2] * f64::from(counted[2] - counted[1]);
            settings.work_weight * (f64::from(query.prompt_tokens) - saved + encode(counted[2]))
        }
        Mode::Load | Mode::RoundRobin | Mode::Session => 0.0,
    };
    Explained {
        key: candidate.key,
        overlap_blocks: candidate.overlap_blocks,
        reused_tokens: reused[2],
        encode_tokens: whole(encode(reused[2])),
        cost: load + work,
        guarded,
    }
}

fn reused_tokens(overlap_blocks: u32, query: &Query) -> u32 {
    let reusable = query.prompt_tokens.saturating_sub(1).checked_div(query.block_tokens).unwrap_or(0);
    overlap_blocks.min(reusable) * query.block_tokens
}

/// Tokens of the images that reach beyond the reused prefix and that no encoder output is there for: a partly reused image is encoded
/// whole.
fn unencoded_tokens(images: &[(u32, u32)], embedded: u64, reused: u32) -> u64 {
    let is_held = |at: usize| at < 64 && embedded >> at & 1 == 1;
    let fresh = |(at, (start, len)): &(usize, &(u32, u32))| start.saturating_add(*len) > reused && !is_held(*at);
    images.iter().enumerate().filter(fresh).map(|(_, (_, len))| u64::from(*len)).sum()
}

/// Lower is better: by the first image where there is one, else by load, and in turn among equals.
fn tie(candidate: &Candidate, query: &Query) -> (u64, u64) {
    match query.media {
        Some(media) => (u64::MAX - rendezvous(media, candidate.affinity), 0),
        None => (outstanding(candidate), rendezvous(query.turn, candidate.affinity)),
    }
}

fn rendezvous(key: u64, affinity: u64) -> u64 {
    xxh3_64_with_seed(&key.to_le_bytes(), affinity)
}

/// Token counts are far below 2⁵³.
#[expect(clippy::cast_precision_loss, reason = "token counts are far below 2^53")]
fn tokens(count: u64) -> f64 {
    count as f64
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "never negative, and saturates")]
fn whole(tokens: f64) -> u64 {
    tokens as u64
}

#[cfg(test)]
mod tests;
