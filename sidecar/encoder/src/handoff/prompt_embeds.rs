//! vLLM's content part `prompt_embeds` (`--enable-prompt-embeds`; measured on 0.32.0): rows in place of text tokens, for text models.
//!
//! Every full block of such a request, text blocks too, gets the extra key sha256(rows of the block), in which positions of text
//! count as rows of zeros; its events show token 0 at the positions of rows. So the blocks of equal prompts match only when the rows are
//! equal to the bit: the embedding cache sees to that.
//! A model with deepstack ends when one request has such a part and an image, so it is refused at start.

use bytes::Bytes;
use sha2::{Digest, Sha256};

use super::flags::{Probe, Requirement};
use super::{EncodedImage, HandOff, HandOffError, Lease, push_base64};
use crate::format::{base64, torch};
use crate::tensor::{DType, Embedding, EngineTensor, Expect};

#[derive(Clone, Debug)]
pub struct PromptEmbeds {
    model: EngineTensor,
}

impl PromptEmbeds {
    pub fn new(model: EngineTensor) -> Self {
        Self { model }
    }
}

impl HandOff for PromptEmbeds {
    fn name(&self) -> &'static str {
        "vllm-prompt-embeds"
    }

    fn expect(&self, rows: Option<u32>) -> Expect {
        // The engine casts, but then the rows that it hashes are not those that we have.
        Expect { width: self.model.hidden, rows, merge: None, dtype: self.model.dtype }
    }

    fn requirements(&self) -> Vec<Requirement> {
        vec![Requirement {
            flag: "--enable-prompt-embeds",
            value: None,
            fields: Vec::new(),
            without: "it answers 400 to every image",
            probe: Some(Probe {
                path: "/v1/chat/completions",
                body: r#"{"model":"MODEL","max_tokens":1,"messages":[{"role":"user","content":[{"type":"prompt_embeds","data":"!"}]}]}"#,
                missing_when: "--enable-prompt-embeds",
            }),
        }]
    }

    fn part(&self, image: &EncodedImage) -> Result<(Bytes, Lease), HandOffError> {
        image.embedding.suits(&self.expect(None))?;
        let tensor = image.embedding.embedding();
        let archive = torch::archive([tensor.rows, tensor.width], tensor.dtype, &tensor.data)?;
        let length = archive.head.len() + tensor.data.len() + archive.tail.len();
        let mut out = Vec::with_capacity(48 + base64::encoded_length(length));
        out.extend_from_slice(br#"{"type":"prompt_embeds","data":"#);
        push_base64(&mut out, &[&archive.head, &tensor.data, &archive.tail]);
        out.push(b'}');
        Ok((out.into(), Lease::none()))
    }
}

/// Rows that stand in a prompt from position `start` on.
#[derive(Clone, Copy, Debug)]
pub struct Placed<'a> {
    pub start: u32,
    pub rows: &'a Embedding,
}

/// Extra keys that vLLM 0.32 gives the full blocks of a prompt of `prompt_tokens` positions with these rows, in order.
///
/// `placed` in order of `start`, without overlap, all of one `width` and `dtype`, which are the model's. `None` when they are not, or
/// reach beyond the prompt: then no key is known.
pub fn block_keys(
    placed: &[Placed<'_>],
    width: u32,
    dtype: DType,
    block_tokens: u32,
    prompt_tokens: u32,
) -> Option<Vec<[u8; 32]>> {
    let row_bytes = (width as usize).checked_mul(dtype.bytes()).filter(|&bytes| bytes > 0)?;
    let blocks = prompt_tokens.checked_div(block_tokens)?;
    let mut end = 0_u32;
    for item in placed {
        let fits = item.rows.width == width && item.rows.dtype == dtype && item.start >= end;
        end = item.start.checked_add(item.rows.rows).filter(|&end| fits && end <= prompt_tokens)?;
        if item.rows.data.len() != (item.rows.rows as usize).checked_mul(row_bytes)? {
            return None;
        }
    }
    let zeros = vec![0_u8; row_bytes];
    let hash_zeros = |hasher: &mut Sha256, rows: u32| (0..rows).for_each(|_| hasher.update(&zeros));
    // The key of a block of text alone is a constant of the model.
    let mut text_key = None;
    let mut keys = Vec::new();
    for block in 0..blocks {
        let (start, stop) = (block * block_tokens, (block + 1) * block_tokens);
        let first = placed.partition_point(|item| item.start + item.rows.rows <= start);
        let inside = placed[first..].iter().take_while(|item| item.start < stop);
        let (mut hasher, mut at) = (Sha256::new(), start);
        for item in inside {
            hash_zeros(&mut hasher, item.start.saturating_sub(at));
            at = at.max(item.start);
            let (from, to) = (at - item.start, (stop - item.start).min(item.rows.rows));
            hasher.update(&item.rows.data[from as usize * row_bytes..to as usize * row_bytes]);
            at = item.start + to;
        }
        keys.push(match (at == start, text_key) {
            (true, Some(key)) => key,
            (only_text, _) => {
                hash_zeros(&mut hasher, stop - at);
                let key = hasher.finalize().into();
                if only_text {
                    text_key = Some(key);
                }
                key
            }
        });
    }
    Some(keys)
}
