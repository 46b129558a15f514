//! MiniCPM-V 4.6: a numbered overview, then slices row by row (transformers 5.19 `MiniCPMV4_6ImageProcessor`,
//! `MiniCPMV4_6Processor`; vLLM 0.32 `minicpmv4_6.py`).

use super::fields::Fields;
use super::shape::Size;
use super::words::Words;
use super::{ConfigError, Family, Target};

/// Slices per image, at most.
const SLICES_MAX: u32 = 64;

/// Rows, columns and ln(columns / rows) of one way to slice.
type Way = (u32, u32, f64);

#[derive(Clone, Debug)]
struct Slices {
    /// Side of a slice in pixels, and pixels of a patch.
    side: f64,
    patch: f64,
    /// Patches per feature.
    divisor: u64,
    /// Ways to slice, by the number of slices that the area asks for.
    ways: Vec<Vec<Way>>,
}

pub(super) fn model(fields: &Fields<'_>, words: &mut Words) -> Result<Family, ConfigError> {
    let slices = Slices::from_fields(fields)?;
    let pad = words.own(fields.image_token()?, "<|image_pad|>");
    let (id, id_end) = (words.token("<image_id>"), words.token("</image_id>"));
    let (image, image_end) = (words.token("<image>"), words.token("</image>"));
    let (slice, slice_end) = (words.token("<slice>"), words.token("</slice>"));
    let (position, line) = (words.position(), words.text("\n"));
    Ok(Family::new(Target::Word(pad), "<|image_pad|>", move |size, out| {
        let grid = slices.pick(size);
        out.push(&[id, position, id_end, image]);
        out.features(pad, slices.features(size.w(), size.h(), grid.is_none()));
        out.push(&[image_end]);
        let Some((rows, columns)) = grid else { return Ok(()) };
        out.reserve((rows * (3 * columns + 1)) as usize);
        let (width, height) = (near(size.w(), columns.into()), near(size.h(), rows.into()));
        let tokens = slices.features(width / f64::from(columns), height / f64::from(rows), true);
        for row in 0..rows {
            if row > 0 {
                out.push(&[line]);
            }
            for _ in 0..columns {
                out.push(&[slice]);
                out.features(pad, tokens);
                out.push(&[slice_end]);
            }
        }
        Ok(())
    }))
}

/// The nearest multiple of `step`, at least one.
fn near(value: f64, step: f64) -> f64 {
    ((value / step).round_ties_even() * step).max(step)
}

impl Slices {
    fn from_fields(fields: &Fields<'_>) -> Result<Self, ConfigError> {
        let image = &fields.image;
        image.expect_flag("/slice_mode", true)?;
        image.expect_flag("/use_image_id", true)?;
        let mode = "/downsample_mode";
        let divisor = match image.text(mode)?.or(fields.config.text(mode)?).unwrap_or("16x") {
            "16x" => 16,
            "4x" => 4,
            _ => return Err(image.invalid(mode, "16x or 4x")),
        };
        let most = image.size("/max_slice_nums")?.unwrap_or(9);
        if most > SLICES_MAX {
            return Err(image.invalid("/max_slice_nums", "at most 64"));
        }
        let counts = |wanted: u32| (wanted.max(2) - 1..=wanted + 1).filter(move |&n| n != 1 && n <= most);
        let way = |rows: u32, n: u32| (rows, n / rows, (f64::from(n / rows) / f64::from(rows)).ln());
        let all = |n: u32| (1..=n).filter(move |rows| n.is_multiple_of(*rows)).map(move |rows| way(rows, n));
        let ways = (0..=most).map(|wanted| counts(wanted).flat_map(all).collect()).collect();
        let side = f64::from(image.size("/scale_resolution")?.unwrap_or(448));
        Ok(Self { side, patch: f64::from(image.size("/patch_size")?.unwrap_or(14)), divisor, ways })
    }

    /// Rows and columns of slices; none for an image of about one slice's area.
    fn pick(&self, size: Size) -> Option<(u32, u32)> {
        let wanted = (size.w() * size.h() / (self.side * self.side)).ceil() as usize;
        let wanted = wanted.min(self.ways.len() - 1);
        if wanted <= 1 {
            return None;
        }
        let ratio = (size.w() / size.h()).ln();
        let (mut best, mut least) = ((1, 1), f64::INFINITY);
        for &(rows, columns, way) in &self.ways[wanted] {
            let error = (ratio - way).abs();
            if error < least || (error == least && rows > best.0) {
                (best, least) = ((rows, columns), error);
            }
        }
        Some(best)
    }

    /// Features of a view; with `scale`, or when larger than a slice, it is first brought to a slice's area.
    fn features(&self, mut width: f64, mut height: f64, scale: bool) -> u64 {
        if scale || width * height > self.side * self.side {
            let ratio = width / height;
            height = (self.side / ratio.sqrt()).trunc();
            width = (height * ratio).trunc();
        }
        let unit = self.patch * 4.0;
        let patches = |side: f64| (near(side, unit) / self.patch).floor() as u64;
        patches(height) * patches(width) / self.divisor
    }
}
