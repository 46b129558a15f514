//! What is particular to one family's tree.

use crate::blocks::MediaSpan;
use crate::hash::Digest;

/// Prompts of different namespaces share nothing.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct Namespace {
    /// `cache_salt`; enters the digests.
    pub salt: Option<String>,
    /// `extra_key`; does not show.
    pub extra: Option<String>,
}

/// Consecutive pages that came into the tree together.
pub struct Run<'a> {
    /// In order of position.
    pub digests: &'a [Digest],
    /// `None` = the first of `digests` is a first page.
    pub parent: Option<&'a Digest>,
    /// Keyed tokens of all pages; the last page may lack some.
    pub tokens: &'a [u64],
    /// Position of the first token.
    pub start: usize,
    /// Tokens per page.
    pub page_size: usize,
    /// Where the prompt belongs.
    pub space: &'a Namespace,
    /// All media of the prompt.
    pub media: &'a [MediaSpan],
    /// `session_id` of the request.
    pub session: Option<&'a str>,
}

/// Hashes, namespaces and events of one family.
pub trait Dialect {
    /// What it publishes.
    type Event;
    /// Most pages of a node: what is evicted together.
    const NODE_PAGES_MAX: usize;
    /// Whether the last page of a request is kept though it is not full.
    const KEEPS_PARTIAL: bool;

    /// Where a prompt belongs.
    fn namespace(&self, salt: Option<&str>, extra: Option<&str>) -> Namespace;

    /// The tokens that the tree is keyed with.
    fn keyed(&self, tokens: &[u32], media: &[MediaSpan]) -> Vec<u64>;

    /// Digest of one page after that of `prior`; `start` is the position of its first token.
    fn digest(
        &self,
        space: &Namespace,
        prior: Option<&Digest>,
        tokens: &[u64],
        media: &[MediaSpan],
        start: usize,
    ) -> Digest;

    /// An empty tree was made.
    fn created(&self, capacity: usize, events: &mut Vec<Self::Event>);

    /// Pages came.
    fn stored(&self, run: &Run<'_>, events: &mut Vec<Self::Event>);

    /// The pages of a node went.
    fn removed(&self, pages: &[Digest], events: &mut Vec<Self::Event>);

    /// All pages went.
    fn cleared(&self, events: &mut Vec<Self::Event>);
}
