//! What an encoder gives for one image, and the checks without which it may not reach an engine.
//!
//! A tensor of the wrong width or row count does not fail one request: it ends the engine (measured on vLLM 0.32.0).
//! **Invariant:** a hand-off takes [`Checked`] alone, and a `Checked` comes out of [`check`] alone.

mod model;

#[cfg(test)]
mod tests;

use std::fmt;

use bytes::Bytes;

pub use model::{EngineTensor, ModelConfigError};

/// Element type, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DType {
    F32,
    F16,
    Bf16,
}

impl DType {
    pub fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }

    /// PyTorch's name without the prefix: as in config.json and in vLLM's messages.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "float32",
            Self::F16 => "float16",
            Self::Bf16 => "bfloat16",
        }
    }

    /// Reads PyTorch's name, with or without the prefix `torch.`.
    pub fn from_name(name: &str) -> Option<Self> {
        match name.strip_prefix("torch.").unwrap_or(name) {
            "float32" => Some(Self::F32),
            "float16" => Some(Self::F16),
            "bfloat16" => Some(Self::Bf16),
            _ => None,
        }
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// `rows` × `width` elements, row-major. Not checked: a hand-off checks before anything reaches an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Embedding {
    pub rows: u32,
    pub width: u32,
    pub dtype: DType,
    pub data: Bytes,
    /// Patches: frames, rows, columns; `None` for encoders without a grid.
    pub grid_thw: Option<[u32; 3]>,
}

/// What the engine's model and the balancer's count ask of one image's embedding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Expect {
    /// Columns: (1 + deepstack levels) × hidden size.
    pub width: u32,
    /// Tokens that the balancer counted for the image; `None` when nobody counted.
    pub rows: Option<u32>,
    /// Patches merged into one row, along each side; with it the grid is required. `None` for models without a grid.
    pub merge: Option<u32>,
    /// The only element type that is taken; `None` where the engine casts.
    pub dtype: Option<DType>,
}

/// Who says how many rows there must be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowsBy {
    Grid,
    Count,
}

impl fmt::Display for RowsBy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Grid => "its grid",
            Self::Count => "the token count of the image",
        })
    }
}

/// Why an embedding may not reach the engine. The encoder is to blame, so the client gets a 5xx, for its request alone.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CheckError {
    #[error(
        "embedding: width is {found}, wanted {wanted} = (1 + deepstack levels) x hidden size of the engine's config.json"
    )]
    Width { found: u32, wanted: u32 },
    #[error("embedding: rows is {found}, wanted {wanted} by {by}")]
    Rows { found: u32, wanted: u64, by: RowsBy },
    #[error("embedding: grid_thw is missing, wanted frames, rows and columns of patches")]
    NoGrid,
    #[error(
        "embedding: grid_thw is {found:?}, wanted three numbers from 1, the last two divisible by the merge size {merge}"
    )]
    Grid { found: [u32; 3], merge: u32 },
    #[error("embedding: dtype is {found}, wanted {wanted}")]
    DType { found: DType, wanted: DType },
    #[error("embedding: data has {found} bytes, wanted {wanted} = rows x width x element size")]
    Length { found: usize, wanted: u64 },
    #[error("embedding: data at row {row}, column {column} is not finite, wanted finite numbers only")]
    NotFinite { row: u32, column: u32 },
}

/// An embedding that the engine survives: shape, grid, type, length and values are right.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checked {
    embedding: Embedding,
    merge: Option<u32>,
}

impl Checked {
    pub fn embedding(&self) -> &Embedding {
        &self.embedding
    }

    /// The patch grid, when it was checked against the rows.
    pub fn grid(&self) -> Option<[u32; 3]> {
        self.merge.and(self.embedding.grid_thw)
    }

    /// Bytes of the rows.
    pub fn bytes(&self) -> usize {
        self.embedding.data.len()
    }

    /// Holds the embedding to other expectations without reading its values again. O(1).
    ///
    /// # Errors
    /// When it was checked for something else.
    pub fn suits(&self, expect: &Expect) -> Result<(), CheckError> {
        check_shape(&self.embedding, expect)
    }
}

