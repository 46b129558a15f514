//! What handing an image's rows to an engine costs a sidecar, by hand-off and size, on one thread. `tests/bench.sh encoder` builds and
//! starts this.
//!
//! Rows are 8192 wide in bfloat16 (a model of hidden size 2048 with three deepstack levels), so 256, 1024 and 4096 tokens are 4, 16 and
//! 64 MiB. Each figure is the median of seven rounds; a round repeats the step until it has lasted 40 ms.

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::Context;
use fovea_encoder::format::pickle::{Modality, Part};
use fovea_encoder::handoff::ec_shm::{EcShm, EcStore, EngineState, Settings};
use fovea_encoder::handoff::image_embeds::ImageEmbeds;
use fovea_encoder::handoff::prompt_embeds::PromptEmbeds;
use fovea_encoder::handoff::sglang_epd::{Frames, SglangEpd};
use fovea_encoder::handoff::trtllm::TrtImageEmbeds;
use fovea_encoder::handoff::{EncodedImage, HandOff};
use fovea_encoder::tensor::{DType, Embedding, EngineTensor, check};
use fovea_kv::MediaId;
use serde_json::{Value, json};

const TOKENS: [u32; 3] = [256, 1024, 4096];
const WIDTH: u32 = 8192;
const ROUNDS: usize = 7;
const ROUND: Duration = Duration::from_millis(40);

fn main() -> anyhow::Result<()> {
    let rows: Vec<Value> = TOKENS.into_iter().map(measure).collect::<anyhow::Result<_>>()?;
    println!("{}", json!({"width": WIDTH, "dtype": "bfloat16", "sizes": rows}));
    Ok(())
}

/// All steps for one image of so many tokens.
fn measure(tokens: u32) -> anyhow::Result<Value> {
    let vision = EngineTensor {
        model_type: "qwen3_vl".to_owned(),
        hidden: WIDTH / 4,
        levels: 3,
        merge: Some(2),
        vision: true,
        dtype: Some(DType::Bf16),
    };
    let text = EngineTensor { hidden: WIDTH, levels: 0, merge: None, ..vision.clone() };
    let side = tokens.isqrt() * 2;
    // Every value is finite: the exponent never has all its bits set.
    let data: Vec<u8> = (0..tokens as usize * WIDTH as usize * 2).map(|at| (at % 0x3f) as u8).collect();
    let embedding = Embedding {
        rows: tokens,
        width: WIDTH,
        dtype: DType::Bf16,
        data: data.into(),
        grid_thw: Some([1, side, side]),
    };
    let expect = vision.expect(Some(tokens));
    let checked = Arc::new(check(embedding.clone(), &expect)?);
    let check_us = microseconds(|_| black_box(check(embedding.clone(), &expect).is_ok()));
    let image = |number: u64| {
        let mut id = [0; 32];
        id[..8].copy_from_slice(&number.to_le_bytes());
        EncodedImage { id: MediaId(id), embedding: Arc::clone(&checked) }
    };
    let shared = tempfile::tempdir_in("/dev/shm").context("a folder in /dev/shm")?;
    // Room for two files, so that each write gives up an older one.
    let settings = Settings {
        folder: shared.path().join("ec"),
        bytes_max: embedding.data.len() as u64 * 5 / 2,
        ..Default::default()
    };
    let ec = EcShm::new(vision.clone(), EcStore::open(settings, EngineState::Quiet)?);
    let file_bytes = embedding.data.len();
    let adapters: [(&dyn HandOff, usize); 5] = [
        (&ec, file_bytes),
        (&ImageEmbeds::new(vision.clone()), 0),
        (&PromptEmbeds::new(text), 0),
        (&TrtImageEmbeds::new(vision.clone()), 0),
        (&SglangEpd::new(vision), 0),
    ];
    let mut table = serde_json::Map::new();
    for (hand_off, written) in adapters {
        let request_bytes = hand_off.part(&image(0))?.0.len();
        let us = microseconds(|number| black_box(hand_off.part(&image(number)).is_ok()));
        let row = json!({"cpu_us": us, "request_bytes": request_bytes, "bytes_copied": request_bytes + written});
        table.insert(hand_off.name().to_owned(), row);
    }
    let (part, held) = ec.part(&image(1))?;
    let reuse_us = microseconds(|_| black_box(ec.part(&image(1)).is_ok()));
    drop(held);
    table.insert(
        "vllm-ec-shm, file there".to_owned(),
        json!({"cpu_us": reuse_us, "request_bytes": part.len(), "bytes_copied": part.len()}),
    );
    let epd = Part { req_id: "r_local_part_0", num_parts: 1, part_idx: 0, modality: Modality::Image };
    let images = [Arc::clone(&checked)];
    let frames_us = microseconds(|_| black_box(Frames::of_images(epd, &images).is_ok()));
    table.insert("sglang-epd, frames".to_owned(), json!({"cpu_us": frames_us}));
    Ok(json!({"tokens": tokens, "row_bytes": file_bytes, "check_cpu_us": check_us, "hand_offs": table}))
}

/// Median over the rounds, in microseconds of this thread's CPU time. `step` gets a number that it has not seen, and says whether it worked.
fn microseconds(mut step: impl FnMut(u64) -> bool) -> f64 {
    let mut number = 1;
    let mut rounds: Vec<f64> = (0..ROUNDS)
        .map(|_| {
            let (began, cpu, mut steps) = (Instant::now(), cpu_ns(), 0_u32);
            while steps == 0 || began.elapsed() < ROUND {
                number += 1;
                steps += 1;
                assert!(step(number), "a step failed");
            }
            (cpu_ns() - cpu) as f64 / 1e3 / f64::from(steps)
        })
        .collect();
    rounds.sort_by(f64::total_cmp);
    (rounds[ROUNDS / 2] * 10.0).round() / 10.0
}

/// Nanoseconds that this thread has run; of the wall clock where the kernel does not say.
fn cpu_ns() -> u64 {
    let said = std::fs::read_to_string("/proc/thread-self/schedstat").ok();
    let running = said.and_then(|text| text.split_whitespace().next()?.parse().ok());
    static START: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
    running.unwrap_or_else(|| START.elapsed().as_nanos() as u64)
}
