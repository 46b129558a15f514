//! FLAC: the first metadata block.

use super::bytes::{be16, be64};
use super::{AudioFacts, Container, File, Problem, millis};

pub(super) fn audio(file: File<'_>) -> Result<AudioFacts, Problem> {
    const INFO: Problem = Problem::Ends("its stream info");
    // Name, then type and length of the block; the type is 0, under a bit that says it is the last.
    if file.bytes.get(4).ok_or(INFO)? & 0x7f != 0 {
        return Err(Problem::Invalid("stream info"));
    }
    be16(file.bytes, 8).ok_or(INFO)?;
    // 20 bits of rate, 3 of channels less one, 5 of depth, 36 of samples.
    let packed = be64(file.bytes, 18).ok_or(INFO)?;
    let (sample_rate, samples) = ((packed >> 44) as u32, packed & 0x000f_ffff_ffff);
    let samples = Some(samples).filter(|&samples| samples > 0);
    Ok(AudioFacts {
        container: Container::Flac,
        sample_rate,
        channels: (packed >> 41 & 7) as u16 + 1,
        samples,
        duration_ms: samples.and_then(|samples| millis(samples, sample_rate.into())),
        estimated: false,
    })
}
