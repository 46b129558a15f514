//! Writes every format of a folder's golden files anew and counts those that are equal byte for byte.
//!
//! `format_vectors DIR` → `formats_equal N formats M ok BOOL` on one line; names of files that differ go to stderr. DIR holds the files that
//! `tests/vectors/encoder/README.md` describes.

use std::path::Path;

use fovea_encoder::format::pickle::{self, Modality, Outcome, Part};
use fovea_encoder::format::{msgpack, npy, safetensors, torch};
use fovea_encoder::tensor::DType;

type Failure = Box<dyn std::error::Error>;

const SHAPE: [u32; 2] = [6, 8];
const GRID: [u32; 3] = [1, 4, 6];

fn archive(dtype: DType, data: &[u8]) -> Result<Vec<u8>, Failure> {
    let torch::Archive { head, tail } = torch::archive(SHAPE, dtype, data)?;
    Ok([&head, data, &tail].concat())
}

/// Payload of an archive's or array's end, so that values come from the golden files and not from our own conversions.
fn payload<'a>(file: &'a [u8], dtype: DType, name: &str) -> Result<&'a [u8], Failure> {
    let length = SHAPE.iter().product::<u32>() as usize * dtype.bytes();
    let start = match name.ends_with(".npy") {
        true => file.len() - length,
        false => file.windows(14).position(|window| window == b"archive/data/0").ok_or("no data in the archive")? + 14,
    };
    file.get(start..start + length).ok_or_else(|| format!("{name} is short").into())
}

fn written(folder: &Path) -> Result<Vec<(&'static str, Vec<u8>)>, Failure> {
    let read = |name: &str| std::fs::read(folder.join(name));
    let raw = read("embeds_6x8_bf16.raw")?;
    let part = Part { req_id: "req-1", num_parts: 1, part_idx: 0, modality: Modality::Image };
    let embedding = Outcome::Embedding { grid: &[GRID], shape: SHAPE, dtype: DType::Bf16 };
    let failed = Outcome::Failed { message: "bad image", code: 400 };
    let mut all = vec![
        ("embeds_6x8_bf16.pt", archive(DType::Bf16, &raw)?),
        ("grid_thw.pt", torch::int64(&GRID.map(i64::from))?),
        ("encoder_cache.safetensors", [safetensors::ec_head(SHAPE, DType::Bf16), raw.clone()].concat()),
        ("mm_kwargs_item.msgpack", msgpack::image_item(SHAPE, DType::Bf16, &raw, GRID)?),
        ("sglang_embedding_data.pkl", pickle::embedding_data(part, embedding)),
        ("sglang_embedding_error.pkl", pickle::embedding_data(part, failed)),
    ];
    for (name, dtype) in [("embeds_6x8_f16.pt", DType::F16), ("embeds_6x8_f32.pt", DType::F32)] {
        let golden = read(name)?;
        all.push((name, archive(dtype, payload(&golden, dtype, name)?)?));
    }
    let name = "embeds_6x8_f16.npy";
    let golden = read(name)?;
    all.push((name, [&npy::head(SHAPE, DType::F16)?, payload(&golden, DType::F16, name)?].concat()));
    Ok(all)
}

fn main() -> Result<(), Failure> {
    let folder = std::env::args().nth(1).ok_or("usage: format_vectors DIR")?;
    let folder = Path::new(&folder);
    let (mut equal, all) = (0, written(folder)?);
    for (name, bytes) in &all {
        if std::fs::read(folder.join(name))? == *bytes {
            equal += 1;
        } else {
            eprintln!("{name} differs");
        }
    }
    println!("formats_equal {equal} formats {} ok {}", all.len(), equal == all.len());
    Ok(())
}
