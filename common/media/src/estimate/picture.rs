//! Size of a picture in a `data:` URL, as Go's standard library finds it: PNG, JPEG and GIF, from as few bytes as needed.

/// (width, height) in pixels. `None` when llm-d would take its default.
pub fn size_of_data_url(url: &str) -> Option<(u32, u32)> {
    let payload = url.strip_prefix("data:image/")?.split_once("base64,")?.1;
    let mut bytes = Decoder::new(payload);
    let size = match bytes.array()? {
        [0x89, b'P'] => png(&mut bytes),
        [b'G', b'I'] => gif(&mut bytes),
        [0xff, 0xd8] => jpeg(&mut bytes),
        _ => None,
    };
    size.filter(|&(width, height)| width > 0 && height > 0)
}

/// Bytes of a base64 text, up to the first that is not; line ends are skipped.
struct Decoder<'a> {
    text: std::iter::Filter<std::str::Bytes<'a>, fn(&u8) -> bool>,
    ready: [u8; 3],
    /// Of `ready`: next and end.
    at: usize,
    end: usize,
}

impl<'a> Decoder<'a> {
    fn new(text: &'a str) -> Self {
        let kept: fn(&u8) -> bool = |byte| *byte != b'\n' && *byte != b'\r';
        Self { text: text.bytes().filter(kept), ready: [0; 3], at: 0, end: 0 }
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        let mut out = [0; N];
        for byte in &mut out {
            *byte = self.next()?;
        }
        Some(out)
    }
}

impl Iterator for Decoder<'_> {
    type Item = u8;

    fn next(&mut self) -> Option<u8> {
        if self.at == self.end {
            (self.at, self.end) = (0, 0);
            let mut quantum = [0; 4];
            for symbol in &mut quantum {
                *symbol = self.text.next()?;
            }
            let padding = match quantum {
                [_, _, b'=', b'='] => 2,
                [_, _, _, b'='] => 1,
                _ => 0,
            };
            let mut bits = 0;
            for &symbol in &quantum[..4 - padding] {
                bits = bits << 6 | value(symbol)?;
            }
            let [_, ready @ ..] = (bits << (6 * padding)).to_be_bytes();
            (self.ready, self.end) = (ready, 3 - padding);
            if padding > 0 {
                // Nothing counts behind the end.
                while self.text.next().is_some() {}
            }
        }
        self.at += 1;
        Some(self.ready[self.at - 1])
    }
}

fn value(symbol: u8) -> Option<u32> {
    Some(u32::from(match symbol {
        b'A'..=b'Z' => symbol - b'A',
        b'a'..=b'z' => symbol - b'a' + 26,
        b'0'..=b'9' => symbol - b'0' + 52,
        b'+' => 62,
        b'/' => 63,
        _ => return None,
    }))
}

fn png(bytes: &mut Decoder<'_>) -> Option<(u32, u32)> {
    let rest: [u8; 6] = bytes.array()?;
    let length: [u8; 4] = bytes.array()?;
    let header: [u8; 17] = bytes.array()?;
    let checksum = u32::from_be_bytes(bytes.array()?);
    let intact = &rest == b"NG\r\n\x1a\n" && length == [0, 0, 0, 13] && header.starts_with(b"IHDR");
    if !intact || crate::header::crc32(&header) != checksum {
        return None;
    }
    let side = |at: usize| Some(u32::from_be_bytes(header[at..at + 4].try_into().ok()?));
    // Negative as the signed number that Go reads.
    let fits = |side: &u32| i32::try_from(*side).is_ok();
    Some((side(4).filter(fits)?, side(8).filter(fits)?))
}

fn gif(bytes: &mut Decoder<'_>) -> Option<(u32, u32)> {
    let version: [u8; 4] = bytes.array()?;
    let [w0, w1, h0, h1, flags, _, _] = bytes.array()?;
    if !matches!(&version, b"F87a" | b"F89a") {
        return None;
    }
    let table = if flags & 0x80 == 0 { 0 } else { 3_usize << ((flags & 7) + 1) };
    if table > 0 {
        bytes.nth(table - 1)?;
    }
    Some((u16::from_le_bytes([w0, w1]).into(), u16::from_le_bytes([h0, h1]).into()))
}

fn jpeg(bytes: &mut Decoder<'_>) -> Option<(u32, u32)> {
    loop {
        let mut marker = 0;
        while marker == 0 {
            while bytes.next()? != 0xff {}
            marker = bytes.find(|&byte| byte != 0xff)?;
        }
        match marker {
            // Restarts stand alone.
            0xd0..=0xd7 => continue,
            0xd9 | 0xda => return None,
            _ => {}
        }
        let length = usize::from(u16::from_be_bytes(bytes.array()?)).checked_sub(2)?;
        match marker {
            // One, three or four components of 8 bits.
            0xc0..=0xc2 if matches!(length, 9 | 15 | 18) => {
                let [depth, h0, h1, w0, w1, _] = bytes.array()?;
                let size = (u16::from_be_bytes([w0, w1]).into(), u16::from_be_bytes([h0, h1]).into());
                return (depth == 8).then_some(size);
            }
            // Tables, application data, comments.
            0xc4 | 0xdb | 0xdd | 0xe0..=0xef | 0xfe if length > 0 => {
                bytes.nth(length - 1)?;
            }
            0xc4 | 0xdb | 0xdd | 0xe0..=0xef | 0xfe => {}
            _ => return None,
        }
    }
}
