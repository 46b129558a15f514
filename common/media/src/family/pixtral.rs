//! Pixtral and Mistral 3: one row of features per row of patches, a mark after each (transformers 5.19 `PixtralProcessor`;
//! vLLM 0.32 `PixtralHFEncoderInfo`, `mistral3.py`, `llava.py`). An image of which a side scales to nothing is refused by the
//! processor, though vLLM's own formula has an answer.

use super::fields::{Fields, agreed};
use super::words::Words;
use super::{ConfigError, Family, Target};

/// A config whose root is Pixtral's own.
pub(super) fn pixtral(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    family(fields, words, Defaults { edge: 1024, patch: 16, merge: 1 }, "")
}

/// Pixtral inside the LLaVA layout.
pub(super) fn in_llava(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    // vLLM asks the LLaVA class for the text, which is then not the token that it replaces.
    family(fields, words, Defaults { edge: 1024, patch: 16, merge: 1 }, "<image>")
}

pub(super) fn mistral3(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    // The defaults of Pixtral's vision config hold for a vision config that leaves a field out.
    let whole = fields.config.find("/vision_config").is_none();
    let (edge, patch) = if whole { (1540, 14) } else { (1024, 16) };
    family(fields, words, Defaults { edge, patch, merge: 2 }, "")
}

/// In pixels, except `merge`: patches per feature along each side.
struct Defaults {
    edge: u32,
    patch: u32,
    merge: u32,
}

fn family(
    fields: &Fields<'_>,
    words: &mut Words,
    defaults: Defaults,
    image_text: &'static str,
) -> Result<Family, ConfigError> {
    let (image, vision) = (&fields.image, &fields.vision);
    let edge = agreed(
        ("size.longest_edge", image.size("/size/longest_edge")?),
        ("vision_config.image_size", vision.size("/image_size")?),
    )?;
    let patch = vision.size("/patch_size")?.or(fields.processor.size("/patch_size")?).or(image.size("/patch_size")?);
    let merge = fields.config.size("/spatial_merge_size")?.or(fields.processor.size("/spatial_merge_size")?);
    let unit = u64::from(patch.unwrap_or(defaults.patch)) * u64::from(merge.unwrap_or(defaults.merge));
    let edge = f64::from(edge.unwrap_or(defaults.edge));
    let feature = words.own(fields.image_token()?, "[IMG]");
    let (row, end) = (words.token("[IMG_BREAK]"), words.token("[IMG_END]"));
    Ok(Family::new(Target::Word(feature), image_text, move |size, out| {
        let ratio = (size.w() / edge).max(size.h() / edge);
        let scaled = |side: f64| if ratio > 1.0 { (side / ratio).floor() as u64 } else { side as u64 };
        let (width, height) = (scaled(size.w()), scaled(size.h()));
        let (columns, rows) = (width.div_ceil(unit), height.div_ceil(unit));
        out.reserve(2 * rows as usize);
        for left in (0..rows).rev() {
            out.features(feature, columns);
            out.push(&[if left > 0 { row } else { end }]);
        }
        Ok(())
    }))
}
