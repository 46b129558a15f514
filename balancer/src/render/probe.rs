//! What renderers are asked: the shortest chat with one blank image of the wanted size.

use fovea_media::data_url;
use serde_json::{Value, json};

use super::align::Own;
use super::standing::Page;
use crate::prepare::Preparer;

/// A probe, and what our own template makes of it.
pub struct Probe {
    url: String,
    pub own: Own,
    /// Our tokens of the same chat with the image twice, before expansion.
    pub own_pair: Vec<u32>,
}

impl Probe {
    /// CPU work: up to 8 MB of blank pixels are encoded. `None` when our template does not tell where the image goes.
    pub fn new(preparer: &Preparer, width: u32, height: u32) -> Option<Self> {
        let url = data_url::encode(&png(width, height));
        // The size does not enter before expansion.
        let image = json!({"type": "image_url", "image_url": {"url": data_url::encode(&png(1, 1))}});
        let tokens_of = |parts: &[Value]| preparer.unexpanded(&chat("", parts).to_string());
        let (own_pair, _) = tokens_of(&[image.clone(), image.clone()])?;
        let (tokens, image_token) = tokens_of(&[image])?;
        let (without, _) = tokens_of(&[json!({"type": "text", "text": ""})])?;
        Some(Self { url, own: Own::new(tokens, &without, image_token)?, own_pair })
    }

    /// Path and body of the request to an engine that serves `model`, with the image once or several times.
    pub fn request(&self, page: Page, model: &str, images: usize) -> (&'static str, String) {
        let image = json!({"type": "image_url", "image_url": {"url": self.url}});
        let mut body = chat(model, &vec![image; images]);
        match page {
            Page::Tokenize => ("/tokenize", body.to_string()),
            Page::Render => {
                // Leaves the processed pixels out of the answer.
                body["mm_payload"] = json!("none");
                ("/v1/chat/completions/render", body.to_string())
            }
        }
    }
}

fn chat(model: &str, parts: &[Value]) -> Value {
    json!({"model": model, "messages": [{"role": "user", "content": parts}]})
}

/// A black PNG of one bit a pixel: some thousand bytes for a million pixels.
fn png(width: u32, height: u32) -> Vec<u8> {
    let mut file = b"\x89PNG\r\n\x1a\n".to_vec();
    let mut header = [width.to_be_bytes(), height.to_be_bytes()].concat();
    header.extend([1, 0, 0, 0, 0]);
    chunk(&mut file, *b"IHDR", &header);
    // Each row begins with its filter, none.
    let bytes = u64::from(height) * (1 + u64::from(width.div_ceil(8)));
    chunk(&mut file, *b"IDAT", &zeros(bytes));
    chunk(&mut file, *b"IEND", b"");
    file
}

fn chunk(file: &mut Vec<u8>, kind: [u8; 4], data: &[u8]) {
    file.extend(u32::try_from(data.len()).unwrap_or(u32::MAX).to_be_bytes());
    let start = file.len();
    file.extend(kind);
    file.extend(data);
    let crc = file[start..].iter().fold(u32::MAX, |crc, byte| {
        (0..8).fold(crc ^ u32::from(*byte), |crc, _| (crc >> 1) ^ (0xedb8_8320 & (crc & 1).wrapping_neg()))
    });
    file.extend((!crc).to_be_bytes());
}

/// `count` zero bytes as a zlib stream (RFC 1950, 1951): one block of fixed codes, a literal repeated by matches of 258 bytes.
fn zeros(count: u64) -> Vec<u8> {
    let mut bits = Bits { bytes: vec![0x78, 0x01], bit: 0 };
    bits.push(0b1, 1);
    bits.push(0b10, 2);
    let matches = count.saturating_sub(1) / 258;
    let literals = count - matches * 258;
    (0..literals).for_each(|_| bits.push(0b0011_0000, 8));
    // Length 258 (8 bits), distance 1 (5 bits).
    (0..matches).for_each(|_| {
        bits.push(0b1100_0101, 8);
        bits.push(0, 5);
    });
    bits.push(0, 7);
    // Adler-32 of zeros.
    bits.bytes.extend((((count % 65_521) as u32) << 16 | 1).to_be_bytes());
    bits.bytes
}

/// Bits in the order of DEFLATE's codes: the first one goes to the lowest free bit.
struct Bits {
    bytes: Vec<u8>,
    /// Bits used of the last byte; 0 = none is begun.
    bit: u8,
}

impl Bits {
    /// The lowest `count` bits of `code`, the highest of them first.
    fn push(&mut self, code: u32, count: u8) {
        for place in (0..count).rev() {
            if self.bit == 0 {
                self.bytes.push(0);
            }
            if let Some(last) = self.bytes.last_mut() {
                *last |= u8::from(code >> place & 1 == 1) << self.bit;
            }
            self.bit = (self.bit + 1) % 8;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use fovea_media::header;

    use super::*;
    use crate::prepare::ClientUuid;

    const MODEL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/vectors/vllm/tiny-qwen3-vl");

    #[test]
    fn a_blank_image_has_its_size_and_few_bytes() {
        for (width, height, most) in
            [(1, 1, 80), (448, 320, 400), (1000, 1000, 1200), (1, 60_000, 1200), (8192, 8192, 60_000)]
        {
            let file = png(width, height);
            let header = header::read(&file).unwrap();
            assert_eq!((header.width, header.height), (width, height));
            assert!(file.len() <= most, "{width}x{height}: {} bytes", file.len());
        }
    }

    /// As written by a few lines of Python, whose zlib and PIL read them.
    #[test]
    fn files_are_those_that_other_programs_read() {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect::<String>();
        assert_eq!(
            hex(&zeros(600)),
            "78016360606060606060606060606060606060606060606060606060606060606060606060606060606060606060606060606060606060606060606060606060606060606060606060606060606060606060606060601805a3000002580001"
        );
        assert_eq!(
            hex(&png(20, 3)),
            "89504e470d0a1a0a0000000d4948445200000014000000030100000000bb211283000000144944415478016360606060606060606060600000000c0001717945bb0000000049454e44ae426082"
        );
    }

    #[test]
    fn a_probe_knows_where_its_image_goes() {
        let preparer = Preparer::load(Path::new(MODEL), ClientUuid::Replace).unwrap();
        let probe = Probe::new(&preparer, 448, 320).unwrap();
        assert_eq!(probe.own_pair.iter().filter(|token| **token == 593).count(), 2);
        let Own { tokens, written, image_token } = &probe.own;
        assert_eq!(*image_token, Some(593));
        // Start mark, placeholder, end mark.
        assert_eq!(tokens[written.clone()], [590, 593, 591]);
        for page in [Page::Render, Page::Tokenize] {
            let (_, body) = probe.request(page, "m", 1);
            let body: Value = serde_json::from_str(&body).unwrap();
            let file =
                data_url::decode(body["messages"][0]["content"][0]["image_url"]["url"].as_str().unwrap()).unwrap();
            assert_eq!(header::read(&file).map(|header| (header.width, header.height)), Ok((448, 320)));
            assert_eq!((&body["model"], body["mm_payload"] == "none"), (&json!("m"), page == Page::Render));
        }
    }
}
