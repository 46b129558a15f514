use proptest::prelude::*;

use super::*;
use fovea_kv::{MediaId, MediaKey};

use crate::message::{
    Buckets, Digest, Embeddings, EngineFacts, EngineKind, HashScheme, Learnt, LearntValue, Repair, WorkerFacts,
};
use fovea_kv::sums::Sums;

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
        media_trusted: true,
        encoder_fingerprint: None,
    }
}

pub(crate) fn learnt() -> Vec<Learnt> {
    let values = [
        LearntValue::Id(MediaId([9; 32])),
        LearntValue::Pads(vec![1_000_007]),
        LearntValue::Pads(vec![u32::MAX, 1 << 31, 1_000_000, 5]),
        LearntValue::Nothing,
    ];
    let facts = (0..).zip(values);
    facts.map(|(index, value)| Learnt { key: MediaKey([index; 32]), tokens: u32::from(index) * 300, value }).collect()
}

fn hashes() -> impl Strategy<Value = Vec<SequenceHash>> {
    prop::collection::vec(any::<u64>().prop_map(SequenceHash), 0..20)
}

fn from_sidecar() -> impl Strategy<Value = FromSidecar> {
    let level = || (hashes(), hashes()).prop_map(|(removed, stored)| LevelDelta { removed, stored });
    let at = || (any::<u16>(), any::<u64>(), any::<u64>());
    prop_oneof![
        (0..4_u32, ".{0,9}", any::<bool>()).prop_map(|(workers, url, media_trusted)| {
            FromSidecar::Hello(Hello { advertised_url: url, media_trusted, ..hello(workers) })
        }),
        prop::sample::subsequence(learnt(), 0..=4).prop_map(FromSidecar::Learnt),
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
        later_kinds(),
        Just(FromSidecar::Heartbeat),
    ]
}

fn later_kinds() -> impl Strategy<Value = FromSidecar> {
    let at = || (any::<u16>(), any::<u64>(), any::<u64>());
    let keys = || prop::collection::vec(any::<u64>(), 0..20);
    prop_oneof![
        (at(), any::<[(u64, u128); 3]>()).prop_map(|((worker, epoch, seq), levels)| {
            let levels = levels.map(|(count, sum)| Sums { count, sum });
            FromSidecar::Digest(Digest { worker, epoch, seq, levels })
        }),
        (at(), any::<[u64; 3]>()).prop_map(|((worker, epoch, seq), firsts)| {
            let level = |first: u64| std::array::from_fn(|at| first.wrapping_mul(at as u64 + 1));
            FromSidecar::Buckets(Buckets { worker, epoch, seq, levels: Box::new(firsts.map(level)) })
        }),
        (at(), any::<[[u8; 32]; 3]>()).prop_map(|((worker, epoch, seq), buckets)| FromSidecar::Repair(Repair {
            worker,
            epoch,
            seq,
            buckets
        })),
        (any::<bool>(), keys(), keys()).prop_map(|(first, stored, removed)| FromSidecar::Embeddings(Embeddings {
            first,
            stored,
            removed
        })),
    ]
}

