//! Reading the rows that a worker left in a file.

use std::fs::{self, OpenOptions};
use std::io::Read;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use bytes::Bytes;
use rustix::fs::OFlags;
use serde::Deserialize;
use serde_json::Value;

use crate::tensor::{DType, Embedding};

/// Largest embedding taken, in bytes.
const BYTES_MAX: u64 = 1 << 30;

/// Files of one batch; removed with it.
#[derive(Default)]
pub struct Files {
    pub paths: Vec<PathBuf>,
}

impl Drop for Files {
    fn drop(&mut self) {
        // A file that was never written is not there.
        self.paths.iter().for_each(|path| _ = fs::remove_file(path));
    }
}

#[derive(Deserialize)]
struct Shape {
    rows: u32,
    width: u32,
    dtype: String,
    grid_thw: Option<[u32; 3]>,
}

/// One result: its shape as told, its rows from the file, whose length must be what the shape says.
pub fn read(path: &Path, result: &Value) -> Result<Embedding, String> {
    let shape = Shape::deserialize(result).map_err(|error| format!("result: {error}"))?;
    let Shape { rows, width, grid_thw, .. } = shape;
    let dtype = DType::from_name(&shape.dtype).ok_or_else(|| format!("result: dtype is {}", shape.dtype))?;
    let wanted = (u64::from(rows) * u64::from(width)).saturating_mul(dtype.bytes() as u64);
    if wanted > BYTES_MAX {
        return Err(format!("result: {wanted} bytes of rows, more than {BYTES_MAX}"));
    }
    let told = |error: std::io::Error| format!("result's file: {error}");
    // Neither a link nor a pipe: opening must not lead elsewhere nor block.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits().cast_signed();
    let file = OpenOptions::new().read(true).custom_flags(flags).open(path).map_err(told)?;
    let metadata = file.metadata().map_err(told)?;
    if !metadata.is_file() || metadata.len() != wanted {
        return Err(format!("result's file has {} bytes, wanted {wanted}", metadata.len()));
    }
    let mut data = Vec::with_capacity(wanted as usize);
    file.take(wanted).read_to_end(&mut data).map_err(told)?;
    Ok(Embedding { rows, width, dtype, data: Bytes::from(data), grid_thw })
}
