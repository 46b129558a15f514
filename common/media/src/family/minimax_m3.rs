//! MiniMax-M3 (transformers 5.19 `MiniMaxM3VLImageProcessor`, `MiniMaxM3VLProcessor`).

use serde_json::json;

use super::fields::Fields;
use super::smart_resize::{Defaults, SmartResize};
use super::words::Words;
use super::{ConfigError, Family, Target};

pub(super) fn model(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    // Published files carry a size that the processor replaces by its default.
    let ignore_size = fields.file.find("/size") == Some(&json!([672, 672]));
    let defaults = Defaults { patch: 14, pixels_min: 4 * 28 * 28, pixels_max: 451_584, ignore_size };
    let rule = SmartResize::from_fields(fields, defaults)?;
    let image = words.own(fields.image_token()?, "]<]image[>[");
    let (start, end) = (words.token("]<]start of image[>["), words.token("]<]end of image[>["));
    Ok(Family::new(Target::Word(image), "]<]image[>[", move |size, out| {
        let tokens = rule.tokens(size)?;
        out.push(&[start]);
        out.features(image, tokens);
        out.push(&[end]);
        Ok(())
    }))
}
