use proptest::prelude::*;

use super::*;
use crate::message::{EngineFacts, EngineKind, HashScheme, WorkerFacts};

pub(crate) fn hello(workers: u32) -> Hello {
    let worker = |dp_rank| WorkerFacts { dp_rank, block_size: 16, capacity_blocks: 1 << 20, events: true };
    Hello {
        protocol: PROTOCOL,
        advertised_url: "http://10.0.0.7:8000".to_owned(),
        engine: EngineFacts {
            kind: EngineKind::Vllm,
            version: "0.12".to_owned(),
            engine_model: "m".to_owned(),
            served_names: vec!["m".to_owned(), "n".to_owned()],
            lora_names: vec![],
            max_model_len: 4096,
            exif: true,
            hash_scheme: HashScheme::Fovea1,
            hybrid: false,
        },
        workers: (0..workers).map(worker).collect(),
        draining: false,
    }
}

fn hashes() -> impl Strategy<Value = Vec<SequenceHash>> {
    prop::collection::vec(any::<u64>().prop_map(SequenceHash), 0..20)
}

fn from_sidecar() -> impl Strategy<Value = FromSidecar> {
    let level = || (hashes(), hashes()).prop_map(|(removed, stored)| LevelDelta { removed, stored });
    let at = || (any::<u16>(), any::<u64>(), any::<u64>());
    prop_oneof![
        (0..4_u32, ".{0,9}")
            .prop_map(|(workers, url)| { FromSidecar::Hello(Hello { advertised_url: url, ..hello(workers) }) }),
        (at(), 0..3_usize, any::<(bool, bool)>(), hashes()).prop_map(
            |((worker, epoch, seq), level, (first, last), hashes)| {
                FromSidecar::Snapshot(Snapshot { worker, epoch, seq, level: Tier::ALL[level], first, last, hashes })
            }
        ),
        (at(), [level(), level(), level()]).prop_map(|((worker, epoch, seq), levels)| FromSidecar::Delta(Delta {
            worker,
            epoch,
            seq,
            levels
        })),
        any::<(u16, u32, u32, u64, u64, u16)>().prop_map(|(worker, running, waiting, prefill, decode, usage)| {
            FromSidecar::Load(Load {
                worker,
                running,
                waiting,
                prefill_tokens: prefill,
                decode_tokens: decode,
                kv_usage_permille: usage,
            })
        }),
        Just(FromSidecar::Heartbeat),
    ]
}

fn from_balancer() -> impl Strategy<Value = FromBalancer> {
    prop_oneof![
        any::<u16>().prop_map(|minor| FromBalancer::Welcome(Version { minor, ..PROTOCOL })),
        any::<(u16, u64, u64)>().prop_map(|(worker, epoch, seq)| FromBalancer::Ack { worker, epoch, seq }),
        any::<u16>().prop_map(|worker| FromBalancer::Resync { worker }),
    ]
}

fn drain<M: Wire>(decoder: &mut Decoder<M>, out: &mut Vec<M>) -> Result<(), CodecError> {
    while let Some(message) = decoder.next()? {
        out.push(message);
    }
    Ok(())
}

/// Decodes `bytes` handed over in pieces of `size`.
fn decode<M: Wire>(bytes: &[u8], size: usize) -> Result<Vec<M>, CodecError> {
    let (mut decoder, mut out) = (Decoder::new(), Vec::new());
    for piece in bytes.chunks(size.max(1)) {
        decoder.push(piece);
        drain(&mut decoder, &mut out)?;
    }
    Ok(out)
}

fn one<M: Wire>(bytes: &[u8]) -> Result<M, CodecError> {
    decode(bytes, usize::MAX).map(|mut messages| messages.pop().expect("a whole frame"))
}

proptest! {
    #[test]
    fn messages_survive_any_cut(messages in prop::collection::vec(from_sidecar(), 0..5), size in 1..64_usize) {
        let bytes: Vec<u8> = messages.iter().flat_map(|message| encode_sidecar(message).unwrap()).collect();
        prop_assert_eq!(decode::<FromSidecar>(&bytes, size).unwrap(), messages);
    }

    #[test]
    fn answers_survive_any_cut(messages in prop::collection::vec(from_balancer(), 0..5), size in 1..64_usize) {
        let bytes: Vec<u8> = messages.iter().flat_map(encode_balancer).collect();
        prop_assert_eq!(decode::<FromBalancer>(&bytes, size).unwrap(), messages);
    }

    #[test]
    fn a_stream_cut_short_gives_the_whole_messages_before_the_cut(
        messages in prop::collection::vec(from_sidecar(), 1..5), at in any::<prop::sample::Index>(),
    ) {
        let bytes: Vec<u8> = messages.iter().flat_map(|message| encode_sidecar(message).unwrap()).collect();
        let decoded = decode::<FromSidecar>(&bytes[..at.index(bytes.len())], 7).unwrap();
        prop_assert!(decoded.len() < messages.len());
        prop_assert_eq!(&decoded, &messages[..decoded.len()]);
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), kind in 0..8_u8, head in 1..40_u16) {
        _ = decode::<FromSidecar>(&bytes, 9);
        _ = decode::<FromBalancer>(&bytes, 9);
        let mut framed = (u32::try_from(bytes.len()).unwrap() + 3).to_le_bytes().to_vec();
        framed.extend(head.to_le_bytes());
        framed.push(kind);
        framed.extend(&bytes);
        _ = decode::<FromSidecar>(&framed, 9);
        framed[6] |= 0x40;
        _ = decode::<FromBalancer>(&framed, 9);
    }

    #[test]
    fn a_flipped_bit_never_panics(message in from_sidecar(), at in any::<prop::sample::Index>(), bit in 0..8) {
        let mut bytes = encode_sidecar(&message).unwrap().to_vec();
        let at = at.index(bytes.len());
        bytes[at] ^= 1_u8 << bit;
        _ = decode::<FromSidecar>(&bytes, usize::MAX);
    }
}

