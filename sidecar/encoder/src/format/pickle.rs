//! The few opcodes of pickle protocol 2 that PyTorch's and SGLang's readers allow, and SGLang's record for an embedding.

use crate::tensor::DType;

pub const MARK: u8 = b'(';
pub const TUPLE: u8 = b't';
pub const TUPLE1: u8 = 0x85;
pub const EMPTY_TUPLE: u8 = b')';
pub const EMPTY_LIST: u8 = b']';
pub const EMPTY_DICT: u8 = b'}';
pub const APPENDS: u8 = b'e';
pub const SETITEMS: u8 = b'u';
pub const NEWOBJ: u8 = 0x81;
pub const BUILD: u8 = b'b';
pub const REDUCE: u8 = b'R';
pub const NONE: u8 = b'N';
pub const NEWFALSE: u8 = 0x89;
pub const BINPERSID: u8 = b'Q';

/// Opcodes, one after another.
#[derive(Debug)]
pub struct Pickle(Vec<u8>);

impl Pickle {
    #[expect(clippy::new_without_default, reason = "an empty pickle already has a header, which a default would hide")]
    pub fn new() -> Self {
        let mut bytes = Vec::with_capacity(384);
        bytes.extend_from_slice(&[0x80, 2]);
        Self(bytes)
    }

    pub fn op(&mut self, code: u8) -> &mut Self {
        self.0.push(code);
        self
    }

    pub fn global(&mut self, module: &str, name: &str) -> &mut Self {
        for piece in ["c", module, "\n", name, "\n"] {
            self.0.extend_from_slice(piece.as_bytes());
        }
        self
    }

    pub fn text(&mut self, text: &str) -> &mut Self {
        self.0.push(b'X');
        self.0.extend_from_slice(&(text.len() as u32).to_le_bytes());
        self.0.extend_from_slice(text.as_bytes());
        self
    }

    /// BININT1, BININT2, BININT or LONG1, whichever is the first to hold the value.
    pub fn integer(&mut self, value: u64) -> &mut Self {
        let bytes = value.to_le_bytes();
        match value {
            0..=0xff => self.0.extend_from_slice(&[b'K', bytes[0]]),
            0x100..=0xffff => self.0.extend_from_slice(&[b'M', bytes[0], bytes[1]]),
            0x1_0000..=0x7fff_ffff => self.0.extend_from_slice(&[b'J', bytes[0], bytes[1], bytes[2], bytes[3]]),
            _ => {
                // Nine bytes: the sign needs a bit of its own.
                self.0.extend_from_slice(&[0x8a, 9]);
                self.0.extend_from_slice(&bytes);
                self.0.push(0);
            }
        }
        self
    }

    fn list(&mut self, values: &[u32]) -> &mut Self {
        self.op(EMPTY_LIST);
        if !values.is_empty() {
            self.op(MARK);
            for &value in values {
                self.integer(value.into());
            }
            self.op(APPENDS);
        }
        self
    }

    pub fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub fn stop(mut self) -> Vec<u8> {
        self.0.push(b'.');
        self.0
    }
}

/// Modalities of SGLang's encoder protocol, by their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Modality {
    Image = 1,
    Video = 2,
    Audio = 3,
}

/// What one part of an encode request became.
#[derive(Clone, Copy, Debug)]
pub enum Outcome<'a> {
    Embedding { grid: &'a [[u32; 3]], shape: [u32; 2], dtype: DType },
    Failed { message: &'a str, code: u16 },
}

/// Which part of which request an answer is for.
#[derive(Clone, Copy, Debug)]
pub struct Part<'a> {
    pub req_id: &'a str,
    pub num_parts: u32,
    pub part_idx: u32,
    pub modality: Modality,
}

/// `EmbeddingData` without its tensor: frame 0 of SGLang's encoder hand-off, in the layout of 0.5.23.
pub fn embedding_data(part: Part<'_>, outcome: Outcome<'_>) -> Vec<u8> {
    let mut out = Pickle::new();
    out.global("sglang.srt.disaggregation.encoder.receiver", "EmbeddingData").op(EMPTY_TUPLE).op(NEWOBJ);
    out.op(EMPTY_DICT).op(MARK);
    out.text("req_id").text(part.req_id);
    out.text("num_parts").integer(part.num_parts.into());
    out.text("part_idx").integer(part.part_idx.into());
    out.text("grid_dim");
    match outcome {
        Outcome::Embedding { grid, .. } => {
            out.op(EMPTY_LIST);
            if !grid.is_empty() {
                out.op(MARK);
                for sides in grid {
                    out.list(sides);
                }
                out.op(APPENDS);
            }
        }
        Outcome::Failed { .. } => {
            out.op(NONE);
        }
    }
    out.text("modality").global("sglang.srt.multimodal.modality", "Modality");
    out.integer(part.modality as u64).op(TUPLE1).op(REDUCE);
    out.text("embedding").op(NONE).text("send_time").op(NONE);
    match outcome {
        Outcome::Embedding { shape, dtype, .. } => {
            out.text("dtype").global("torch", dtype.name());
            out.text("shape").list(&shape).text("_mr_ptr").op(NONE);
            out.text("error_msg").op(NONE).text("error_code").op(NONE);
        }
        Outcome::Failed { message, code } => {
            out.text("dtype").op(NONE).text("shape").op(NONE).text("_mr_ptr").op(NONE);
            out.text("error_msg").text(message).text("error_code").integer(code.into());
        }
    }
    out.op(SETITEMS).op(BUILD);
    out.stop()
}
