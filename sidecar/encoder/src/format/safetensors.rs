//! The file of vLLM's `ECExampleConnector`: safetensors with one tensor named `ec_cache` (read in vLLM 0.32's source).

use crate::tensor::DType;

/// Header for a row-major matrix, whose raw elements follow. A multiple of 8 bytes long, so that the elements are aligned.
pub fn ec_head(shape: [u32; 2], dtype: DType) -> Vec<u8> {
    let name = match dtype {
        DType::F32 => "F32",
        DType::F16 => "F16",
        DType::Bf16 => "BF16",
    };
    let [rows, width] = shape;
    let end = u64::from(rows) * u64::from(width) * dtype.bytes() as u64;
    let mut json = format!(r#"{{"ec_cache":{{"dtype":"{name}","shape":[{rows},{width}],"data_offsets":[0,{end}]}}}}"#);
    while json.len() % 8 != 0 {
        json.push(' ');
    }
    let mut out = Vec::with_capacity(8 + json.len());
    out.extend_from_slice(&(json.len() as u64).to_le_bytes());
    out.extend_from_slice(json.as_bytes());
    out
}