/// `parts` behind a length field.
fn framed(parts: &[&[u8]]) -> Vec<u8> {
    let content = parts.concat();
    [&u32::try_from(content.len()).unwrap().to_le_bytes()[..], &content].concat()
}

#[test]
fn the_bytes_of_a_delta_are_those_of_the_reference() {
    let levels = [
        LevelDelta { removed: vec![SequenceHash(5)], stored: vec![] },
        LevelDelta { removed: vec![], stored: vec![SequenceHash(0x0102)] },
        LevelDelta::default(),
    ];
    let bytes = encode_sidecar(&FromSidecar::Delta(Delta { worker: 1, epoch: 300, seq: 2, levels })).unwrap();
    let head = [3, 1, 0xac, 2, 2, 1, 0, 0, 1, 0, 0];
    let expected = framed(&[&[11, 0], &head, &5_u64.to_le_bytes(), &0x0102_u64.to_le_bytes()]);
    assert_eq!(bytes, expected);
}

#[test]
fn the_bytes_of_small_messages_are_those_of_the_reference() {
    assert_eq!(encode_sidecar(&FromSidecar::Heartbeat).unwrap(), [3, 0, 0, 0, 1, 0, 5][..]);
    assert_eq!(encode_balancer(&FromBalancer::Welcome(PROTOCOL)), [5, 0, 0, 0, 3, 0, 0x41, 1, 0][..]);
    assert_eq!(encode_balancer(&FromBalancer::Resync { worker: 7 }), [4, 0, 0, 0, 2, 0, 0x43, 7][..]);
}

#[test]
fn a_later_minor_may_add_fields_at_the_end() {
    let load = framed(&[&[9, 0, 4, 0, 1, 2, 3, 4, 5, 99, 98]]);
    assert!(matches!(one(&load), Ok(FromSidecar::Load(Load { running: 1, kv_usage_permille: 5, .. }))));
    let mut record = postcard::to_stdvec(&Hello { protocol: Version { major: 1, minor: 9 }, ..hello(1) }).unwrap();
    record.extend([1, 2, 3]);
    assert!(matches!(one(&framed(&[&[1, 0, 1], &record])), Ok(FromSidecar::Hello(_))));
}

#[test]
fn a_later_major_is_named_whatever_follows() {
    let theirs = Version { major: 2, minor: 3 };
    let expected = CodecError::Version { theirs };
    assert_eq!(one::<FromSidecar>(&framed(&[&[1, 0, 1, 2, 3, 0xff]])), Err(expected.clone()));
    assert_eq!(one::<FromBalancer>(&framed(&[&[3, 0, 0x41, 2, 3]])), Err(expected));
}

#[test]
fn hostile_frames_are_refused_by_name() {
    let unknown = framed(&[&[1, 0, 0x7f]]);
    assert_eq!(one::<FromSidecar>(&unknown), Err(CodecError::UnknownKind { kind: 0x7f }));
    assert_eq!(one::<FromSidecar>(&framed(&[&[9, 0, 5]])), Err(CodecError::HeadLength { head: 9, frame: 3 }));
    assert_eq!(one::<FromSidecar>(&framed(&[&[0, 0]])), Err(CodecError::HeadLength { head: 0, frame: 2 }));
    assert_eq!(one::<FromSidecar>(&framed(&[])), Err(CodecError::HeadLength { head: 0, frame: 0 }));
    assert_eq!(
        one::<FromSidecar>(&framed(&[&[9, 0, 2, 0, 1, 1, 3, 1, 1, 0, 0]])),
        Err(CodecError::Malformed { message: "snapshot" })
    );
    let missing = framed(&[&[8, 0, 2, 0, 1, 1, 0, 1, 1, 9]]);
    let expected = CodecError::BodyLength { message: "snapshot", announced: 72, actual: 0 };
    assert_eq!(one::<FromSidecar>(&missing), Err(expected));
}

#[test]
fn a_length_over_the_limit_is_refused_before_its_bytes_come() {
    let mut decoder = Decoder::<FromBalancer>::new();
    decoder.push(&2000_u32.to_le_bytes());
    assert_eq!(decoder.next(), Err(CodecError::FrameTooLong { bytes: 2000, limit: BALANCER_FRAME_BYTES_MAX }));
}

#[test]
fn a_sender_is_told_to_split() {
    let hashes = vec![SequenceHash(1); MAX_HASHES_PER_FRAME + 1];
    let snapshot =
        Snapshot { worker: 0, epoch: 1, seq: 1, level: Tier::Gpu, first: true, last: true, hashes: hashes.clone() };
    let expected = Err(CodecError::TooManyHashes { hashes: MAX_HASHES_PER_FRAME + 1 });
    assert_eq!(encode_sidecar(&FromSidecar::Snapshot(snapshot)), expected);
    let mut facts = hello(1);
    facts.engine.version = "v".repeat(FRAME_BYTES_MAX);
    assert!(matches!(encode_sidecar(&FromSidecar::Hello(facts)), Err(CodecError::FrameTooLong { .. })));
}
