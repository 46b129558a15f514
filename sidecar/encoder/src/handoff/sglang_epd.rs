//! SGLang's split of encoder and language model: we pose as its encoder server (read in 0.5.23's sources; pickles loaded by its own
//! reader; no live engine was run).
//!
//! The language server sends every image's URL to `POST /encode` and each receiving rank announces itself to
//! `POST /scheduler_receive_url`, in either order; what belongs together goes out as one ZMQ message, PUSH, per rank.
//! A part made here has a URL of ours that means nothing elsewhere, so that `/encode` finds the rows that the sidecar has already.

pub mod push;
pub mod rendezvous;
pub mod wire;

#[cfg(test)]
mod tests;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::{Bytes, BytesMut};
use fovea_kv::MediaId;

use super::choose::version;
use super::flags::Requirement;
use super::{EncodedImage, HandOff, HandOffError, Lease};
use crate::format::pickle::{self, Outcome, Part};
use crate::tensor::{CheckError, Checked, EngineTensor, Expect};

/// Start of the URLs that stand for rows of ours. Clients' own URLs of this form must be refused before anything else looks at them.
pub const SCHEME: &str = "fovea-embedding:";

/// Images of unfinished requests, at most.
const WAITING_MAX: usize = 1 << 16;

/// How SGLang's classes are laid out; module paths move between releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// 0.5.23 and later patches of 0.5.
    V0523,
}

impl Layout {
    pub fn for_version(text: &str) -> Option<Self> {
        match version(text)? {
            (0, 5, patch) if patch >= 23 => Some(Self::V0523),
            _ => None,
        }
    }
}

/// One ZMQ message: a pickle and, unless encoding failed, the raw rows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Frames {
    pub head: Bytes,
    pub rows: Option<Bytes>,
}

impl Frames {
    /// The answer for one part, its images in order. Rows of one image are not copied.
    ///
    /// # Errors
    /// When an image differs from the first in width or type, or has no grid.
    pub fn of_images(part: Part<'_>, images: &[Arc<Checked>]) -> Result<Self, CheckError> {
        let first = images.first().ok_or(CheckError::NoGrid)?.embedding();
        let mut grid = Vec::with_capacity(images.len());
        let mut rows = 0_u32;
        for image in images {
            let tensor = image.embedding();
            if tensor.width != first.width {
                return Err(CheckError::Width { found: tensor.width, wanted: first.width });
            }
            if tensor.dtype != first.dtype {
                return Err(CheckError::DType { found: tensor.dtype, wanted: first.dtype });
            }
            grid.push(image.grid().ok_or(CheckError::NoGrid)?);
            rows = rows.saturating_add(tensor.rows);
        }
        let data = match images {
            [_] => first.data.clone(),
            several => {
                let mut data = BytesMut::with_capacity(several.iter().map(|image| image.bytes()).sum());
                several.iter().for_each(|image| data.extend_from_slice(&image.embedding().data));
                data.freeze()
            }
        };
        let outcome = Outcome::Embedding { grid: &grid, shape: [rows, first.width], dtype: first.dtype };
        Ok(Self { head: pickle::embedding_data(part, outcome).into(), rows: Some(data) })
    }

    /// The answer for a part that could not be encoded; its request fails, others go on.
    pub fn of_failure(part: Part<'_>, message: &str, code: u16) -> Self {
        Self { head: pickle::embedding_data(part, Outcome::Failed { message, code }).into(), rows: None }
    }
}

type Table = HashMap<MediaId, (usize, Arc<Checked>)>;

/// The hand-off: keeps rows for `/encode` as long as the request that named them.
#[derive(Debug)]
pub struct SglangEpd {
    model: EngineTensor,
    waiting: Arc<Mutex<Table>>,
}

struct Held {
    waiting: Arc<Mutex<Table>>,
    id: MediaId,
}

fn lock(table: &Mutex<Table>) -> MutexGuard<'_, Table> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut table = lock(&self.waiting);
        if let Some((holders, _)) = table.get_mut(&self.id) {
            *holders -= 1;
            if *holders == 0 {
                table.remove(&self.id);
            }
        }
    }
}

impl SglangEpd {
    pub fn new(model: EngineTensor) -> Self {
        Self { model, waiting: Arc::default() }
    }

    /// The rows that a URL of ours stands for, while a request holds them.
    pub fn find(&self, url: &str) -> Option<Arc<Checked>> {
        let id = MediaId::from_hex(url.strip_prefix(SCHEME)?)?;
        lock(&self.waiting).get(&id).map(|(_, rows)| Arc::clone(rows))
    }
}

impl HandOff for SglangEpd {
    fn name(&self) -> &'static str {
        "sglang-epd"
    }

    fn expect(&self, rows: Option<u32>) -> Expect {
        self.model.expect(rows)
    }

    fn requirements(&self) -> Vec<Requirement> {
        let of = |flag, value: Option<&str>, without| Requirement {
            flag,
            value: value.map(str::to_owned),
            fields: Vec::new(),
            without,
            probe: None,
        };
        vec![
            of("--language-only", None, "it encodes images itself"),
            of("--encoder-transfer-backend", Some("zmq_to_scheduler"), "it waits for another transport"),
        ]
    }

    fn part(&self, image: &EncodedImage) -> Result<(Bytes, Lease), HandOffError> {
        image.embedding.suits(&self.expect(None))?;
        let mut table = lock(&self.waiting);
        if table.len() >= WAITING_MAX && !table.contains_key(&image.id) {
            return Err(HandOffError::TooManyWaiting { max: WAITING_MAX });
        }
        let entry = table.entry(image.id).or_insert_with(|| (0, Arc::clone(&image.embedding)));
        entry.0 += 1;
        drop(table);
        let held = Held { waiting: Arc::clone(&self.waiting), id: image.id };
        let json = format!(r#"{{"type":"image_url","image_url":{{"url":"{SCHEME}{}"}}}}"#, image.id);
        Ok((json.into_bytes().into(), Lease::holding(held)))
    }
}
