//! LLaVA-1.5: every image is cut to one square (transformers 5.19 `LlavaProcessor`; vLLM 0.32 `llava.py`). The same
//! `model_type` also names Pixtral in Hugging Face's layout.

use super::fields::Fields;
use super::words::Words;
use super::{ConfigError, Family, pixtral};

pub(super) const IMAGE_TEXT: &str = "<image>";

pub(super) fn model(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    if fields.vision.text("/model_type")? == Some("pixtral") {
        return pixtral::in_llava(fields, words);
    }
    let tower = Tower::from_fields(fields, CLIP, 336)?;
    let tokens = tower.features(fields, "default")?;
    let image = words.own(fields.image_token()?, "<image>");
    Ok(Family::pads(image, IMAGE_TEXT, move |_| Ok(tokens)))
}

pub(super) const CLIP: &str = "clip_vision_model";
pub(super) const SIGLIP: &str = "siglip_vision_model";

/// The vision tower of a LLaVA-like model.
pub(super) struct Tower {
    /// Side of its images, in pixels.
    pub side: u32,
    /// Features along each side.
    pub grid: u32,
    /// It puts a class feature in front.
    class: bool,
}

impl Tower {
    /// `kind` and `side` in pixels are the family's, for a config without a vision tower.
    pub fn from_fields(fields: &Fields<'_>, kind: &str, side: u32) -> Result<Self, ConfigError> {
        let vision = &fields.vision;
        let absent = fields.config.find("/vision_config").is_none();
        let or = |found: Option<u32>, field, default| found.or(absent.then_some(default)).ok_or(vision.missing(field));
        let side = or(vision.size("/image_size")?, "/image_size", side)?;
        let patch = or(vision.size("/patch_size")?, "/patch_size", 14)?;
        let class = match vision.text("/model_type")?.unwrap_or(kind) {
            CLIP => true,
            SIGLIP => false,
            _ => return Err(vision.invalid("/model_type", "clip_vision_model or siglip_vision_model")),
        };
        let grid = side / patch;
        if grid == 0 {
            return Err(vision.invalid("/patch_size", "at most the image size"));
        }
        Ok(Self { side, grid, class })
    }

    /// Features of one square, after the config's selection.
    pub fn features(&self, fields: &Fields<'_>, strategy: &str) -> Result<u64, ConfigError> {
        let all = u64::from(self.grid).pow(2) + u64::from(self.class);
        match fields.config.text("/vision_feature_select_strategy")?.unwrap_or(strategy) {
            "default" => Ok(all - 1),
            "full" => Ok(all),
            _ => Err(fields.config.invalid("/vision_feature_select_strategy", "default or full")),
        }
    }
}
