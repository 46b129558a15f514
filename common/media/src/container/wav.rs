//! WAV: `fmt ` and the length of `data`.

use super::bytes::{index, le16, le32, riff};
use super::{AudioFacts, Container, File, Problem, millis};

/// Formats whose samples all have the block's size: PCM, float, A-law, µ-law, extensible.
const EVEN: [u16; 5] = [1, 3, 6, 7, 0xfffe];

pub(super) fn audio(file: File<'_>) -> Result<AudioFacts, Problem> {
    const FORMAT: Problem = Problem::Ends("its format");
    let chunks = file.bytes.get(12..).unwrap_or_default();
    let body = |wanted: &[u8; 4]| riff(chunks).find(|(name, _)| name == wanted).map(|(_, body)| body);
    let format = body(b"fmt ").ok_or(FORMAT)?;
    let field = |at| le16(format, at).ok_or(FORMAT);
    let sample_rate = le32(format, 4).ok_or(FORMAT)?;
    let samples = match EVEN.contains(&field(0)?) {
        true => data_bytes(file, chunks).and_then(|bytes| bytes.checked_div(field(12).ok()?.into())),
        false => body(b"fact").and_then(|fact| le32(fact, 0)).map(u64::from),
    };
    Ok(AudioFacts {
        container: Container::Wav,
        sample_rate,
        channels: field(2)?,
        samples,
        duration_ms: samples.and_then(|samples| millis(samples, sample_rate.into())),
        estimated: false,
    })
}

/// Bytes of `data`: as announced, but not beyond the end of a whole file.
fn data_bytes(file: File<'_>, chunks: &[u8]) -> Option<u64> {
    let mut at = 0;
    for (name, body) in riff(chunks) {
        let announced = le32(chunks, at + 4)?;
        if &name == b"data" {
            // Writers that cannot seek leave no length.
            let open = announced == 0 || announced == u32::MAX;
            let held = file.whole.then_some(if open { chunks.len() - at - 8 } else { body.len() });
            return held.map(|held| held as u64).or((!open).then_some(announced.into()));
        }
        at = at.saturating_add(8).saturating_add(index(announced)).saturating_add(index(announced & 1));
    }
    None
}
