//! What clients send: requests with their views, hashes and images, made once per seed and shared by all policies.

use std::collections::HashSet;
use std::sync::Arc;

use fovea_kv::{BlockSize, MediaId, RoutingView, SequenceHash, root};

use super::random::{Random, mix};

/// One image in a prompt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Image {
    /// Equal images have equal ids.
    pub id: u64,
    /// First position, in tokens.
    pub start: u32,
    /// Tokens.
    pub len: u32,
}

#[derive(Clone, Debug)]
pub struct Request {
    /// Arrival, in mean gaps between two requests; the simulation scales it.
    pub at: f64,
    /// Who asks.
    pub session: u64,
    pub output_tokens: u32,
    pub view: RoutingView,
    pub chain: Arc<[SequenceHash]>,
    pub images: Vec<Image>,
    /// About the one image that everybody asks about.
    pub hot: bool,
}

impl Request {
    pub fn prompt_tokens(&self) -> u32 {
        self.view.len()
    }

    /// Blocks that an engine may reuse: it always computes the last token.
    pub fn reusable_blocks(&self, block_tokens: u32) -> u32 {
        (self.prompt_tokens().saturating_sub(1) / block_tokens).min(self.chain.len() as u32)
    }
}

#[derive(Clone, Debug)]
pub struct Workload {
    pub name: &'static str,
    pub block_tokens: u32,
    /// In order of arrival.
    pub requests: Vec<Request>,
}

impl Workload {
    /// Gives the requests arrivals one after another, a Poisson process.
    pub fn new(name: &'static str, block_tokens: u32, mut requests: Vec<Request>, random: &mut Random) -> Self {
        let mut at = 0.0;
        for request in &mut requests {
            at += random.gap();
            request.at = at;
        }
        Self { name, block_tokens, requests }
    }

    /// Blocks of all prompts, equal ones counted once.
    pub fn distinct_blocks(&self) -> usize {
        let all: HashSet<u64> =
            self.requests.iter().flat_map(|request| request.chain.iter().map(|hash| hash.0)).collect();
        all.len()
    }

    /// Blocks of the longest prompt with its answer.
    pub fn blocks_max(&self) -> u32 {
        let blocks = |request: &Request| (request.prompt_tokens() + request.output_tokens).div_ceil(self.block_tokens);
        self.requests.iter().map(blocks).max().unwrap_or(1)
    }

    /// The blocks that requests about the hot image share; empty without one.
    pub fn hot_chain(&self) -> &[SequenceHash] {
        let Some(request) = self.requests.iter().find(|request| request.hot) else { return &[] };
        let end = request.images.first().map_or(0, |image| image.start + image.len);
        &request.chain[..(end / self.block_tokens) as usize]
    }
}

/// Stands for every position of every image.
const PLACEHOLDER: u32 = 151_655;
/// Made-up text uses token ids below this.
const VOCABULARY: u64 = 150_000;

/// A prompt in the making.
#[derive(Debug, Default)]
pub struct Prompt {
    view: RoutingView,
    images: Vec<Image>,
}

impl Prompt {
    /// What a chat template puts before a user's first part.
    pub fn begin() -> Self {
        let mut prompt = Self::default();
        prompt.text(0, 5);
        prompt
    }

    /// Text of `tokens` tokens that no other seed gives.
    pub fn text(&mut self, seed: u64, tokens: u32) {
        for place in 0..u64::from(tokens) {
            self.view.push((mix(seed ^ (place << 48)) % VOCABULARY) as u32, 1);
        }
    }

    /// As [`Self::text`] with one token repeated: long texts in little memory.
    pub fn run(&mut self, seed: u64, tokens: u32) {
        self.view.push((mix(seed) % (1 << 32)) as u32, tokens);
    }

    pub fn image(&mut self, id: u64, tokens: u32) {
        let image = Image { id, start: self.view.len(), len: tokens };
        self.view.push(PLACEHOLDER, tokens);
        self.view.mark(image.start, image.len, media_id(id));
        self.images.push(image);
        // The token that ends an image.
        self.view.push(PLACEHOLDER + 1, 1);
    }

    pub fn request(self, block_tokens: u32, session: u64, output_tokens: u32) -> Request {
        let mut chain = Vec::new();
        if let Some(size) = BlockSize::new(block_tokens) {
            self.view.sequence_hashes(size, root("", ""), &mut chain);
        }
        let Self { view, images } = self;
        Request { at: 0.0, session, output_tokens, view, chain: chain.into(), images, hot: false }
    }
}

/// The engine's identity of a made-up image.
pub fn media_id(id: u64) -> MediaId {
    let mut bytes = [0; 32];
    for (place, eight) in (0..).zip(bytes.as_chunks_mut::<8>().0) {
        *eight = mix(id ^ (place << 56)).to_le_bytes();
    }
    MediaId(bytes)
}
