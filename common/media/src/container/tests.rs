use proptest::prelude::*;

use super::*;

fn boxed(name: &[u8; 4], body: &[u8]) -> Vec<u8> {
    let length = u32::try_from(body.len() + 8).unwrap();
    [&length.to_be_bytes()[..], name, body].concat()
}

fn words(numbers: &[u32]) -> Vec<u8> {
    numbers.iter().flat_map(|number| number.to_be_bytes()).collect()
}

/// An MP4 file of one picture track: 64x48, 600 units per second, pairs of (samples, units), and an edit list.
fn mp4(times: &[(u32, u32)], edits: &[u8]) -> Vec<u8> {
    let handler = boxed(b"hdlr", &[&words(&[0, 0]), &b"vide"[..], &[0; 13]].concat());
    let clock = boxed(b"mdhd", &words(&[0, 0, 0, 600, 1200, 0]));
    let size = [&[0, 64, 0, 48][..], &[0; 50]].concat();
    let entry = boxed(b"avc1", &[&[0; 24][..], &size].concat());
    let described = boxed(b"stsd", &[words(&[0, 1]), entry].concat());
    let pairs: Vec<u32> = times.iter().flat_map(|&(count, units)| [count, units]).collect();
    let timed = boxed(b"stts", &[words(&[0, times.len() as u32]), words(&pairs)].concat());
    let tables = boxed(b"minf", &boxed(b"stbl", &[described, timed].concat()));
    let media = boxed(b"mdia", &[clock, handler, tables].concat());
    let matrix = words(&[0x1_0000, 0, 0, 0, 0x1_0000, 0, 0, 0, 0x4000_0000, 64 << 16, 48 << 16]);
    let header = boxed(b"tkhd", &[words(&[0; 10]), matrix].concat());
    let edits = if edits.is_empty() { Vec::new() } else { boxed(b"edts", &boxed(b"elst", edits)) };
    let track = boxed(b"trak", &[header, edits, media].concat());
    let movie = boxed(b"mvhd", &words(&[0, 0, 0, 1000, 2000, 0]));
    [boxed(b"ftyp", b"isom\0\0\0\0"), boxed(b"moov", &[movie, track].concat()), boxed(b"mdat", &[0; 64])].concat()
}

/// An element with its size in eight bytes, or without.
fn sized(id: &[u8], body: &[u8], known: bool) -> Vec<u8> {
    let size = if known { body.len() as u64 | 1 << 56 } else { u64::MAX >> 7 };
    [id, &size.to_be_bytes(), body].concat()
}

/// A WebM file of `blocks` frames of 40 ms in one cluster, `duration` in ms.
fn webm(blocks: usize, duration: Option<f64>, known: bool) -> Vec<u8> {
    spaced(blocks, 40, duration, known)
}

/// The same with frames that stand `spacing_ms` apart.
fn spaced(blocks: usize, spacing_ms: usize, duration: Option<f64>, known: bool) -> Vec<u8> {
    let leaf = |id: &[u8], body: &[u8]| sized(id, body, true);
    let video = leaf(&[0xe0], &[leaf(&[0xb0], &[64]), leaf(&[0xba], &[48])].concat());
    let period = leaf(&[0x23, 0xe3, 0x83], &40_000_000_u32.to_be_bytes());
    let track = leaf(&[0xae], &[leaf(&[0xd7], &[1]), leaf(&[0x83], &[1]), period, video].concat());
    let length = duration.map(|ms| leaf(&[0x44, 0x89], &ms.to_be_bytes())).unwrap_or_default();
    let info = leaf(&[0x15, 0x49, 0xa9, 0x66], &length);
    let block = |at: usize| {
        let [high, low] = u16::try_from(at * spacing_ms).unwrap().to_be_bytes();
        leaf(&[0xa3], &[0x81, high, low, 0x80, 1, 2, 3])
    };
    let pictures: Vec<u8> = (0..blocks).flat_map(block).collect();
    let cluster = sized(&[0x1f, 0x43, 0xb6, 0x75], &[leaf(&[0xe7], &[0]), pictures].concat(), known);
    let inside = [info, leaf(&[0x16, 0x54, 0xae, 0x6b], &track), cluster].concat();
    [leaf(&[0x1a, 0x45, 0xdf, 0xa3], &[]), sized(&[0x18, 0x53, 0x80, 0x67], &inside, known)].concat()
}

fn riff(kind: &[u8; 4], chunks: &[(&[u8; 4], Vec<u8>)]) -> Vec<u8> {
    let chunk = |(name, body): &(&[u8; 4], Vec<u8>)| {
        let padding = vec![0; body.len() & 1];
        [&name[..], &(body.len() as u32).to_le_bytes(), body, &padding].concat()
    };
    let body: Vec<u8> = chunks.iter().flat_map(chunk).collect();
    [&b"RIFF"[..], &(body.len() as u32 + 4).to_le_bytes(), kind, &body].concat()
}