fn from_balancer() -> impl Strategy<Value = FromBalancer> {
    prop_oneof![
        any::<u16>().prop_map(|minor| FromBalancer::Welcome(Version { minor, ..PROTOCOL })),
        any::<(u16, u64, u64)>().prop_map(|(worker, epoch, seq)| FromBalancer::Ack { worker, epoch, seq }),
        any::<u16>().prop_map(|worker| FromBalancer::Resync { worker }),
        any::<u16>().prop_map(|worker| FromBalancer::AskBuckets { worker }),
        any::<(u16, [[u8; 32]; 3])>().prop_map(|(worker, buckets)| FromBalancer::AskRepair { worker, buckets }),
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
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..200), kind in 0..12_u8, head in 1..40_u16) {
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
    assert_eq!(encode_balancer(&FromBalancer::Welcome(PROTOCOL)), [5, 0, 0, 0, 3, 0, 0x41, 1, 2][..]);
    assert_eq!(encode_balancer(&FromBalancer::AskBuckets { worker: 7 }), [4, 0, 0, 0, 2, 0, 0x44, 7][..]);
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

/// By hand: the hello of protocol 1.0 has nothing behind `draining`.
fn hello_of_minor(minor: u8, draining: u8, later: &[u8]) -> Vec<u8> {
    let engine = [0, 1, b'v', 1, b'm', 1, 1, b'n', 0, 0x80, 0x20, 1, 0, 0];
    framed(&[&[1, 0, 1], &[1, minor, 1, b'u'], &engine, &[1, 3, 16, 0, 1], &[draining], later])
}

#[test]
fn a_hello_of_protocol_1_0_trusts_media() {
    let expected = |minor, draining, media_trusted| {
        let facts = hello(0).engine;
        let named = |name: &str| name.to_owned();
        FromSidecar::Hello(Hello {
            protocol: Version { major: 1, minor },
            advertised_url: named("u"),
            engine: EngineFacts { version: named("v"), served_names: vec![named("n")], ..facts },
            workers: vec![WorkerFacts { dp_rank: 3, block_size: 16, capacity_blocks: 0, events: true }],
            draining,
            media_trusted,
            encoder_fingerprint: None,
        })
    };
    assert_eq!(one(&hello_of_minor(0, 1, &[])), Ok(expected(0, true, true)));
    assert_eq!(one(&hello_of_minor(0, 0, &[])), Ok(expected(0, false, true)));
    assert_eq!(one(&hello_of_minor(1, 0, &[0])), Ok(expected(1, false, false)));
    assert_eq!(one(&hello_of_minor(2, 0, &[1, 0])), Ok(expected(2, false, true)));
    assert_eq!(one(&hello_of_minor(3, 0, &[1, 0, 77])), Ok(expected(3, false, true)));
    let malformed = Err(CodecError::Malformed { message: "hello" });
    assert_eq!(one::<FromSidecar>(&hello_of_minor(1, 0, &[])), malformed);
    assert_eq!(one::<FromSidecar>(&hello_of_minor(2, 0, &[1, 1, 7])), malformed);
    let Ok(FromSidecar::Hello(with)) = one(&hello_of_minor(2, 0, &[&[1, 1][..], &[7; 32]].concat())) else { panic!() };
    assert_eq!(with.encoder_fingerprint, Some([7; 32]));
}

#[test]
fn the_bytes_of_learnt_facts_are_those_of_the_reference() {
    let facts = vec![
        Learnt { key: MediaKey([0xab; 32]), tokens: 300, value: LearntValue::Pads(vec![1_000_007]) },
        Learnt { key: MediaKey([0xcd; 32]), tokens: 0, value: LearntValue::Nothing },
    ];
    let body = [&[2][..], &[0xab; 32], &[0xac, 2, 1, 1, 0xc7, 0x84, 0x3d], &[0xcd; 32], &[0, 2]];
    let expected = framed(&[&[1, 0, 6], &body.concat()]);
    assert_eq!(encode_sidecar(&FromSidecar::Learnt(facts.clone())).unwrap(), expected);
    let with_more = framed(&[&[1, 0, 6], &body.concat(), &[1, 2]]);
    assert_eq!(one(&with_more), Ok(FromSidecar::Learnt(facts)));
}

#[test]
fn learnt_facts_are_split_and_never_too_long() {
    let fact = |key: u8| {
        let id = Learnt { key: MediaKey([key; 32]), tokens: u32::MAX, value: LearntValue::Id(MediaId([key; 32])) };
        let pads = LearntValue::Pads(vec![u32::MAX; 4]);
        [id.clone(), Learnt { value: pads, ..id }]
    };
    let facts: Vec<_> = (0..=255).cycle().take(MAX_LEARNT_PER_FRAME).flat_map(fact).chain(learnt()).collect();
    let frames: Vec<_> = learnt_frames(&facts).map(Result::unwrap).collect();
    assert_eq!(frames.len(), 3);
    let decoded = frames.iter().flat_map(|frame| match one(frame).unwrap() {
        FromSidecar::Learnt(facts) => facts,
        other => panic!("{other:?}"),
    });
    assert!(decoded.eq(facts));
    assert_eq!(learnt_frames(&[]).count(), 0);
}

#[test]
fn hostile_learnt_facts_are_refused_by_name() {
    let malformed = Err(CodecError::Malformed { message: "learnt" });
    for tail in [&[1, 2, 5, 5][..], &[1, 0], &[3], &[0, 1, 2]] {
        let body = [&[1], &[0xab; 32][..], &[7], tail].concat();
        assert_eq!(one::<FromSidecar>(&framed(&[&[1, 0, 6], &body])), malformed, "{tail:?}");
    }
    assert_eq!(one::<FromSidecar>(&framed(&[&[1, 0, 6], &[0xff, 0xff, 0xff, 0xff, 0x0f]])), malformed);
    let count = MAX_LEARNT_PER_FRAME + 1;
    let many = vec![Learnt { key: MediaKey([0; 32]), tokens: 0, value: LearntValue::Nothing }; count];
    let expected = Err(CodecError::TooManyLearnt { facts: count });
    assert_eq!(encode_sidecar(&FromSidecar::Learnt(many)), expected);
    let body = [postcard::to_stdvec(&(8193_u32)).unwrap(), [&[0; 33][..], &[2]].concat().repeat(count)].concat();
    assert_eq!(one::<FromSidecar>(&framed(&[&[1, 0, 6], &body])).map(drop), expected.map(drop));
    let wrong = Learnt { key: MediaKey([0; 32]), tokens: 0, value: LearntValue::Pads(vec![1, 2]) };
    assert!(learnt_frames(&[wrong]).all(|frame| frame.is_err()));
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
