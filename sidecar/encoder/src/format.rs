//! Tensors in the encodings that engines read. Writers only: what engines send back is not ours to parse.
//!
//! Each writer is held to the bytes of `tests/vectors/encoder/formats`, which PyTorch, vLLM and SGLang themselves have read.
//! **Invariant:** a payload is copied once, into the buffer that leaves; a writer that can hand the payload on as it is gives a head
//! and lets the caller write both.

pub mod base64;
pub mod msgpack;
pub mod npy;
pub mod pickle;
pub mod safetensors;
pub mod torch;

#[cfg(test)]
mod tests;

/// Why a tensor has no form in an encoding.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    #[error("npy has no bfloat16: write a torch archive, or have the encoder give float16 or float32")]
    NoBf16InNpy,
    #[error("tensor of {bytes} bytes is too large for {format}, which holds {max}: make the image smaller")]
    TooLarge { format: &'static str, bytes: usize, max: usize },
}