/// Checks one embedding: shape first, then every value. O(bytes), no allocation.
///
/// # Errors
/// The first field that is wrong, with what was found and wanted.
pub fn check(embedding: Embedding, expect: &Expect) -> Result<Checked, CheckError> {
    check_shape(&embedding, expect)?;
    if let Some(index) = first_not_finite(&embedding.data, embedding.dtype) {
        let width = embedding.width as usize;
        return Err(CheckError::NotFinite { row: (index / width) as u32, column: (index % width) as u32 });
    }
    Ok(Checked { embedding, merge: expect.merge })
}

fn check_shape(embedding: &Embedding, expect: &Expect) -> Result<(), CheckError> {
    let Embedding { rows, width, dtype, .. } = *embedding;
    if width == 0 || width != expect.width {
        return Err(CheckError::Width { found: width, wanted: expect.width });
    }
    if let Some(wanted) = expect.dtype.filter(|&wanted| wanted != dtype) {
        return Err(CheckError::DType { found: dtype, wanted });
    }
    if let Some(merge) = expect.merge {
        let wanted = rows_of_grid(embedding.grid_thw.ok_or(CheckError::NoGrid)?, merge)?;
        if u64::from(rows) != wanted {
            return Err(CheckError::Rows { found: rows, wanted, by: RowsBy::Grid });
        }
    }
    if let Some(wanted) = expect.rows.filter(|&wanted| wanted != rows) {
        return Err(CheckError::Rows { found: rows, wanted: wanted.into(), by: RowsBy::Count });
    }
    if rows == 0 {
        return Err(CheckError::Rows { found: 0, wanted: 1, by: RowsBy::Count });
    }
    let wanted = u64::from(rows) * u64::from(width);
    let wanted = wanted.saturating_mul(dtype.bytes() as u64);
    if embedding.data.len() as u64 != wanted {
        return Err(CheckError::Length { found: embedding.data.len(), wanted });
    }
    Ok(())
}

/// Rows that a patch grid becomes: t·h·w / merge².
///
/// # Errors
/// When a number of the grid is 0, or its height or width is not divisible by `merge`.
pub fn rows_of_grid(grid: [u32; 3], merge: u32) -> Result<u64, CheckError> {
    let [frames, rows, columns] = grid;
    if merge == 0 || grid.contains(&0) || !rows.is_multiple_of(merge) || !columns.is_multiple_of(merge) {
        return Err(CheckError::Grid { found: grid, merge });
    }
    let frame = u64::from(rows / merge) * u64::from(columns / merge);
    frame.checked_mul(frames.into()).ok_or(CheckError::Grid { found: grid, merge })
}

/// Elements looked at before a decision: long enough for full vector registers, short enough to stop early.
const STRIDE: usize = 2048;

/// Index of the first element that is infinite or not a number: all its exponent bits are set.
fn first_not_finite(data: &[u8], dtype: DType) -> Option<usize> {
    match dtype {
        DType::F32 => {
            first_where(data.as_chunks::<4>().0, |bytes| u32::from_le_bytes(bytes) & 0x7f80_0000 == 0x7f80_0000)
        }
        DType::F16 => first_where(data.as_chunks::<2>().0, |bytes| u16::from_le_bytes(bytes) & 0x7c00 == 0x7c00),
        DType::Bf16 => first_where(data.as_chunks::<2>().0, |bytes| u16::from_le_bytes(bytes) & 0x7f80 == 0x7f80),
    }
}

/// The inner fold has no branch, so that the compiler makes vector code of it.
fn first_where<const N: usize>(elements: &[[u8; N]], bad: impl Fn([u8; N]) -> bool) -> Option<usize> {
    let stride = elements.chunks(STRIDE).position(|chunk| chunk.iter().fold(false, |any, &bytes| any | bad(bytes)))?;
    let start = stride * STRIDE;
    elements[start..].iter().position(|&bytes| bad(bytes)).map(|at| start + at)
}
