//! InternVL: square tiles and an overview, one run of features between two marks (transformers 5.19 `InternVLProcessor`,
//! `GotOcr2ImageProcessor`; vLLM 0.32 `interns1.py`, `internvl.py`).

use super::fields::Fields;
use super::tiles::Tiles;
use super::words::{Word, Words};
use super::{ConfigError, Family, Target};

/// Layout of Hugging Face: `InternVLForConditionalGeneration`.
pub(super) fn model(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    let image = &fields.image;
    let side = image.size("/size")?.unwrap_or(384);
    let (min, max) = (image.size("/min_patches")?.unwrap_or(1), image.size("/max_patches")?.unwrap_or(12));
    let tiles = Tiles::new(side, min, max, image.invalid("/max_patches", "1 to 1024 and at least min_patches"))?;
    let of_processor = fields.processor.size("/image_seq_length")?;
    let per_tile = of_processor.or(fields.config.size("/image_seq_length")?).unwrap_or(256);
    let context = words.own(fields.image_token()?, CONTEXT);
    Ok(family(Target::Word(context), CONTEXT, context, words, tiles, per_tile.into(), true))
}

/// Layout of the model's own code: `InternVLChatModel`.
pub(super) fn chat(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    let (config, vision) = (&fields.config, &fields.vision);
    let side = config.size("/force_image_size")?.or(vision.size("/image_size")?).unwrap_or(448);
    let patch = vision.size("/patch_size")?.unwrap_or(14);
    let ratio = config.ratio("/downsample_ratio")?.unwrap_or(0.5);
    let per_tile = (f64::from(side / patch).powi(2) * (ratio * ratio)) as u64;
    let dynamic = config.flag("/dynamic_image_size")?.unwrap_or(true);
    let bound = |field, default| Ok(if dynamic { config.size(field)?.unwrap_or(default) } else { 1 });
    let (min, max) = (bound("/min_dynamic_patch", 1)?, bound("/max_dynamic_patch", 12)?);
    let invalid = config.invalid("/max_dynamic_patch", "1 to 1024 and at least min_dynamic_patch");
    let tiles = Tiles::new(side, min, max, invalid)?;
    let overview = config.flag("/use_thumbnail")?.unwrap_or(true);
    let target = words.text("<image>");
    let context = words.token(CONTEXT);
    Ok(family(Target::Word(target), "<image>", context, words, tiles, per_tile, overview))
}

const CONTEXT: &str = "<IMG_CONTEXT>";

fn family(
    target: Target,
    image_text: &'static str,
    context: Word,
    words: &mut Words,
    tiles: Tiles,
    per_tile: u64,
    overview: bool,
) -> Family {
    let (start, end) = (words.token("<img>"), words.token("</img>"));
    Family::new(target, image_text, move |size, out| {
        let (columns, rows) = tiles.pick(size);
        let count = if overview { tiles.count_with_overview(size) } else { u64::from(columns * rows) };
        out.push(&[start]);
        out.features(context, per_tile * count);
        out.push(&[end]);
        Ok(())
    })
}