fn wav(data: usize) -> Vec<u8> {
    let format = [&[1, 0, 2, 0][..], &8000_u32.to_le_bytes(), &32_000_u32.to_le_bytes(), &[4, 0, 16, 0]].concat();
    riff(b"WAVE", &[(b"fmt ", format), (b"data", vec![0; data])])
}

fn gif(delays: &[u16]) -> Vec<u8> {
    let frame = |delay: &u16| {
        let control = [&b"!\xf9\x04\0"[..], &delay.to_le_bytes(), &[0, 0]].concat();
        [control, b",\0\0\0\0\x40\0\x30\0\0\x02\x01\x44\0".to_vec()].concat()
    };
    let frames: Vec<u8> = delays.iter().flat_map(frame).collect();
    [b"GIF89a\x40\0\x30\0\0\0\0".to_vec(), frames, b";".to_vec()].concat()
}

fn mp3(frames: usize) -> Vec<u8> {
    // MPEG-1 layer III, 128 kbit/s, 44.1 kHz: 417 bytes.
    let frame = [&[0xff, 0xfb, 0x90, 0][..], &[0; 413]].concat();
    frame.repeat(frames)
}

#[track_caller]
fn check(file: &[u8], frames: Option<u32>, fps: Option<(u32, u32)>) {
    let facts = video(File::whole(file)).unwrap();
    assert_eq!((facts.width, facts.height), (64, 48));
    assert_eq!((facts.frames, facts.fps.map(|fps| (fps.numerator(), fps.denominator()))), (frames, fps));
}

#[test]
fn an_mp4_counts_its_time_table() {
    check(&mp4(&[(30, 20)], &[]), Some(30), Some((30, 1)));
    // Uneven frames: the mean.
    check(&mp4(&[(10, 20), (5, 80)], &[]), Some(15), Some((15, 1)));
    check(&mp4(&[], &[]), None, None);
    check(&mp4(&[(u32::MAX, u32::MAX), (u32::MAX, u32::MAX), (u32::MAX, 1)], &[]), None, None);
}

#[test]
fn an_edit_list_hides_frames() {
    let edit = |length, start: u32| words(&[0, 1, length, start, 0x1_0000]);
    check(&mp4(&[(30, 20)], &edit(1000, 100)), Some(25), Some((30, 1)));
    check(&mp4(&[(30, 20)], &edit(500, 0)), Some(15), Some((30, 1)));
    // vLLM takes one frame for a mistake of the header.
    check(&mp4(&[(30, 20)], &edit(1000, 20)), Some(30), Some((30, 1)));
    // A pause, nothing shown, two edits.
    check(&mp4(&[(30, 20)], &edit(1000, u32::MAX)), None, Some((30, 1)));
    check(&mp4(&[(30, 20)], &edit(0, 100)), None, Some((30, 1)));
    let two = words(&[0, 2, 500, 0, 0x1_0000, 500, 300, 0x1_0000]);
    check(&mp4(&[(30, 20)], &two), None, Some((30, 1)));
    // Too many frames to look at one by one.
    check(&mp4(&[(1 << 21, 20)], &edit(1000, 100)), None, Some((30, 1)));
}

#[test]
fn a_webm_is_counted_where_its_header_is_silent_or_agrees() {
    check(&webm(25, Some(1000.0), true), Some(25), Some((25, 1)));
    check(&webm(25, None, false), Some(25), Some((25, 1)));
    // Sound goes on after the pictures.
    check(&webm(5, Some(1000.0), true), Some(5), Some((25, 1)));
    // Frames that do not last as long as the header says.
    check(&spaced(5, 200, Some(1000.0), true), None, Some((25, 1)));
    check(&webm(25, Some(f64::MAX), true), None, Some((25, 1)));
    let whole = webm(25, Some(1000.0), true);
    let head = video(File::head(&whole[..whole.len() - 100])).unwrap();
    assert_eq!((head.frames, head.fps), (None, Rate::new(25, 1)));
}

#[test]
fn a_gif_without_delays_shows_ten_frames_per_second() {
    check(&gif(&[7, 7, 7]), Some(3), Some((100, 7)));
    check(&gif(&[0, 0]), Some(2), Some((10, 1)));
    check(&gif(&[7, 8]), Some(2), None);
}

