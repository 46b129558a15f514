//! SGLang's tree: nodes of any length, full pages only.

use super::digest::{on_wire, page, salted_root};
use super::event::{Event, Stored, record};
use super::{Rules, identity};
use crate::blocks::MediaSpan;
use crate::hash::Digest;
use crate::tree::{Dialect, Namespace, Run};

impl Dialect for Rules {
    type Event = Event;
    const NODE_PAGES_MAX: usize = usize::MAX;
    const KEEPS_PARTIAL: bool = false;

    fn namespace(&self, salt: Option<&str>, extra: Option<&str>) -> Namespace {
        let named = |text: &str| (!text.is_empty()).then(|| text.to_owned());
        let (salt, extra) = (salt.unwrap_or_default(), extra.unwrap_or_default());
        match self.salts {
            true => Namespace { salt: named(salt), extra: named(extra) },
            false => Namespace { salt: None, extra: named(&format!("{salt}{extra}")) },
        }
    }

    fn keyed(&self, tokens: &[u32], media: &[MediaSpan]) -> Vec<u64> {
        identity::keyed(tokens, media, self)
    }

    fn digest(&self, space: &Namespace, prior: Option<&Digest>, tokens: &[u64], _: &[MediaSpan], _: usize) -> Digest {
        let root = || space.salt.as_deref().map(salted_root);
        page(prior.copied().or_else(root).as_ref(), tokens)
    }

    fn created(&self, _capacity: usize, events: &mut Vec<Event>) {
        self.cleared(events);
    }

    fn stored(&self, run: &Run<'_>, events: &mut Vec<Event>) {
        let stored = Stored {
            hashes: run.digests.iter().map(on_wire).collect(),
            parent: run.parent.map(on_wire),
            tokens: run.tokens.to_vec(),
            page_size: run.page_size,
            salt: run.space.salt.clone(),
            session: run.session.filter(|_| self.sessions).map(str::to_owned),
        };
        record(events, Event::Stored(stored), self);
    }

    fn removed(&self, pages: &[Digest], events: &mut Vec<Event>) {
        record(events, Event::Removed(pages.iter().map(on_wire).collect()), self);
    }

    fn cleared(&self, events: &mut Vec<Event>) {
        record(events, Event::Cleared, self);
    }
}
