//! Which pixels are converted: each row was compared with Pillow 13.0.0.

use super::*;

#[track_caller]
fn check(file: &[u8], converted: bool) {
    assert_eq!(read(file).map(|header| header.converted), Ok(converted));
}

fn changed(name: &str, at: usize, change: impl Fn(u8) -> u8) -> Vec<u8> {
    let mut file = std::fs::read(images().join(name)).unwrap();
    file[at] = change(file[at]);
    file
}

#[test]
fn every_sample_that_is_not_rgb_is_converted() {
    let converted = [
        "anim.gif",
        "bigendian.tiff",
        "cmyk.jpg",
        "gray.jpg",
        "gray.png",
        "i16.png",
        "one.gif",
        "palette.png",
        "rgba.png",
        "small_frame.gif",
    ];
    for row in rows().iter().filter(|row| row["vllm"]["accepted"] == true) {
        let name = row["file"].as_str().unwrap();
        assert_eq!(read(&file(row)).unwrap().converted, converted.contains(&name), "{name}");
    }
}

/// A bitmap of 4 x 3 with this depth, compression and masks.
fn bmp(bits: u16, compression: u32, masks: &[u32], header: u32) -> Vec<u8> {
    let mut file = b"BM\0\0\0\0\0\0\0\0\0\0\0\0".to_vec();
    [header, 4, 3].iter().for_each(|value| file.extend(value.to_le_bytes()));
    file.extend([1_u16.to_le_bytes(), bits.to_le_bytes()].concat());
    file.extend(compression.to_le_bytes());
    file.extend([0; 20]);
    masks.iter().for_each(|mask| file.extend(mask.to_le_bytes()));
    file.resize(14 + 124, 0);
    file
}

#[test]
fn bitmaps_with_a_palette_or_alpha_masks_are_converted() {
    for (bits, expect) in [(1, true), (4, true), (8, true), (16, false), (24, false), (32, false)] {
        check(&bmp(bits, 0, &[], 40), expect);
        check(&bmp(bits, 0, &[], 40)[14..], expect);
    }
    let (red, green, blue, alpha) = (0x00ff_0000, 0xff00, 0xff, 0xff00_0000);
    check(&bmp(32, 3, &[red, green, blue, 0], 124), false);
    check(&bmp(32, 3, &[red, green, blue, alpha], 124), true);
    // Headers under 56 bytes have no alpha mask.
    check(&bmp(32, 3, &[red, green, blue, alpha], 40), false);
    check(&bmp(32, 3, &[0, 0, 0, 0], 40), true);
}

#[test]
fn webp_alpha_is_that_of_the_bit_stream() {
    check(&changed("exif6.webp", 20, |flags| flags | 0x10), true);
    // Lossless frames say it themselves, whatever the container says.
    check(&changed("exif6_lossless.webp", 20, |flags| flags | 0x10), false);
    check(&changed("anim.webp", 20, |flags| flags | 0x10), true);
}
