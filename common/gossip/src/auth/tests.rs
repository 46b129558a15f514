use proptest::prelude::*;

use super::*;
use crate::codec::{Decoder, encode_sidecar};
use crate::message::{FromBalancer, FromSidecar};

fn key(secret: &str) -> SharedKey {
    SharedKey::new(secret.as_bytes())
}

/// A whole exchange; what the balancer and what the sidecar make of it.
fn meet(sidecar: &str, balancer: &str) -> (Result<(), Cause>, Result<(), AuthError>) {
    let (mut dialer, knock) = Dialer::new(key(sidecar), [1; 32]);
    let Message::Knock(nonce) = knock else { panic!("{knock:?}") };
    let (acceptor, challenge) = Acceptor::new(key(balancer), [2; 32], nonce);
    let proof = dialer.on(challenge).unwrap().unwrap();
    match acceptor.on(proof) {
        Ok(granted) => (Ok(()), dialer.on(granted).map(|none| assert_eq!(none, None))),
        Err(cause) => (Err(cause), dialer.on(Message::Refused(cause)).map(drop)),
    }
}

#[test]
fn equal_keys_meet_and_others_do_not() {
    assert_eq!(meet("secret", "secret"), (Ok(()), Ok(())));
    for other in ["secreT", "secre", "secrets", ""] {
        assert_eq!(meet("secret", other), (Err(Cause::WrongKey), Err(AuthError::WrongKey)), "{other}");
    }
}

#[test]
fn a_balancer_that_only_repeats_what_it_heard_is_not_believed() {
    let (mut dialer, _) = Dialer::new(key("secret"), [1; 32]);
    // The sidecar's own nonce and its own proof come back.
    let Some(Message::Proof(proof)) = dialer.on(Message::Challenge([1; 32])).unwrap() else { panic!("no proof") };
    assert_eq!(dialer.on(Message::Granted(proof)), Err(AuthError::WrongKey));
}

#[test]
fn a_recorded_proof_is_worth_nothing_against_another_challenge() {
    let (mut dialer, _) = Dialer::new(key("secret"), [1; 32]);
    let proof = dialer.on(Message::Challenge([2; 32])).unwrap().unwrap();
    let (again, _) = Acceptor::new(key("secret"), [3; 32], [1; 32]);
    assert_eq!(again.on(proof), Err(Cause::WrongKey));
}

#[test]
fn messages_out_of_turn_end_the_exchange() {
    let fresh = || Dialer::new(key("secret"), [1; 32]).0;
    for message in [Message::Granted([0; 32]), Message::Knock([0; 32]), Message::Proof([0; 32])] {
        assert_eq!(fresh().on(message), Err(AuthError::Malformed), "{message:?}");
    }
    let mut asked = fresh();
    asked.on(Message::Challenge([2; 32])).unwrap();
    assert_eq!(asked.on(Message::Challenge([2; 32])), Err(AuthError::Malformed));
    for (cause, error) in [
        (Cause::KeyMissing, AuthError::KeyMissing),
        (Cause::NoKeyHere, AuthError::NoKeyThere),
        (Cause::WrongKey, AuthError::WrongKey),
    ] {
        assert_eq!(fresh().on(Message::Refused(cause)), Err(error));
    }
    let (acceptor, _) = Acceptor::new(key("secret"), [2; 32], [1; 32]);
    assert_eq!(acceptor.on(Message::Knock([1; 32])), Err(Cause::WrongKey));
}

/// Keyed blake3 over role and nonces, as `b3sum --keyed` of the same 80 bytes says under the key that `b3sum --derive-key` makes.
#[test]
fn the_bytes_of_a_proof_are_fixed() {
    let derived = blake3::derive_key("fovea 1 block stream shared key", b"secret");
    let said = [b"fovea sidecar  1".as_slice(), &[1; 32], &[2; 32]].concat();
    let (mut dialer, _) = Dialer::new(key("secret"), [1; 32]);
    let proof = dialer.on(Message::Challenge([2; 32])).unwrap();
    assert_eq!(proof, Some(Message::Proof(*blake3::keyed_hash(&derived, &said).as_bytes())));
}

#[test]
fn a_key_is_never_printed() {
    let (dialer, _) = Dialer::new(key("secret"), [1; 32]);
    let shown = format!("{:?} {dialer:?}", key("secret"));
    let bytes = blake3::derive_key("fovea 1 block stream shared key", b"secret");
    assert!(!shown.contains("secret") && !shown.contains(&format!("{:?}", &bytes[..4])), "{shown}");
}

#[test]
fn frames_are_short_and_those_of_the_stream() {
    for message in [
        Message::Knock([7; 32]),
        Message::Proof([7; 32]),
        Message::Challenge([7; 32]),
        Message::Granted([7; 32]),
        Message::Refused(Cause::NoKeyHere),
    ] {
        let frame = encode(&message);
        let length = frame_length(*frame.first_chunk().unwrap()).unwrap();
        assert_eq!((4 + length, decode(&frame[4..])), (frame.len(), Ok(message)));
    }
    assert_eq!(&encode(&Message::Refused(Cause::WrongKey))[..], [4, 0, 0, 0, 2, 0, 0x63, 3]);
    assert!(is_knock(*encode(&Message::Knock([0; 32])).first_chunk().unwrap()));
    assert!(is_refusal(encode(&Message::Refused(Cause::KeyMissing))[6]));
    // A sidecar without this module reads a refusal as a kind it does not know, and says so.
    let mut old = Decoder::<FromBalancer>::new();
    old.push(&encode(&Message::Refused(Cause::KeyMissing)));
    assert!(old.next().unwrap_err().to_string().contains("0x63"));
    let mut old = Decoder::<FromSidecar>::new();
    old.push(&encode(&Message::Knock([0; 32])));
    assert!(old.next().unwrap_err().to_string().contains("0x21"));
    // And no message of the stream is taken for one of these.
    assert!(!is_knock(*encode_sidecar(&FromSidecar::Heartbeat).unwrap().first_chunk().unwrap()));
}

proptest! {
    #[test]
    fn any_bytes_are_a_message_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..80)) {
        if let Ok(message) = decode(&bytes) {
            prop_assert_eq!(&encode(&message)[4..], &bytes[..]);
        }
        if let Some(first) = bytes.first_chunk() {
            prop_assert!(frame_length(*first).is_err() || u32::from_le_bytes(*first) as usize <= AUTH_FRAME_BYTES_MAX);
        }
    }
}
