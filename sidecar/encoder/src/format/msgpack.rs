//! One `kwargs_data` entry of vLLM's `/inference/v1/generate`, before base64 (decoded by vLLM 0.32.0's own decoder).

use rmp::encode::{
    ValueWriteError, write_array_len, write_bool, write_ext_meta, write_map_len, write_nil, write_str, write_uint,
};

use super::FormatError;
use crate::tensor::DType;

/// Extension type of raw bytes inline; an integer in its place would name a second buffer, which HTTP has not.
const RAW: i8 = 3;

/// The entry for one image: its rows and its grid.
///
/// # Errors
/// When the rows need more than 4 GiB.
pub fn image_item(shape: [u32; 2], dtype: DType, data: &[u8], grid: [u32; 3]) -> Result<Vec<u8>, FormatError> {
    let max = u32::MAX as usize;
    let length = u32::try_from(data.len());
    let length = length.map_err(|_| FormatError::TooLarge { format: "msgpack", bytes: data.len(), max })?;
    let mut out = Vec::with_capacity(data.len() + 256);
    // Writing to memory does not fail.
    let written = write(&mut out, shape, dtype, data, length, grid);
    debug_assert!(written.is_ok(), "a buffer in memory takes all");
    Ok(out)
}

type Written = Result<(), ValueWriteError>;

fn write(out: &mut Vec<u8>, shape: [u32; 2], dtype: DType, data: &[u8], length: u32, grid: [u32; 3]) -> Written {
    write_map_len(out, 2)?;
    write_str(out, "image_embeds")?;
    field(out, dtype.name(), &shape, length)?;
    out.extend_from_slice(data);
    flat(out, shape[0])?;
    write_str(out, "image_grid_thw")?;
    field(out, "int64", &[3], 24)?;
    grid.iter().for_each(|&side| out.extend_from_slice(&i64::from(side).to_le_bytes()));
    write_str(out, "field")?;
    write_array_len(out, 2)?;
    write_str(out, "batched")?;
    write_map_len(out, 1)?;
    write_str(out, "keep_on_cpu")?;
    write_bool(out, true).map_err(ValueWriteError::InvalidMarkerWrite)
}

/// `{"data": [dtype, shape, raw` …, up to the raw bytes.
fn field(out: &mut Vec<u8>, dtype: &str, shape: &[u32], bytes: u32) -> Written {
    write_map_len(out, 2)?;
    write_str(out, "data")?;
    write_array_len(out, 3)?;
    write_str(out, dtype)?;
    write_array_len(out, shape.len() as u32)?;
    for &side in shape {
        write_uint(out, side.into())?;
    }
    write_ext_meta(out, bytes, RAW).map(drop)
}

/// All rows belong to the one image: `slices` has one entry, rows 0 to the last.
fn flat(out: &mut Vec<u8>, rows: u32) -> Written {
    write_str(out, "field")?;
    write_array_len(out, 2)?;
    write_str(out, "flat")?;
    write_map_len(out, 3)?;
    write_str(out, "keep_on_cpu")?;
    write_bool(out, false).map_err(ValueWriteError::InvalidMarkerWrite)?;
    write_str(out, "slices")?;
    for _ in 0..2 {
        write_array_len(out, 1)?;
    }
    write_array_len(out, 3)?;
    write_uint(out, 0)?;
    write_uint(out, rows.into())?;
    write_nil(out).map_err(ValueWriteError::InvalidMarkerWrite)?;
    write_str(out, "dim")?;
    write_uint(out, 0).map(drop)
}
