//! The id under which vLLM keys an image (0.32, `multimodal/hasher.py`): framed blake3 over the file bytes.

use fovea_kv::MediaId;

/// Tags of values in the framing.
const SEQUENCE: u8 = 1;
const MAPPING: u8 = 2;
const LEAF: u8 = 3;

/// vLLM's default id of an image without uuid and without processor or media options.
///
/// `bytes` = the file as received; `converted` = its pixels are not RGB (`ImageHeader::converted`);
/// `engine_model` = the model string given to `vllm serve`. The bytes are hashed in place. EXIF ImageID, which the
/// sender chooses, is ignored.
pub fn vllm_image_id(bytes: &[u8], converted: bool, engine_model: &str) -> MediaId {
    let mut frame = Frame(blake3::Hasher::new());
    frame.sized(b"image").tag(LEAF).sized(b"image");
    if converted {
        frame.tag(MAPPING).count(2).sized(b"io_config").tag(MAPPING).count(2);
        frame.sized(b"image_mode").tag(LEAF).sized(b"RGB");
        frame.sized(b"rgba_background_color").tag(SEQUENCE).count(3);
        for _ in 0..3 {
            frame.tag(LEAF).sized(&255_i64.to_le_bytes());
        }
        frame.sized(b"data");
    }
    frame.tag(LEAF).sized(bytes);
    frame.sized(b"model_id").tag(LEAF).sized(engine_model.as_bytes());
    MediaId(*frame.0.finalize().as_bytes())
}

/// Writes the framing straight into the hasher.
struct Frame(blake3::Hasher);

impl Frame {
    fn tag(&mut self, tag: u8) -> &mut Self {
        self.0.update(&[tag]);
        self
    }

    fn count(&mut self, count: u64) -> &mut Self {
        self.0.update(&count.to_le_bytes());
        self
    }

    /// Length, then the bytes.
    fn sized(&mut self, bytes: &[u8]) -> &mut Self {
        self.count(bytes.len() as u64);
        self.0.update(bytes);
        self
    }
}

#[cfg(test)]
mod tests;
