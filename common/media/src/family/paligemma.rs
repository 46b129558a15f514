//! PaliGemma: a fixed number of features (transformers 5.19 `PaliGemmaProcessor`; vLLM 0.32 `paligemma.py`). vLLM puts them in
//! front of the prompt or after its first token, depending on a setting of the tokenizer, so their place is not known here.

use super::fields::Fields;
use super::words::Words;
use super::{ConfigError, Family, Target};

pub(super) fn model(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    let field = "/image_seq_length";
    let tower = match (fields.vision.size("/image_size")?, fields.vision.size("/patch_size")?) {
        (Some(side), Some(patch)) => Some((side / patch).pow(2)),
        _ => None,
    };
    let tokens = tower.or(fields.image.size(field)?).or(fields.processor.size(field)?);
    let tokens = u64::from(tokens.ok_or(fields.image.missing(field))?);
    let image = words.own(fields.image_token()?, "<image>");
    Ok(Family::new(Target::Nowhere, "", move |_, out| {
        out.features(image, tokens);
        Ok(())
    }))
}
