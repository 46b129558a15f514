//! Programs of different minors on one stream: what the older one does not know is never sent to it, and bytes of older programs are taken.

use super::*;
use crate::codec::{Decoder, Wire, encode_balancer, encode_sidecar};
use crate::message::{FromBalancer, PROTOCOL, Version};

/// Frames of sidecars of 1.0 and 1.1, byte by byte: hello, snapshot of hash 5 (first and last, epoch 9, seq 0), delta that stores hash 6,
/// load, and for 1.1 a fact to be forgotten.
fn older_sidecar(minor: u8) -> Vec<u8> {
    let engine = [0, 1, b'v', 1, b'm', 1, 1, b'n', 0, 0x80, 0x20, 1, 0, 0];
    let mut record = [&[1, minor, 1, b'u'], &engine[..], &[1, 0, 16, 0, 1], &[0]].concat();
    if minor > 0 {
        record.push(1);
    }
    let mut frames = vec![[&[1, 0, 1], &record[..]].concat()];
    frames.push([&[8, 0, 2, 0, 9, 0, 0, 1, 1, 1], &5_u64.to_le_bytes()[..]].concat());
    frames.push([&[10, 0, 3, 0, 9, 1, 0, 1, 0, 0, 0, 0], &6_u64.to_le_bytes()[..]].concat());
    frames.push(vec![7, 0, 4, 0, 1, 2, 3, 4, 5]);
    if minor > 0 {
        frames.push([&[1, 0, 6, 1], &[7; 32][..], &[0, 2]].concat());
    }
    frames.iter().flat_map(|frame| [&u32::try_from(frame.len()).unwrap().to_le_bytes()[..], frame].concat()).collect()
}

fn decoded<M: Wire>(bytes: &[u8]) -> Vec<M> {
    let mut decoder = Decoder::new();
    decoder.push(bytes);
    std::iter::from_fn(|| decoder.next().unwrap()).collect()
}

#[test]
fn bytes_of_older_sidecars_are_taken() {
    for (minor, facts) in [(0, ""), (1, "learnt1")] {
        let mut inbox = Inbox::new();
        let messages = decoded::<FromSidecar>(&older_sidecar(minor));
        let said: Vec<_> = messages.into_iter().map(|message| words(&inbox.apply(message).unwrap())).collect();
        let expected = ["hello", "begin0 +Gpu5 live9/0", "+Gpu6", "load", facts];
        assert_eq!(said, expected[..if minor == 0 { 4 } else { 5 }], "minor {minor}");
        assert_eq!(inbox.watermark(0), Some((9, 1)));
    }
}

/// Kind bytes of everything that this build's sidecar says to a balancer of `minor`, as the shell gates it.
fn kinds_for(minor: u16) -> Vec<u8> {
    let version = decoded::<FromBalancer>(&encode_balancer(&FromBalancer::Welcome(Version { major: 1, minor })));
    let [FromBalancer::Welcome(version)] = version[..] else { panic!() };
    let mut said =
        vec![FromSidecar::Hello(hello(1)), snapshot(0, (1, 0), "fl", 3), delta(0, (1, 1)), FromSidecar::Heartbeat];
    if version.takes_learnt() {
        said.push(FromSidecar::Learnt(learnt()));
    }
    if version.takes_digests() {
        said.push(FromSidecar::Embeddings(Embeddings::default()));
        said.push(FromSidecar::Digest(Digest { worker: 0, epoch: 1, seq: 1, levels: Default::default() }));
    }
    said.iter().map(|message| encode_sidecar(message).unwrap()[6]).collect()
}

#[test]
fn older_balancers_are_told_what_they_know_alone() {
    // The highest kind that each minor has.
    for (minor, highest) in [(0, 5), (1, 6), (2, 10)] {
        assert_eq!(kinds_for(minor).into_iter().max(), Some(highest), "minor {minor}");
    }
}

/// The hello of this build, as an older balancer reads it: the fields it knows, and whatever lies behind them.
#[test]
fn an_older_balancer_can_read_this_hello() {
    let bytes = encode_sidecar(&FromSidecar::Hello(hello(1))).unwrap();
    let later = [1, 0];
    assert!(bytes.ends_with(&later), "media trusted, no fingerprint, after all fields of 1.0");
    assert_eq!(&bytes[7..9], &[1, u8::try_from(PROTOCOL.minor).unwrap()]);
}

/// An older sidecar sends no digest, so that nothing is ever asked of it that it does not know.
#[test]
fn older_sidecars_are_asked_nothing_new() {
    let mut inbox = Inbox::new();
    let messages = decoded::<FromSidecar>(&older_sidecar(1));
    let changes: Vec<_> = messages.into_iter().flat_map(|message| inbox.apply(message).unwrap()).collect();
    assert!(!changes.iter().any(|change| matches!(change, Change::Digest { .. } | Change::Buckets(_))));
}
