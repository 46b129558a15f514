//! Images as an engine's own processor makes them: decoded, turned, resized, normalised, cut into patches.
//!
//! Mirrors vLLM 0.32's loader (Pillow 13) for the pixels and transformers 5.19's `Qwen2VLImageProcessor` (torchvision backend) for the rest.
//! A crate of its own because the resizer takes long to compile.
//! **Invariant:** nothing is allocated by a number found in a file before it is held to the limits.

pub mod decode;
pub mod processor;
pub mod resize;

#[cfg(test)]
mod tests;

/// Pixels of 8 bits in rows from the top, three bytes each.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rgb {
    width: u32,
    height: u32,
    data: Vec<u8>,
}

impl Rgb {
    /// `None` unless `data` has three bytes for each of `width` × `height` pixels, and there is at least one.
    pub fn new(width: u32, height: u32, data: Vec<u8>) -> Option<Self> {
        let bytes = u64::from(width).checked_mul(height.into())?.checked_mul(3)?;
        (bytes > 0 && data.len() as u64 == bytes).then_some(Self { width, height, data })
    }

    pub fn width(&self) -> u32 {
        self.width
    }

    pub fn height(&self) -> u32 {
        self.height
    }

    pub fn data(&self) -> &[u8] {
        &self.data
    }
}
