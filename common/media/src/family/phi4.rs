//! Phi-4-multimodal: crops of 448 pixels, of which masked-off padding does not count, and an overview (transformers 5.19
//! `Phi4MultimodalImageProcessor`; vLLM 0.32 `phi4mm.py`). Needles are refused by the processor, though vLLM's own formula has an answer.

use super::fields::Fields;
use super::shape::Size;
use super::tiles::Tiles;
use super::words::Words;
use super::{ConfigError, Family, Refused, Target};

const PAD: &str = "<|endoftext10|>";

/// Layout of Hugging Face.
pub(super) fn model(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    let crops = Crops::from_fields(fields)?;
    let pad = words.own(fields.vision.token("/image_token_id")?, PAD);
    Ok(Family::pads(pad, PAD, move |size| crops.tokens(size)))
}

/// Layout of the model's own code, whose prompts number their images.
pub(super) fn remote_code(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    let crops = Crops::from_fields(fields)?;
    let pad = words.token(PAD);
    Ok(Family::new(Target::Numbered("<|image_#|>"), "<|image_1|>", move |size, out| {
        out.features(pad, crops.tokens(size)?);
        Ok(())
    }))
}

#[derive(Clone, Debug)]
struct Crops {
    /// In pixels.
    side: u64,
    patch: u64,
    most: u64,
    tiles: Tiles,
}

impl Crops {
    fn from_fields(fields: &Fields<'_>) -> Result<Self, ConfigError> {
        let image = &fields.image;
        let side = image.size("/size")?.unwrap_or(448);
        let patch = image.size("/patch_size")?.unwrap_or(14);
        let most = image.size("/dynamic_hd")?.unwrap_or(36);
        let tiles = Tiles::new(side, 1, most, image.invalid("/dynamic_hd", "at most 1024"))?;
        Ok(Self { side: side.into(), patch: patch.into(), most: most.into(), tiles })
    }

    fn tokens(&self, size: Size) -> Result<u64, Refused> {
        let crops = |pixels: u32| u64::from(pixels).div_ceil(self.side);
        let (mut across, mut down) = (crops(size.width), crops(size.height));
        if across * down > self.most {
            let (columns, rows) = self.tiles.pick(size);
            (across, down) = (columns.into(), rows.into());
        }
        let (width, height) = (across * self.side, down * self.side);
        let (by_width, by_height) = (width as f64 / size.w(), height as f64 / size.h());
        // The image is scaled to fill the canvas one way; the rest is padding.
        let (new_width, new_height) = if by_width < by_height {
            (width, (size.h() * by_width) as u64)
        } else {
            ((size.w() * by_height) as u64, height)
        };
        // Features are pairs of patches; whole patches of padding are masked off.
        let features = |canvas: u64, content: u64| {
            let padding = canvas.saturating_sub(content) / self.patch;
            (canvas / self.patch).saturating_sub(padding).div_ceil(2)
        };
        let (columns, rows) = (features(width, new_width), features(height, new_height));
        let overview = self.side / self.patch / 2;
        let tokens = overview * overview + 1 + columns * rows + rows + overview;
        let thin = |a: u64, b: u64| a.min(b) < 10;
        if thin(new_height, new_width) && (thin(new_width, height) || thin(new_height, width)) {
            return Err(Refused::TooThin { width: size.width, height: size.height, formula: tokens });
        }
        Ok(tokens)
    }
}
