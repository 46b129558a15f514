//! A small picture made in memory.

/// Width and height in pixels.
pub const SIDE: usize = 64;
/// Pixels to a tile's side.
const TILE: usize = 8;

/// An RGB PNG of 64 × 64 pixels, 8 × 8 tiles coloured by the seed: other seeds give other pixels, so that no cache knows it.
pub fn png(seed: [u8; 32]) -> Vec<u8> {
    let mut rows = Vec::with_capacity(SIDE * (1 + 3 * SIDE));
    for y in 0..SIDE {
        rows.push(0); // No filter.
        for x in 0..SIDE {
            let tile = y / TILE * (SIDE / TILE) + x / TILE;
            rows.extend((0..3).map(|channel| seed[(tile + 11 * channel) % seed.len()].wrapping_add(tile as u8)));
        }
    }
    let side = (SIDE as u32).to_be_bytes();
    let header = [&side[..], &side[..], &[8, 2, 0, 0, 0]].concat();
    let mut file = b"\x89PNG\r\n\x1a\n".to_vec();
    chunk(&mut file, *b"IHDR", &header);
    chunk(&mut file, *b"IDAT", &stored(&rows));
    chunk(&mut file, *b"IEND", &[]);
    file
}

fn chunk(file: &mut Vec<u8>, kind: [u8; 4], data: &[u8]) {
    file.extend((data.len() as u32).to_be_bytes());
    let start = file.len();
    file.extend(kind);
    file.extend(data);
    let sum = crc32(&file[start..]);
    file.extend(sum.to_be_bytes());
}

/// Data as a zlib stream of one stored block, which holds up to 65 535 bytes.
fn stored(data: &[u8]) -> Vec<u8> {
    let length = data.len() as u16;
    let mut out = vec![0x78, 0x01, 0x01];
    out.extend(length.to_le_bytes());
    out.extend((!length).to_le_bytes());
    out.extend(data);
    out.extend(adler32(data).to_be_bytes());
    out
}

fn crc32(data: &[u8]) -> u32 {
    let step = |crc: u32, _| if crc & 1 == 1 { crc >> 1 ^ 0xedb8_8320 } else { crc >> 1 };
    !data.iter().fold(u32::MAX, |crc, &byte| (0..8).fold(crc ^ u32::from(byte), step))
}

fn adler32(data: &[u8]) -> u32 {
    let (a, b) = data.iter().fold((1, 0), |(a, b), &byte| {
        let a = (a + u32::from(byte)) % 65_521;
        (a, (b + a) % 65_521)
    });
    b << 16 | a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sums_are_those_of_their_standards() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926);
        assert_eq!(adler32(b"Wikipedia"), 0x11e6_0398);
    }

    #[test]
    fn other_seeds_give_other_pictures_of_one_form() {
        let (a, b) = (png([1; 32]), png([2; 32]));
        assert_ne!(a, b);
        assert_eq!(&a[..8], b"\x89PNG\r\n\x1a\n");
        assert_eq!(a[16..29], [0, 0, 0, 64, 0, 0, 0, 64, 8, 2, 0, 0, 0]);
        assert_eq!(a.len(), b.len());
    }
}
