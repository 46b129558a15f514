//! With PyTorch: set `FOVEA_TORCH_PYTHON` to a python that has torch, numpy and transformers, and `FOVEA_TINY_VLM` to a folder with a
//! Qwen3-VL checkpoint. `FOVEA_ENCODER_CLASS` and `FOVEA_ENCODER_PATH` name another class to feed.

use std::env::var;
use std::fs;

use super::*;

const TYPES: &str = r#"
import numpy, torch
from dynamo.vllm.multimodal_utils.custom_encoder import VisionEncoderBackend

MADE = {
    b"bf16": lambda: torch.tensor([[1.0, -2.0], [3.0, 0.5]], dtype=torch.bfloat16),
    b"f16": lambda: torch.tensor([[1.0, -2.0], [3.0, 0.5]], dtype=torch.float16, requires_grad=True),
    b"turned": lambda: torch.tensor([[1.0, 3.0], [-2.0, 0.5]]).T,
    b"numpy": lambda: numpy.array([[1.0, -2.0], [3.0, 0.5]], dtype=numpy.float32),
    b"numpy turned": lambda: numpy.array([[1.0, 3.0], [-2.0, 0.5]], dtype=numpy.float16).T,
    b"numpy half": lambda: numpy.array([[1.0, -2.0], [3.0, 0.5]], dtype=numpy.float16),
    b"double": lambda: torch.zeros(2, 2, dtype=torch.float64),
    b"numpy double": lambda: numpy.zeros((2, 2)),
    b"cube": lambda: torch.zeros(1, 2, 2),
}

class Types(VisionEncoderBackend):
    raw_input = "bytes"
    def build(self, model_id):
        pass
    def forward_batch(self, items, target_bucket=None):
        if items == [b"no memory"]:
            raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate")
        return [MADE[item]() for item in items]
"#;

fn torch_python() -> Option<String> {
    let python = var("FOVEA_TORCH_PYTHON").ok();
    if python.is_none() {
        println!("skipped: FOVEA_TORCH_PYTHON is not set");
    }
    python
}

#[tokio::test]
async fn tensors_and_arrays_of_every_type_arrive_whole() {
    let Some(python) = torch_python() else { return };
    let rig = rig("types_of:Types", |config| {
        fs::write(config.python_path[0].join("types_of.py"), TYPES).expect("written");
        config.interpreter = python.into();
    });
    let rig = rig.await;
    let numbers: [u16; 4] = [0x3f80, 0xc000, 0x4040, 0x3f00];
    let halves: [u16; 4] = [0x3c00, 0xc000, 0x4200, 0x3800];
    let bytes = |numbers: [u16; 4]| numbers.iter().flat_map(|n| n.to_le_bytes()).collect::<Vec<_>>();
    let floats: Vec<u8> = [1.0_f32, -2.0, 3.0, 0.5].iter().flat_map(|n| n.to_le_bytes()).collect();
    let rows: [(&'static [u8], DType, Vec<u8>); 6] = [
        (b"bf16", DType::Bf16, bytes(numbers)),
        (b"f16", DType::F16, bytes(halves)),
        (b"turned", DType::F32, floats.clone()),
        (b"numpy", DType::F32, floats),
        (b"numpy half", DType::F16, bytes(halves)),
        (b"numpy turned", DType::F16, bytes(halves)),
    ];
    for (item, dtype, data) in rows {
        let found = rig.encode(&[item]).await.expect("encoded").remove(0);
        assert_eq!((found.rows, found.width, found.dtype, &found.data[..]), (2, 2, dtype, &data[..]));
    }
    for item in [b"double".as_slice(), b"numpy double", b"cube"] {
        assert_eq!(rig.encode(&[item]).await.expect_err("refused").status(), 500);
    }
    assert_eq!(rig.encode(&[b"no memory"]).await.expect_err("too little").status(), 503);
    assert_eq!(rig.encoder.stats().restarts, 0);
}

#[tokio::test]
async fn a_vision_tower_runs_unchanged() {
    let (Some(python), Ok(model)) = (torch_python(), var("FOVEA_TINY_VLM")) else { return };
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let class = var("FOVEA_ENCODER_CLASS").unwrap_or_else(|_| "qwen3_vl:Qwen3VLEncoder".into());
    let path = var("FOVEA_ENCODER_PATH").unwrap_or_else(|_| format!("{root}/deploy/examples/encoder"));
    let mut config = PythonConfig::new(class, model);
    config.interpreter = python.into();
    config.python_path = vec![path.into()];
    let encoder = Encoder::start(ServiceConfig::default(), || PythonEncoder::build(config)).await.expect("started");
    let picture = |name: &str| {
        let bytes = fs::read(format!("{root}/tests/vectors/encoder/resize/{name}.in.png")).expect("a vector");
        RawImage { bytes: bytes.into(), mime: None, id: MediaId([0; 32]), index: 0 }
    };
    let names = ["shapes_qwen3vl", "noise_up", "height_only"];
    let rows = encoder.encode(names.map(picture).into()).await.expect("encoded");
    for embedding in rows {
        println!("{} x {} {} {:?}", embedding.rows, embedding.width, embedding.dtype, embedding.grid_thw);
        let width = encoder.spec().width.unwrap_or(embedding.width);
        check(embedding, &Expect { width, rows: None, merge: Some(2), dtype: encoder.spec().dtype })
            .expect("an engine survives it");
    }
    let broken = RawImage { bytes: Bytes::from_static(b"\x89PNG torn"), ..picture(names[0]) };
    let status = encoder.encode(vec![broken]).await.expect_err("no image").status();
    assert!(matches!(status, 400 | 500), "{status}");
    encoder.close().await;
}
