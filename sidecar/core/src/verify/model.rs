//! Prompts as tests write them, and the predictions and events that follow from them.

use fovea_kv::event::BlockExtra;
use fovea_kv::{EngineHash, MediaId, Tier};

use super::*;

const SIZE: u32 = 4;
pub(super) const PLACEHOLDER: u32 = 900;

/// An image in a prompt: its key, what the engine keys it by (`None` = not known), and its positions.
#[derive(Clone, Copy, Debug)]
pub(super) struct Image {
    pub(super) start: u32,
    pub(super) len: u32,
    pub(super) key: u8,
    pub(super) id: Option<u8>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct Prompt {
    pub(super) tokens: Vec<u32>,
    pub(super) images: Vec<Image>,
}

impl Prompt {
    /// Letters are tokens of text; `[K=I9]` is an image of key K that the engine calls I and that fills 9 positions, `[K9]` one that it
    /// is not known how it calls.
    pub(super) fn parse(text: &str) -> Self {
        let mut prompt = Self::default();
        let mut rest = text;
        while let Some(next) = rest.chars().next() {
            let Some((image, behind)) = rest.strip_prefix('[').and_then(|rest| rest.split_once(']')) else {
                prompt.tokens.push(u32::from(next));
                rest = &rest[1..];
                continue;
            };
            rest = behind;
            let bytes = image.as_bytes();
            let (id, len) = if bytes[1] == b'=' { (Some(bytes[2]), &image[3..]) } else { (None, &image[1..]) };
            prompt.push(bytes[0], id, len.parse().unwrap());
        }
        prompt
    }

    pub(super) fn push(&mut self, key: u8, id: Option<u8>, len: u32) {
        self.images.push(Image { start: self.len(), len, key, id });
        self.tokens.extend(std::iter::repeat_n(PLACEHOLDER, len as usize));
    }

    pub(super) fn len(&self) -> u32 {
        u32::try_from(self.tokens.len()).unwrap()
    }

    pub(super) fn view(&self, shown: Shown) -> RoutingView {
        let mut view = RoutingView::default();
        for (at, &token) in (0..).zip(&self.tokens) {
            let image = self.images.iter().find(|image| image.start <= at && at < image.start + image.len);
            match image.and_then(|image| Some((at - image.start, image.id?))) {
                Some((place, id)) if shown == Shown::Pads => view.push(pads(id)[place as usize % 4], 1),
                _ => view.push(token, 1),
            }
        }
        let known = self.images.iter().filter(|_| shown == Shown::Spans);
        known.for_each(|image| image.id.iter().for_each(|&id| view.mark(image.start, image.len, MediaId([id; 32]))));
        view
    }

    pub(super) fn chain(&self, shown: Shown) -> Vec<SequenceHash> {
        let mut chain = Vec::new();
        self.view(shown).sequence_hashes(BlockSize::new(SIZE).unwrap(), root("", ""), &mut chain);
        chain
    }

    pub(super) fn expected(&self, shown: Shown, session: Option<&str>) -> Expected {
        let slot =
            |image: &Image| Slot { start: image.start, len: image.len, key: key(image.key), known: image.id.is_some() };
        Expected {
            view: self.view(shown),
            slots: self.images.iter().map(slot).collect(),
            root: root("", ""),
            block_size: BlockSize::new(SIZE).unwrap(),
            exact: self.images.iter().all(|image| image.id.is_some()),
            prompt_tokens: self.len(),
            reused_tokens: 0,
            session: session.map(Arc::from),
            shown,
        }
    }

    /// The event that stores these blocks, in our own names.
    pub(super) fn stored(&self, shown: Shown, blocks: std::ops::Range<usize>, session: Option<&str>) -> Stored {
        let (view, chain) = (self.view(shown), self.chain(shown));
        let tokens: Vec<_> =
            view.runs().iter().flat_map(|run| std::iter::repeat_n(run.token, run.count as usize)).collect();
        let size = SIZE as usize;
        let media = |block: usize| {
            let start = i64::try_from(block * size).unwrap();
            let over = view.spans().iter().map(|span| (span.id, i64::from(span.start) - start, i64::from(span.len)));
            let over = over.filter(|&(_, offset, len)| offset < i64::from(SIZE) && offset + len > 0);
            let media = over.map(|(id, offset, _)| (id, i32::try_from(offset).unwrap())).collect();
            BlockExtra { media, ..BlockExtra::default() }
        };
        Stored {
            hashes: chain[blocks.clone()].iter().map(|hash| EngineHash::Int(hash.0)).collect(),
            parent: blocks.start.checked_sub(1).map(|parent| EngineHash::Int(chain[parent].0)),
            tokens: tokens[blocks.start * size..blocks.end * size].to_vec(),
            block_size: SIZE,
            tier: Tier::Gpu,
            lora: None,
            extra: if shown == Shown::Spans { blocks.map(media).collect() } else { Vec::new() },
            group: 0,
            attention: Attention::Full,
            session: session.map(Arc::from),
        }
    }
}

pub(super) fn key(key: u8) -> MediaKey {
    MediaKey([key; 32])
}

fn pads(id: u8) -> [u32; 4] {
    [0, 1, 2, 3].map(|place| 1_000_000 + u32::from(id) * 8 + place)
}

pub(super) fn value(shown: Shown, id: u8) -> LearntValue {
    if shown == Shown::Pads { LearntValue::Pads(pads(id).into()) } else { LearntValue::Id(MediaId([id; 32])) }
}

pub(super) fn apply(verifier: &mut Verifier, stored: &Stored) {
    let name = |hash| match hash {
        EngineHash::Int(hash) => Some(SequenceHash(hash)),
        EngineHash::Digest { .. } => None,
    };
    let names: Vec<_> = stored.hashes.iter().map(|&hash| name(hash)).collect();
    verifier.stored(stored, stored.parent.and_then(name), &names);
    verifier.check_invariants();
}
