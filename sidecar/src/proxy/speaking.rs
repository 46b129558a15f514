//! One request in the engine's dialect: what of a balancer's record the engine is told, and what the closed loop compares with.

use std::sync::Arc;

use fovea_gossip::message::EngineKind;
use fovea_gossip::preamble::Preamble;
use fovea_kv::{BlockSize, MediaId, RoutingView, SequenceHash};
use fovea_sidecar_core::verify::{Expected, FlightId, Shown};

use super::flight::Predicted;
use crate::engine::dialect::{self, Member};
use crate::engine::version::Version;

/// The engine as one request meets it.
#[derive(Clone, Copy, Debug)]
pub struct Speaking {
    pub kind: EngineKind,
    pub version: Option<Version>,
    pub flight: FlightId,
    /// Of published blocks; `None` = not known yet.
    pub block_size: Option<BlockSize>,
    /// It hashes pairs of tokens.
    pub pairs: bool,
}

impl Speaking {
    pub fn session(&self, record: &Preamble) -> Option<String> {
        dialect::of(self.kind).session(record, self.flight.0, self.version)
    }

    pub fn members(&self, record: &Preamble, session: Option<&str>) -> Vec<Member> {
        dialect::of(self.kind).members(record, session)
    }

    /// What the record says of the engine's cache; `None` when it says nothing that can be compared.
    pub fn predicted(&self, record: Preamble, session: Option<String>) -> Option<Predicted> {
        let block_size = self.block_size.filter(|_| record.root != 0 && !record.runs.is_empty())?;
        let mut view = RoutingView::with_capacity(record.runs.len());
        record.runs.iter().for_each(|&(token, count)| view.push(token, count));
        record.spans.iter().for_each(|&(start, len, id): &(u32, u32, MediaId)| view.mark(start, len, id));
        let expected = Expected {
            view,
            slots: record.slots,
            root: SequenceHash(record.root),
            block_size,
            exact: record.exact,
            prompt_tokens: record.prompt_tokens,
            reused_tokens: record.reused_tokens,
            session: session.map(Arc::from),
            shown: if self.pairs { Shown::Pairs } else { dialect::of(self.kind).shown() },
        };
        Some(Predicted(expected))
    }
}
