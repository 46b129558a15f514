//! The Qwen image processor: sizes, resize, normalisation, patches in merge-block order.

use fovea_media::family::{ConfigError, ModelFiles, PatchRule, Refused};
use serde_json::Value;

use crate::Rgb;
use crate::resize::{ResizeError, resize};

/// Frames in a patch; an image is one frame repeated.
const TEMPORAL_MAX: u64 = 8;

/// What an image will become, known from its upright size alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// After resizing, in pixels.
    pub width: u32,
    pub height: u32,
    /// Frames, rows and columns of patches.
    pub grid_thw: [u32; 3],
    /// Rows of the embedding: what the balancer counts.
    pub tokens: u32,
}

/// Input of a vision tower for one image.
#[derive(Clone, Debug, PartialEq)]
pub struct Patches {
    pub grid_thw: [u32; 3],
    /// `t·h·w` rows of `row_length` numbers, each (channel, frame, row, column); in merge-block order (h/m, w/m, m, m).
    pub values: Vec<f32>,
    pub row_length: usize,
}

/// Why an image was not processed.
#[derive(Debug, thiserror::Error)]
pub enum ProcessError {
    #[error("image is refused")]
    Refused(#[from] Refused),
    #[error(transparent)]
    Resize(#[from] ResizeError),
}

/// One model's image processor.
#[derive(Clone, Debug)]
pub struct Processor {
    rule: PatchRule,
    temporal: u32,
    /// Value of each byte in each channel: (x / 255 − mean) / deviation.
    table: Box<[[f32; 256]; 3]>,
}

impl Processor {
    /// Reads a model's files, class defaults standing in for absent fields.
    ///
    /// # Errors
    /// When the model is of no Qwen family, or a field is of the wrong type.
    pub fn from_files(files: &ModelFiles<'_>) -> Result<Self, ConfigError> {
        let rule = PatchRule::from_files(files)?;
        let nested = |value: Option<&'_ Value>| value.and_then(|value| value.get("image_processor")).cloned();
        let file = nested(files.processor).or_else(|| nested(files.preprocessor));
        let file = file.as_ref().or(files.preprocessor);
        let find = |field: &str| file.and_then(|file| file.get(field)).filter(|value| !value.is_null());
        let temporal = find("temporal_patch_size").map_or(Some(2), Value::as_u64);
        let temporal = temporal.filter(|frames| (1..=TEMPORAL_MAX).contains(frames));
        let temporal = temporal.ok_or(invalid("/temporal_patch_size", "a whole number from 1 to 8"))? as u32;
        let mean = triple(find("image_mean"), CLIP_MEAN).ok_or(invalid("/image_mean", "three numbers"))?;
        let deviation = triple(find("image_std"), CLIP_STD).filter(|all| all.iter().all(|&one| one > 0.0));
        let deviation = deviation.ok_or(invalid("/image_std", "three numbers above 0"))?;
        let scale = find("rescale_factor").map_or(Some(1.0 / 255.0), Value::as_f64).filter(|&scale| scale > 0.0);
        let scale = scale.ok_or(invalid("/rescale_factor", "a number above 0"))?;
        for (field, flag) in [("/do_rescale", find("do_rescale")), ("/do_normalize", find("do_normalize"))] {
            if flag.is_some_and(|flag| flag != &Value::Bool(true)) {
                return Err(invalid(field, "true or absent"));
            }
        }
        // The processor folds the scale into mean and deviation, and works in f32.
        let fold = |value: f64| (value * (1.0 / scale)) as f32;
        let entry = |channel: usize, x: usize| (x as f32 - fold(mean[channel])) / fold(deviation[channel]);
        let table = Box::new(std::array::from_fn(|channel| std::array::from_fn(|x| entry(channel, x))));
        Ok(Self { rule, temporal, table })
    }

    /// Sizes of an image, from its upright width and height.
    ///
    /// # Errors
    /// When the engine refuses such an image.
    pub fn plan(&self, width: u32, height: u32) -> Result<Plan, Refused> {
        let (columns, rows) = self.rule.cells(width, height)?;
        let tokens = columns.checked_mul(rows).ok_or(Refused::TooManyTokens { width, height })?;
        let (merge, patch) = (self.rule.merge(), self.rule.patch());
        let grid_thw = [1, rows * merge, columns * merge];
        Ok(Plan { width: columns * merge * patch, height: rows * merge * patch, grid_thw, tokens })
    }

    /// Patches a side of one token is merged from.
    pub fn merge(&self) -> u32 {
        self.rule.merge()
    }

    /// Resizes and cuts an image. The values take `3 × frames × 4` bytes per resized pixel.
    ///
    /// # Errors
    /// When the engine refuses such an image.
    pub fn process(&self, image: &Rgb) -> Result<Patches, ProcessError> {
        let plan = self.plan(image.width(), image.height())?;
        let resized = resize(image, plan.width, plan.height)?;
        Ok(self.cut(&resized, plan.grid_thw))
    }

    /// Cuts an image whose sides are those of the grid.
    fn cut(&self, image: &Rgb, grid_thw: [u32; 3]) -> Patches {
        let (patch, merge) = (self.rule.patch() as usize, self.rule.merge() as usize);
        let [_, rows, columns] = grid_thw.map(|side| side as usize);
        let (frames, stride) = (self.temporal as usize, image.width() as usize * 3);
        let row_length = 3 * frames * patch * patch;
        let mut values = Vec::with_capacity(rows * columns * row_length);
        for index in 0..rows * columns {
            // Flat index → block of the merger, then the patch inside it.
            let (inside, block) = (index % (merge * merge), index / (merge * merge));
            let (block_row, block_column) = (block / (columns / merge), block % (columns / merge));
            let (row, column) = (block_row * merge + inside / merge, block_column * merge + inside % merge);
            let corner = row * patch * stride + column * patch * 3;
            for (channel, table) in self.table.iter().enumerate() {
                let start = values.len();
                for line in 0..patch {
                    let pixels = &image.data()[corner + line * stride..][..patch * 3];
                    values.extend(pixels.as_chunks::<3>().0.iter().map(|pixel| table[usize::from(pixel[channel])]));
                }
                for _ in 1..frames {
                    values.extend_from_within(start..start + patch * patch);
                }
            }
        }
        Patches { grid_thw, values, row_length }
    }
}

/// Class defaults of `Qwen2VLImageProcessor`.
const CLIP_MEAN: [f64; 3] = [0.481_454_66, 0.457_827_5, 0.408_210_73];
const CLIP_STD: [f64; 3] = [0.268_629_54, 0.261_302_58, 0.275_777_11];

fn triple(value: Option<&Value>, default: [f64; 3]) -> Option<[f64; 3]> {
    let Some(value) = value else { return Some(default) };
    let all: Vec<f64> = value.as_array()?.iter().map(Value::as_f64).collect::<Option<_>>()?;
    all.try_into().ok()
}

fn invalid(field: &'static str, expected: &'static str) -> ConfigError {
    ConfigError::Invalid { file: "preprocessor_config.json", field, expected }
}