#[test]
fn a_rate_is_the_nearest_with_small_numbers() {
    let nearest = |numerator, denominator| {
        Rate::nearest(numerator, denominator, 30_000).map(|rate| (rate.numerator(), rate.denominator()))
    };
    assert_eq!(nearest(1_000_000_000, 40_000_000), Some((25, 1)));
    assert_eq!(nearest(1_000_000_000, 33_366_667), Some((30_000, 1001)));
    assert_eq!(nearest(1_000_000_000, 41_708_333), Some((24_000, 1001)));
    assert_eq!(nearest(0, 5), None);
    assert_eq!(nearest(5, 0), None);
    assert_eq!(nearest(1, u64::MAX), None);
    assert_eq!(nearest(u64::MAX, 1), Some((30_000, 1)));
}

#[test]
fn a_sound_s_length_comes_from_its_header_or_its_size() {
    let facts =
        |bytes: &[u8]| audio(File::whole(bytes)).map(|facts| (facts.samples, facts.duration_ms, facts.estimated));
    assert_eq!(facts(&wav(3200)), Ok((Some(800), Some(100), false)));
    // Announced longer than it is.
    assert_eq!(facts(&wav(3200)[..1644]), Ok((Some(400), Some(50), false)));
    // 100 frames of 1152 samples are 2612 ms.
    assert_eq!(facts(&mp3(100)), Ok((None, Some(2606), true)));
    let tagged = [b"ID3\x04\0\0\0\0\x02\x01".to_vec(), vec![0; 257], mp3(3)].concat();
    assert_eq!(facts(&tagged), Ok((None, Some(78), true)));
}

#[test]
fn what_is_missing_is_named() {
    let error = |bytes: &[u8]| video(File::whole(bytes)).unwrap_err().to_string();
    assert_eq!(error(&wav(4)), "Wav file has no video track");
    let silent =
        "media format not recognised: send MP4, WebM, AVI or GIF for video, WAV, FLAC, MP3, Ogg or MP4 for audio";
    assert_eq!(error(b"hello, world"), silent);
    assert_eq!(error(&mp4(&[(1, 1)], &[])[..40]), "Mp4 file ends inside its index (moov): send the whole file");
}

#[test]
fn frames_larger_than_vllm_takes_are_an_error() {
    let mut huge = mp4(&[(1, 1)], &[]);
    let at = huge.windows(4).position(|name| name == b"avc1").unwrap() + 28;
    huge[at..at + 4].copy_from_slice(&[255; 4]);
    let error = video(File::whole(&huge)).unwrap_err();
    assert_eq!(error, ContainerError::TooManyPixels { width: 65_535, height: 65_535 });
    huge[at..at + 4].copy_from_slice(&[0; 4]);
    let error = video(File::whole(&huge)).unwrap_err();
    assert_eq!(error.to_string(), "Mp4 file has a wrong or unsupported picture size: encode it again");
}

fn samples() -> Vec<Vec<u8>> {
    let avi = riff(b"AVI ", &[(b"LIST", riff(b"hdrl", &[])[8..].to_vec())]);
    let flac = [b"fLaC\x80\0\0\x22".to_vec(), vec![9; 34]].concat();
    let ogg =
        [b"OggS\0\x02".to_vec(), vec![0; 20], b"\x01\x13OpusHead\x01\x01\x38\x01\x80\xbb\0\0\0\0\0".to_vec()].concat();
    let edits = words(&[0, 1, 1000, 100, 0x1_0000]);
    vec![
        mp4(&[(9, 20), (3, 40)], &edits),
        webm(4, Some(160.0), true),
        webm(4, None, false),
        wav(64),
        gif(&[3, 4]),
        mp3(2),
        avi,
        flac,
        ogg,
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn damaged_files_never_panic(
        which in any::<prop::sample::Index>(),
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6),
        numbers in proptest::collection::vec((any::<prop::sample::Index>(), prop::sample::select(vec![0, 1, 7, 0x7fff_ffff, u32::MAX])), 0..3),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let mut bytes = samples()[which.index(9)].clone();
        changes.iter().for_each(|(at, value)| { let at = at.index(bytes.len()); bytes[at] = *value; });
        for (at, number) in numbers {
            let at = at.index(bytes.len() - 4);
            bytes[at..at + 4].copy_from_slice(&number.to_be_bytes());
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len() + 1));
        }
        for file in [File::whole(&bytes), File::head(&bytes)] {
            let _ = (video(file), audio(file));
        }
    }

    #[test]
    fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), first in any::<prop::sample::Index>()) {
        let start = samples()[first.index(9)][..16].to_vec();
        for bytes in [bytes.clone(), [start, bytes].concat()] {
            let _ = (video(File::whole(&bytes)), audio(File::head(&bytes)));
        }
    }
}
