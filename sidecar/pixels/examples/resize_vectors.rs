//! Resizes every case of a folder as the engines' processors would and says how far off the worst byte is.
//!
//! `resize_vectors DIR` → `resize_max_steps K pixel_values_max X cases N ok BOOL` on one line. DIR holds `cases.json` and its pictures, as
//! `tests/vectors/encoder/README.md` describes them.

use std::path::Path;

use fovea_media::family::ModelFiles;
use fovea_pixels::decode::{Limits, Options, decode};
use fovea_pixels::processor::Processor;
use fovea_pixels::resize::resize;
use serde_json::{Value, json};

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let folder = std::env::args().nth(1).ok_or("usage: resize_vectors DIR")?;
    let folder = Path::new(&folder);
    let cases: Value = serde_json::from_slice(&std::fs::read(folder.join("cases.json"))?)?;
    let (mut steps, mut values, mut count) = (0_u8, 0.0_f32, 0);
    for case in cases["cases"].as_array().ok_or("cases.json has no cases")? {
        let (case_steps, case_values) = run(folder, case)?;
        (steps, values, count) = (steps.max(case_steps), values.max(case_values), count + 1);
    }
    println!("resize_max_steps {steps} pixel_values_max {values} cases {count} ok {}", steps == 0 && values <= 1e-6);
    Ok(())
}

fn run(folder: &Path, case: &Value) -> Result<(u8, f32), Failure> {
    let name = case["name"].as_str().ok_or("a case has no name")?;
    let picture = |which: &str| -> Result<_, Failure> {
        let file = std::fs::read(folder.join(format!("{name}.{which}.png")))?;
        Ok(decode(&file, &Limits::default(), &Options::default())?)
    };
    let (image, wanted) = (picture("in")?, picture("out")?);
    let config = json!({"model_type": "qwen3_vl"});
    let preprocessor = json!({"size": {"shortest_edge": case["shortest"], "longest_edge": case["longest"]}, "patch_size": 16,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]});
    let files = ModelFiles { config: &config, preprocessor: Some(&preprocessor), processor: None, kwargs: None };
    let processor = Processor::from_files(&files)?;
    let plan = processor.plan(image.width(), image.height())?;
    if (plan.width, plan.height) != (wanted.width(), wanted.height()) || case["tokens"] != plan.tokens {
        return Err(format!("{name}: planned {plan:?}").into());
    }
    let resized = resize(&image, plan.width, plan.height)?;
    let steps = resized.data().iter().zip(wanted.data()).map(|(a, b)| a.abs_diff(*b)).max().unwrap_or(0);
    let Ok(npy) = std::fs::read(folder.join(format!("{name}.pixel_values.npy"))) else { return Ok((steps, 0.0)) };
    let head = 10 + usize::from(u16::from_le_bytes([npy[8], npy[9]]));
    let wanted = npy[head..].as_chunks::<4>().0.iter().map(|&bytes| f32::from_le_bytes(bytes));
    let patches = processor.process(&image)?;
    if patches.values.len() * 4 != npy.len() - head {
        return Err(format!("{name}: {} pixel values", patches.values.len()).into());
    }
    Ok((steps, patches.values.iter().zip(wanted).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)))
}
