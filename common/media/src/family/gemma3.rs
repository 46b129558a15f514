//! Gemma 3: a fixed number of features between line breaks; crops of long images only when asked for (transformers 5.19
//! `Gemma3Processor`, `Gemma3ImageProcessor.pan_and_scan`; vLLM 0.32 `gemma3_mm.py`).
//!
//! `do_pan_and_scan` of the files has no effect: the processor's own default wins over the image processor's.

use super::fields::Fields;
use super::shape::Size;
use super::words::Words;
use super::{ConfigError, Family, Target};

/// Crops of one image, if they are switched on.
#[derive(Clone, Debug)]
struct PanAndScan {
    ratio_min: f64,
    /// In pixels.
    crop_min: f64,
    crops_max: f64,
}

pub(super) fn model(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    let of_processor = fields.processor.size("/image_seq_length")?;
    let of_config = fields.config.size("/mm_tokens_per_image")?;
    let per_image = u64::from(of_processor.or(of_config).unwrap_or(256));
    let crops = PanAndScan::from_options(fields)?;
    let config = &fields.config;
    let start = words.own(config.token("/boi_token_index")?, "<start_of_image>");
    let image = words.own(fields.image_token()?, "<image_soft_token>");
    let end = words.own(config.token("/eoi_token_index")?, "<end_of_image>");
    let lines = words.text("\n\n");
    let original = words.text("Here is the original image \n\n");
    let details = words.text("\n\n and here are some crops to help you see better \n\n");
    let between = words.text("\n\n \n\n");
    let family = Family::new(Target::Word(start), "<start_of_image>", move |size, out| {
        let count = crops.as_ref().map_or(0, |crops| crops.count(size));
        out.push(&[if count > 0 { original } else { lines }]);
        for index in 0..=count {
            if index > 0 {
                out.push(&[if index == 1 { details } else { between }]);
            }
            out.push(&[start]);
            out.features(image, per_image);
            out.push(&[end]);
        }
        out.push(&[lines]);
        Ok(())
    });
    Ok(Family { newlines: true, ..family })
}

impl PanAndScan {
    fn from_options(fields: &Fields<'_>) -> Result<Option<Self>, ConfigError> {
        let options = &fields.options;
        let on = options.flag("/do_pan_and_scan")?.unwrap_or(false);
        let crops = Self {
            ratio_min: options.ratio("/pan_and_scan_min_ratio_to_activate")?.unwrap_or(1.2),
            crop_min: f64::from(options.size("/pan_and_scan_min_crop_size")?.unwrap_or(256)),
            crops_max: f64::from(options.size("/pan_and_scan_max_num_crops")?.unwrap_or(4).min(256)),
        };
        Ok(on.then_some(crops))
    }

    fn count(&self, size: Size) -> u32 {
        let (long, short) = (size.w().max(size.h()), size.w().min(size.h()));
        if long / short < self.ratio_min {
            return 0;
        }
        let wanted = (long / short + 0.5).floor().min((long / self.crop_min).floor());
        let crops = wanted.max(2.0).min(self.crops_max);
        if (long / crops).ceil().min(short) < self.crop_min { 0 } else { crops as u32 }
    }
}
