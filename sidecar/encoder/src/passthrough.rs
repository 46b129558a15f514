//! An encoder without a model: rows are made of a hash of the image's bytes. For tests, benches and trials of a deployment.
//!
//! Equal bytes give equal rows anywhere; the row count is what the engine's own processor would give, read from the image's header.

use std::num::NonZeroU32;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use fovea_media::family::{PatchRule, Refused};
use fovea_media::header;

use crate::backend::{BuildResult, Built, EncoderSpec, Preprocess, Preprocessed, RawImage, VisionEncoder};
use crate::error::{BatchError, BuildError, ItemError};
use crate::tensor::{DType, Embedding};

/// How many rows an image gets.
#[derive(Clone)]
pub enum Rows {
    /// By the patch grid of a Qwen family; embeddings carry the grid.
    Grid(PatchRule),
    /// By a function of the upright width and height, in pixels.
    Count(Arc<dyn Fn(u32, u32) -> Result<u32, Refused> + Send + Sync>),
    Fixed(u32),
}

/// A fault to play, until it is switched off.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    #[default]
    None,
    /// Embeddings of this width in place of the right one.
    Width(u32),
    /// Every image fails by itself.
    Item(ItemError),
    /// Every batch fails as a whole.
    Batch(BatchError),
    /// Batches of more than this cost are out of memory.
    OutOfMemoryAbove(u64),
    Panic,
}

/// Switches faults while the encoder serves; clones share the switch.
#[derive(Clone, Default)]
pub struct FaultSwitch(Arc<Mutex<Fault>>);

impl FaultSwitch {
    pub fn set(&self, fault: Fault) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = fault;
    }

    fn get(&self) -> Fault {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

#[derive(Clone)]
pub struct PassThroughConfig {
    pub width: u32,
    pub dtype: DType,
    pub rows: Rows,
    /// Another seed is another encoder: other rows, another fingerprint.
    pub seed: u64,
    pub max_batch_cost: Option<NonZeroU32>,
    pub faults: FaultSwitch,
}

/// Largest embedding made, in bytes.
const BYTES_MAX: u64 = 1 << 30;

pub struct PassThrough {
    config: PassThroughConfig,
}

/// The shared part: sizes up an image.
pub struct Sizer {
    rows: Rows,
    seed: u64,
}

/// What is needed of an image to make its rows.
#[derive(Clone, Debug)]
pub struct Sized {
    seed: u64,
    rows: u32,
    grid_thw: Option<[u32; 3]>,
}

impl PassThrough {
    /// # Errors
    /// When the width is 0.
    pub fn build(config: PassThroughConfig) -> BuildResult<Self> {
        if config.width == 0 {
            return Err(BuildError::Config("passthrough: width must be at least 1".to_owned()));
        }
        let mut hasher = blake3::Hasher::new();
        hasher.update(b"fovea-passthrough-1").update(&config.width.to_le_bytes());
        hasher.update(config.dtype.name().as_bytes()).update(&config.seed.to_le_bytes());
        let spec = EncoderSpec {
            width: Some(config.width),
            dtype: Some(config.dtype),
            max_batch_cost: config.max_batch_cost,
            max_batch_items: None,
            buckets: Vec::new(),
            preprocess_concurrency: 1,
            deterministic: true,
            fingerprint: *hasher.finalize().as_bytes(),
        };
        let preprocess = Arc::new(Sizer { rows: config.rows.clone(), seed: config.seed });
        Ok(Built { encoder: Self { config }, preprocess, spec })
    }
}

impl Preprocess for Sizer {
    type Item = Sized;

    fn preprocess(&self, raw: RawImage) -> Result<Preprocessed<Sized>, ItemError> {
        let (rows, grid_thw) = self.size(&raw.bytes)?;
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.seed.to_le_bytes()).update(&raw.bytes);
        let seed = hasher.finalize().as_bytes().first_chunk().map_or(0, |bytes| u64::from_le_bytes(*bytes));
        Ok(Preprocessed { item: Sized { seed, rows, grid_thw }, cost: rows, key: 0 })
    }
}

impl Sizer {
    fn size(&self, bytes: &[u8]) -> Result<(u32, Option<[u32; 3]>), ItemError> {
        let invalid = |error: &dyn std::error::Error| ItemError::Invalid(error.to_string());
        let upright = || header::read(bytes).map(|header| header.upright()).map_err(|error| invalid(&error));
        match &self.rows {
            Rows::Fixed(rows) => Ok(((*rows).max(1), None)),
            Rows::Count(count) => {
                let (width, height) = upright()?;
                let rows = count(width, height).map_err(|error| invalid(&error))?;
                Ok((rows.max(1), None))
            }
            Rows::Grid(rule) => {
                let (width, height) = upright()?;
                let (columns, rows) = rule.cells(width, height).map_err(|error| invalid(&error))?;
                let refused = || invalid(&Refused::TooManyTokens { width, height });
                let count = columns.checked_mul(rows).ok_or_else(refused)?;
                Ok((count, Some([1, rows * rule.merge(), columns * rule.merge()])))
            }
        }
    }
}

impl VisionEncoder for PassThrough {
    type Item = Sized;
    type Pre = Sizer;

    fn forward_batch(
        &mut self,
        items: &[Sized],
        _bucket: Option<u32>,
    ) -> Result<Vec<Result<Embedding, ItemError>>, BatchError> {
        let mut width = self.config.width;
        let cost: u64 = items.iter().map(|item| u64::from(item.rows)).sum();
        match self.config.faults.get() {
            Fault::Width(wrong) => width = wrong,
            Fault::Item(error) => return Ok(items.iter().map(|_| Err(error.clone())).collect()),
            Fault::Batch(error) => return Err(error),
            Fault::OutOfMemoryAbove(max) if cost > max => return Err(BatchError::OutOfMemory),
            Fault::Panic => panic!("fault asked for"),
            Fault::None | Fault::OutOfMemoryAbove(_) => {}
        }
        Ok(items.iter().map(|item| embed(item, width, self.config.dtype)).collect())
    }
}

fn embed(item: &Sized, width: u32, dtype: DType) -> Result<Embedding, ItemError> {
    let bytes = u64::from(item.rows) * u64::from(width);
    let bytes = bytes.saturating_mul(dtype.bytes() as u64);
    if bytes > BYTES_MAX {
        return Err(ItemError::TooLarge { cost: bytes, max: BYTES_MAX });
    }
    let data = fill(item.seed, bytes as usize, dtype);
    Ok(Embedding { rows: item.rows, width, dtype, data, grid_thw: item.grid_thw })
}

/// Numbers of either sign between 0.5 and 1: eight bytes of SplitMix64 (Steele et al. 2014) at once, with the exponents set.
fn fill(seed: u64, bytes: usize, dtype: DType) -> Bytes {
    let (keep, set) = match dtype {
        DType::F32 => (0x807f_ffff_807f_ffff, 0x3f00_0000_3f00_0000),
        DType::F16 => (0x83ff_83ff_83ff_83ff, 0x3800_3800_3800_3800),
        DType::Bf16 => (0x807f_807f_807f_807f, 0x3f00_3f00_3f00_3f00_u64),
    };
    let mut data = Vec::with_capacity(bytes + 8);
    let mut state = seed;
    while data.len() < bytes {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        data.extend_from_slice(&((z ^ (z >> 31)) & keep | set).to_le_bytes());
    }
    data.truncate(bytes);
    Bytes::from(data)
}

#[cfg(test)]
mod tests;
