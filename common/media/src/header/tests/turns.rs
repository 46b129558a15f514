//! Which metadata turn a picture: each row was compared with Pillow 13.0.0.

use super::*;

const XMP: &[u8] = b"http://ns.adobe.com/xap/1.0/\0";

fn vector(name: &str) -> Vec<u8> {
    std::fs::read(images().join(name)).unwrap()
}

/// A little-endian TIFF block with these 12-byte entries: (tag, type, count, value or offset).
fn block(entries: &[(u16, u16, u32, u32)]) -> Vec<u8> {
    let mut block = b"II*\0\x08\0\0\0".to_vec();
    block.extend(u16::try_from(entries.len()).unwrap().to_le_bytes());
    for (tag, kind, count, value) in entries {
        block.extend([tag.to_le_bytes(), kind.to_le_bytes()].concat());
        block.extend([count.to_le_bytes(), value.to_le_bytes()].concat());
    }
    block.extend([0; 4]);
    block
}

fn turn(value: u32) -> (u16, u16, u32, u32) {
    (0x112, 3, 1, value)
}

/// `base.jpg` with these APP1 segments.
fn jpeg(segments: &[Vec<u8>]) -> Vec<u8> {
    let base = vector("base.jpg");
    let mut file = base[..2].to_vec();
    for segment in segments {
        file.extend([0xff, 0xe1]);
        file.extend(u16::try_from(segment.len() + 2).unwrap().to_be_bytes());
        file.extend(segment);
    }
    file.extend(&base[2..]);
    file
}

/// `rgb.png` with this chunk after the header. Its checksum is not looked at.
fn png(name: &[u8; 4], body: &[u8]) -> Vec<u8> {
    let base = vector("rgb.png");
    let length = u32::try_from(body.len()).unwrap().to_be_bytes();
    [&base[..33], &length, name, body, &[0; 4], &base[33..]].concat()
}

fn exif(block: &[u8]) -> Vec<u8> {
    [b"Exif\0\0", block].concat()
}

fn xmp(value: &str) -> Vec<u8> {
    [XMP, format!("<x tiff:Orientation=\"{value}\"/>").as_bytes()].concat()
}

#[track_caller]
fn check(file: &[u8], orientation: u8) {
    assert_eq!(read(file).unwrap().orientation, orientation);
}

#[test]
fn whole_numbers_count_and_bytes_do_not() {
    for (kind, expect) in [(1, 1), (2, 1), (3, 6), (4, 6), (5, 1), (6, 6), (7, 1), (8, 6), (9, 6), (13, 6), (14, 1)] {
        check(&jpeg(&[exif(&block(&[(0x112, kind, 1, 6)]))]), expect);
    }
    for (value, expect) in [(0, 1), (1, 1), (2, 2), (8, 8), (9, 1), (65_535, 1)] {
        check(&jpeg(&[exif(&block(&[turn(value)]))]), expect);
    }
}

#[test]
fn the_first_tag_and_the_first_segment_count() {
    check(&jpeg(&[exif(&block(&[turn(1), turn(6)]))]), 1);
    check(&jpeg(&[exif(&block(&[turn(6)])), exif(&block(&[turn(1)]))]), 6);
    check(&jpeg(&[exif(b""), exif(&block(&[turn(6)]))]), 6);
    check(&jpeg(&[exif(&exif(&block(&[turn(6)])))]), 6);
}

#[test]
fn damage_ends_the_directory_but_keeps_what_came_before() {
    let outside = (0x10f, 2, 10, 1000);
    check(&jpeg(&[exif(&block(&[turn(6), outside]))]), 6);
    check(&jpeg(&[exif(&block(&[outside, turn(6)]))]), 1);
    // A value longer than the block is skipped alone.
    check(&jpeg(&[exif(&block(&[(0x10f, 2, u32::MAX, 8), turn(6)]))]), 6);
}

#[test]
fn xmp_counts_only_without_an_exif_tag_and_with_a_readable_header() {
    check(&jpeg(&[xmp("6")]), 6);
    check(&jpeg(&[xmp("1"), xmp("6")]), 6);
    check(&jpeg(&[xmp("x"), xmp("9")]), 1);
    check(&jpeg(&[exif(&block(&[])), xmp("6")]), 6);
    check(&jpeg(&[exif(b""), xmp("6")]), 6);
    check(&jpeg(&[exif(&block(&[turn(1)])), xmp("6")]), 1);
    check(&jpeg(&[exif(&block(&[(0x112, 1, 1, 6)])), xmp("6")]), 1);
    check(&jpeg(&[exif(b"XX*\0\x08\0\0\0"), xmp("6")]), 1);
    check(&jpeg(&[exif(b"II*\0\x08"), xmp("6")]), 1);
    check(&jpeg(&[exif(b"II+\0\x08\0\0\0\x10\0\0\0\0\0\0\0"), xmp("6")]), 1);
}

#[test]
fn png_texts_are_honoured() {
    let hex = block(&[turn(6)]).iter().map(|byte| format!("{byte:02x}")).collect::<String>();
    let raw = |value: String| [b"Raw profile type exif\0", format!("\nexif\n 26\n{value}").as_bytes()].concat();
    check(&png(b"tEXt", &raw(hex.clone())), 6);
    check(&png(b"tEXt", &raw(format!("{}\n{}", &hex[..7], &hex[7..]))), 6);
    check(&png(b"tEXt", &raw(format!("{} {}", &hex[..8], &hex[8..]))), 6);
    check(&png(b"tEXt", &raw(format!("{} {}", &hex[..7], &hex[7..]))), 1);
    check(&png(b"tEXt", b"XML:com.adobe.xmp\0tiff:Orientation>6"), 6);
    check(&png(b"tEXt", &[b"exif\0", &*block(&[turn(6)])].concat()), 6);
    let deflated = miniz_oxide::deflate::compress_to_vec_zlib(b"tiff:Orientation=\"6", 6);
    check(&png(b"zTXt", &[b"XML:com.adobe.xmp\0\0", &*deflated].concat()), 6);
    check(&png(b"iTXt", &[b"XML:com.adobe.xmp\0\x01\0\0\0", &*deflated].concat()), 6);
    // Cut short: what was inflated counts. Damaged: nothing does.
    check(&png(b"zTXt", &[b"XML:com.adobe.xmp\0\0", &deflated[..deflated.len() - 3]].concat()), 6);
    check(&png(b"zTXt", b"XML:com.adobe.xmp\0\0abcdefgh"), 1);
}

#[test]
fn the_second_frame_of_an_animation_ends_the_search() {
    let base = vector("anim.png");
    let exif = |at: usize| {
        let body = block(&[turn(6)]);
        let length = u32::try_from(body.len()).unwrap().to_be_bytes();
        [&base[..at], &length, b"eXIf", &*body, &[0; 4], &base[at..]].concat()
    };
    let find = |name: &[u8; 4]| base.windows(4).rposition(|window| window == name).unwrap() - 4;
    check(&exif(find(b"fcTL")), 6);
    check(&exif(find(b"IEND")), 1);
}

#[test]
fn webp_metadata_need_their_flag() {
    let mut file = vector("exif6.webp");
    check(&file, 6);
    file[20] &= !8;
    check(&file, 1);
}
