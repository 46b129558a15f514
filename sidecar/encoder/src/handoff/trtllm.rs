//! TensorRT-LLM's content part `image_embeds`: `{"data": base64 of a torch tensor}` (read in its sources, `serve/chat_utils.py`; not run).
//! It takes no identity: the engine keys the image by a digest of its own, which the closed loop learns.

use bytes::Bytes;

use super::flags::Requirement;
use super::{EncodedImage, HandOff, HandOffError, Lease, push_base64};
use crate::format::{base64, torch};
use crate::tensor::{EngineTensor, Expect};

/// Rows as a torch archive, whatever their type.
#[derive(Clone, Debug)]
pub struct TrtImageEmbeds {
    model: EngineTensor,
}

impl TrtImageEmbeds {
    pub fn new(model: EngineTensor) -> Self {
        Self { model }
    }
}

impl HandOff for TrtImageEmbeds {
    fn name(&self) -> &'static str {
        "trtllm-image-embeds"
    }

    fn expect(&self, rows: Option<u32>) -> Expect {
        self.model.expect(rows)
    }

    fn requirements(&self) -> Vec<Requirement> {
        Vec::new()
    }

    fn part(&self, image: &EncodedImage) -> Result<(Bytes, Lease), HandOffError> {
        image.embedding.suits(&self.expect(None))?;
        let tensor = image.embedding.embedding();
        let archive = torch::archive([tensor.rows, tensor.width], tensor.dtype, &tensor.data)?;
        let length = archive.head.len() + tensor.data.len() + archive.tail.len();
        let mut out = Vec::with_capacity(64 + base64::encoded_length(length));
        out.extend_from_slice(br#"{"type":"image_embeds","image_embeds":{"data":"#);
        push_base64(&mut out, &[&archive.head, &tensor.data, &archive.tail]);
        out.extend_from_slice(b"}}");
        Ok((out.into(), Lease::none()))
    }
}
