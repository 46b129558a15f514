//! LLaVA's "any resolution": the best of a list of canvases, and the features left when its padding is cut off
//! (transformers 5.19 `select_best_resolution`, `LlavaNextProcessor._get_unpadded_features`; vLLM 0.32 computes the same).

use serde_json::Value;

use super::ConfigError;
use super::fields::{Fields, Section};
use super::shape::Size;

/// Canvases of one model, (height, width) in pixels, in the order of its files.
#[derive(Clone, Debug)]
pub(super) struct Pins(Vec<(u32, u32)>);

/// Bounds the work per image.
const PINS_MAX: usize = 1024;
const FIELD: &str = "/image_grid_pinpoints";

impl Pins {
    /// From config.json, else the preprocessor file, else the class default.
    pub fn from_fields(fields: &Fields<'_>, default: impl Fn() -> Vec<(u32, u32)>) -> Result<Self, ConfigError> {
        for section in [&fields.config, &fields.file] {
            if let Some(value) = section.find(FIELD) {
                return Self::read(section, value);
            }
        }
        Ok(Self(default()))
    }

    fn read(section: &Section<'_>, value: &Value) -> Result<Self, ConfigError> {
        let side = |value: &Value| value.as_u64().and_then(|side| u32::try_from(side).ok()).filter(|&side| side > 0);
        let pin = |value: &Value| match value.as_array()?.as_slice() {
            [height, width] => Some((side(height)?, side(width)?)),
            _ => None,
        };
        let list = value.as_array().filter(|list| (1..=PINS_MAX).contains(&list.len()));
        let pins = list.and_then(|list| list.iter().map(pin).collect());
        pins.map(Self).ok_or(section.invalid(FIELD, "a list of [height, width] in pixels"))
    }

    /// The canvas (height, width) that keeps most of the image, then wastes least.
    fn best(&self, size: Size) -> (u32, u32) {
        let (mut best, mut kept, mut waste) = ((0, 0), 0, u64::MAX);
        for &(height, width) in &self.0 {
            let scale = (f64::from(width) / size.w()).min(f64::from(height) / size.h());
            let scaled = (size.w() * scale) as u64 * (size.h() * scale) as u64;
            let keeps = scaled.min(u64::from(size.width) * u64::from(size.height));
            let wastes = (u64::from(height) * u64::from(width)).saturating_sub(keeps);
            if keeps > kept || (keeps == kept && wastes < waste) {
                (best, kept, waste) = ((height, width), keeps, wastes);
            }
        }
        best
    }

    /// Rows and columns of features after the padding of the best canvas is cut off; `grid` features along each `tile` pixels.
    pub fn unpadded(&self, size: Size, tile: u32, grid: u32) -> (i64, i64) {
        let (height, width) = self.best(size);
        let features = |pixels: u32| i64::from(grid) * i64::from(pixels / tile);
        let (rows, columns) = (features(height), features(width));
        if size.w() / size.h() > columns as f64 / rows as f64 {
            let content = round_7(size.h() * (columns as f64 / size.w()));
            (rows - (rows - content).div_euclid(2) * 2, columns)
        } else {
            let content = round_7(size.w() * (rows as f64 / size.h()));
            (rows, columns - (columns - content).div_euclid(2) * 2)
        }
    }
}

/// Python's `int(round(x, 7))`. Rounding to 7 decimals changes the whole part only just below a whole number, where the text of
/// the number has to decide.
fn round_7(x: f64) -> i64 {
    if x.fract() > 1.0 - 1e-6 {
        return format!("{x:.7}").parse::<f64>().unwrap_or(x) as i64;
    }
    x as i64
}
