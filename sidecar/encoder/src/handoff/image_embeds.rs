//! vLLM's content part `image_embeds`, the rows inside it (`--enable-mm-embeds`; measured on 0.32.0). Works over any distance, at
//! 4/3 of the rows' bytes in the request.

use bytes::Bytes;

use super::flags::{Probe, Requirement};
use super::{EncodedImage, HandOff, HandOffError, Lease, part_head, push_base64};
use crate::format::{base64, npy, torch};
use crate::tensor::{DType, EngineTensor, Expect};

/// Rows of bfloat16 go as a torch archive, others as `.npy`.
#[derive(Clone, Debug)]
pub struct ImageEmbeds {
    model: EngineTensor,
}

impl ImageEmbeds {
    pub fn new(model: EngineTensor) -> Self {
        Self { model }
    }
}

pub(super) fn mm_embeds() -> Requirement {
    Requirement {
        flag: "--enable-mm-embeds",
        value: None,
        fields: Vec::new(),
        without: "it answers 400 to every image",
        probe: Some(Probe {
            path: "/v1/chat/completions",
            body: r#"{"model":"MODEL","max_tokens":1,"messages":[{"role":"user","content":[{"type":"image_embeds","image_embeds":{"image_embeds":"!"}}]}]}"#,
            missing_when: "--enable-mm-embeds",
        }),
    }
}

impl HandOff for ImageEmbeds {
    fn name(&self) -> &'static str {
        "vllm-image-embeds"
    }

    fn expect(&self, rows: Option<u32>) -> Expect {
        self.model.expect(rows)
    }

    fn requirements(&self) -> Vec<Requirement> {
        vec![mm_embeds()]
    }

    fn part(&self, image: &EncodedImage) -> Result<(Bytes, Lease), HandOffError> {
        image.embedding.suits(&self.expect(None))?;
        let tensor = image.embedding.embedding();
        let shape = [tensor.rows, tensor.width];
        let (head, tail) = match tensor.dtype {
            DType::Bf16 => {
                let archive = torch::archive(shape, tensor.dtype, &tensor.data)?;
                (archive.head, archive.tail)
            }
            DType::F16 | DType::F32 => (npy::head(shape, tensor.dtype)?, Vec::new()),
        };
        let mut out = part_head(&image.id, base64::encoded_length(head.len() + tensor.data.len() + tail.len()));
        let pieces: [&[u8]; 3] = [&head, &tensor.data, &tail];
        match image.embedding.grid() {
            // Families with grids take a dictionary, all others the bare tensor.
            Some([t, h, w]) => {
                out.extend_from_slice(br#"{"image_embeds":"#);
                push_base64(&mut out, &pieces);
                out.extend_from_slice(format!(r#","image_grid_thw":[{t},{h},{w}]}}"#).as_bytes());
            }
            None => push_base64(&mut out, &pieces),
        }
        out.push(b'}');
        Ok((out.into(), Lease::none()))
    }
}
