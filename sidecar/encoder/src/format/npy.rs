//! `.npy` format 1.0, as `numpy.save` writes it. vLLM 0.32 reads it in `image_embeds` parts by its magic, without pickle.

use super::FormatError;
use crate::tensor::DType;

/// Header for a row-major matrix, whose raw elements follow. A multiple of 64 bytes long.
///
/// # Errors
/// For bfloat16, which numpy does not know.
pub fn head(shape: [u32; 2], dtype: DType) -> Result<Vec<u8>, FormatError> {
    let descr = match dtype {
        DType::F32 => "<f4",
        DType::F16 => "<f2",
        DType::Bf16 => return Err(FormatError::NoBf16InNpy),
    };
    let [rows, width] = shape;
    let dict = format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': ({rows}, {width}), }}");
    const FIXED: usize = 10;
    let total = (FIXED + dict.len() + 1).next_multiple_of(64);
    let mut out = Vec::with_capacity(total);
    out.extend_from_slice(b"\x93NUMPY\x01\x00");
    // Ten-digit sides keep the header far below 64 KiB.
    out.extend_from_slice(&((total - FIXED) as u16).to_le_bytes());
    out.extend_from_slice(dict.as_bytes());
    out.resize(total - 1, b' ');
    out.push(b'\n');
    Ok(out)
}
