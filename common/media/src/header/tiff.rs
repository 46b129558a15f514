//! TIFF and BigTIFF: the first directory. Pillow transposes on open, so the size is upright already.

use super::ifd::{
    BITS, COMPRESSION, EXTRA_SAMPLES, FILL_ORDER, HEIGHT, Ifd, PHOTOMETRIC, PLANAR, SAMPLE_FORMAT, SAMPLES, WIDTH, XMP,
};
use super::{Problem, Seen, orientation};

/// Most samples per pixel that Pillow decodes.
const SAMPLES_MAX: usize = 6;

pub(super) fn read(bytes: &[u8]) -> Result<Seen, Problem> {
    if super::ifd::is_wide_big_endian(bytes) {
        return Err(Problem::Invalid("byte order (big-endian BigTIFF)"));
    }
    let ifd = Ifd::read(bytes)?;
    let side = |tag, field| ifd.number(tag).and_then(|side| u32::try_from(side).ok()).ok_or(Problem::Invalid(field));
    let (width, height) = (side(WIDTH, "width")?, side(HEIGHT, "height")?);
    let turned = match orientation::in_ifd(&ifd) {
        Some(value) => value >= 5,
        None => ifd.data(XMP).and_then(orientation::search_xmp).is_some_and(|value| (5..=8).contains(&value)),
    };
    let (width, height) = if turned { (height, width) } else { (width, height) };
    Ok(Seen { width, height, rgb: is_rgb(&ifd)?, orientation: 1 })
}

/// Whether Pillow's table of pixel layouts gives mode RGB.
fn is_rgb(ifd: &Ifd<'_>) -> Result<bool, Problem> {
    let values = |tag| ifd.numbers(tag).map(|all| all.take(SAMPLES_MAX + 1).collect::<Vec<_>>());
    let compression = ifd.number(COMPRESSION).unwrap_or(1);
    // Old-style JPEG is always YCbCr.
    let photometric = if compression == 6 { 6 } else { ifd.number(PHOTOMETRIC).unwrap_or(0) };
    let mut bits = values(BITS).unwrap_or_else(|| vec![1]);
    let mut extra = values(EXTRA_SAMPLES).unwrap_or_default();
    let default_samples = if compression == 6 { 3 } else { 1 };
    let mut samples = ifd.number(SAMPLES).unwrap_or(default_samples);
    if ifd.number(PLANAR) == Some(2) && !extra.is_empty() && extra.iter().all(|&kind| kind == 0) {
        // Extra components in planes of their own, at the end, are ignored.
        bits.truncate(bits.len().saturating_sub(extra.len()));
        samples = samples.saturating_sub(extra.len() as u64);
        extra.clear();
    }
    let samples = usize::try_from(samples).ok().filter(|&samples| samples <= SAMPLES_MAX);
    let samples = samples.ok_or(Problem::Invalid("samples per pixel"))?;
    match bits.as_slice() {
        &[one] if samples > 1 => bits = vec![one; samples],
        _ => bits.truncate(samples),
    }
    if bits.len() != samples {
        return Err(Problem::Invalid("bits per sample"));
    }
    let unsigned = values(SAMPLE_FORMAT).is_none_or(|formats| formats.iter().all(|&format| format == 1));
    let reversed = ifd.number(FILL_ORDER).unwrap_or(1) == 2;
    let all_bits = |depth| bits.iter().all(|&bits| bits == depth);
    Ok(unsigned
        && match photometric {
            2 if all_bits(8) => {
                samples == 3 + extra.len()
                    && samples >= 3
                    && extra.iter().all(|&kind| kind == 0)
                    && !(reversed && samples > 3)
            }
            2 if all_bits(16) => samples == 3 + extra.len() && extra.iter().all(|&kind| kind == 0) && samples <= 4,
            // YCbCr: libtiff unpacks every compressed form to RGB.
            6 => compression != 1 && all_bits(8) && (samples == 3 || samples == 1),
            _ => false,
        })
}
