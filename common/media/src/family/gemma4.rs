//! Gemma 4: as many square patches as a budget allows, between two marks (transformers 5.19 `Gemma4ImageProcessor`,
//! `Gemma4Processor`; vLLM 0.32 `gemma4_mm.py`, which gives the same wherever the processor takes the image).

use super::fields::Fields;
use super::shape::Size;
use super::words::Words;
use super::{ConfigError, Family, Refused, Target};

/// Budgets that the processor takes.
const BUDGETS: [u32; 5] = [70, 140, 280, 560, 1120];

#[derive(Clone, Debug)]
struct Budget {
    /// Features per image, at most.
    tokens: f64,
    patch: f64,
    pool: f64,
}

pub(super) fn model(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    let of_image = fields.image.size("/max_soft_tokens")?;
    let tokens = of_image.or(fields.vision.size("/default_output_length")?).unwrap_or(280);
    if !BUDGETS.contains(&tokens) {
        return Err(fields.image.invalid("/max_soft_tokens", "70, 140, 280, 560 or 1120"));
    }
    let patch = fields.image.size("/patch_size")?.or(fields.vision.size("/patch_size")?).unwrap_or(16);
    let pool = fields.image.size("/pooling_kernel_size")?.or(fields.vision.size("/pooling_kernel_size")?).unwrap_or(3);
    let budget = Budget { tokens: f64::from(tokens), patch: f64::from(patch), pool: f64::from(pool) };
    let config = &fields.config;
    let image = words.own(fields.image_token()?, "<|image|>");
    let start = words.own(config.token("/boi_token_id")?, "<|image>");
    let end = words.own(config.token("/eoi_token_id")?, "<image|>");
    // vLLM's own text for templates without media parts is not the token that it then replaces.
    Ok(Family::new(Target::Word(image), "<image_soft_token>", move |size, out| {
        let tokens = budget.spend(size)?;
        out.push(&[start]);
        out.features(image, tokens);
        out.push(&[end]);
        Ok(())
    }))
}

impl Budget {
    fn spend(&self, size: Size) -> Result<u64, Refused> {
        let (w, h) = (size.w(), size.h());
        let unit = self.patch * self.pool;
        let patches = self.tokens * (self.pool * self.pool);
        let scale = (patches * (self.patch * self.patch) / (w * h)).sqrt();
        let (rows, columns) = ((scale * h / unit).floor(), (scale * w / unit).floor());
        let (rows, columns) = match (rows == 0.0, columns == 0.0) {
            (true, true) => return Err(Refused::TooThin { width: size.width, height: size.height, formula: 1 }),
            (true, false) => (1.0, (w / h).floor().min(self.tokens)),
            (false, true) => ((h / w).floor().min(self.tokens), 1.0),
            (false, false) => (rows, columns),
        };
        Ok((rows * columns) as u64)
    }
}
