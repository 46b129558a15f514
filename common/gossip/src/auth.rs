//! Before the hello: both ends prove that they know the shared key, without sending it.
//!
//! ```text
//! sidecar  → balancer   knock      nonce of the sidecar
//! balancer → sidecar    challenge  nonce of the balancer
//! sidecar  → balancer   proof      keyed hash of role `sidecar` and both nonces
//! balancer → sidecar    granted    keyed hash of role `balancer` and both nonces
//! ```
//!
//! In place of any of its messages a balancer may send `refused` with a cause, and close. Who listens proves last: a stranger gets
//! nothing that a key could be guessed with. The frames are those of the block stream, with kinds of their own; a stream without a key
//! begins with its hello, as ever.
//!
//! Pure: nonces are arguments. They must be random and never used twice.
//! **Invariant:** proofs are compared in a time that does not depend on their content, and a proof of one role is never one of the other.
//! What this does not do: the bytes after it are neither secret nor protected. Where the network is not trusted, use TLS.

use std::fmt;

use bytes::Bytes;

/// Longest frame here, in bytes after the length field.
pub const AUTH_FRAME_BYTES_MAX: usize = 64;
/// Bytes of a frame that tell its kind: length, head length, kind.
pub const FIRST_BYTES: usize = 7;

const KNOCK: u8 = 0x21;
const PROOF: u8 = 0x22;
const CHALLENGE: u8 = 0x61;
const GRANTED: u8 = 0x62;
const REFUSED: u8 = 0x63;

const KEY_CONTEXT: &str = "fovea 1 block stream shared key";
const SIDECAR: &[u8; 16] = b"fovea sidecar  1";
const BALANCER: &[u8; 16] = b"fovea balancer 1";

/// Used once.
pub type Nonce = [u8; 32];

/// What is proven; made from the key's bytes. Never printed.
#[derive(Clone)]
pub struct SharedKey([u8; 32]);

impl fmt::Debug for SharedKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedKey(…)")
    }
}

impl SharedKey {
    pub fn new(secret: &[u8]) -> Self {
        Self(blake3::derive_key(KEY_CONTEXT, secret))
    }

    fn proof(&self, role: &[u8; 16], sidecar: &Nonce, balancer: &Nonce) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(role).update(sidecar).update(balancer);
        hasher.finalize()
    }
}

/// Why a balancer takes no stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Cause {
    /// The balancer has a key, and no knock came.
    KeyMissing,
    /// A knock came, and the balancer has no key.
    NoKeyHere,
    /// The proof is of another key.
    WrongKey,
}

/// One message, either way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    Knock(Nonce),
    Proof([u8; 32]),
    Challenge(Nonce),
    Granted([u8; 32]),
    Refused(Cause),
}

/// Why an exchange ends without trust. The texts are those of the sidecar, which is told; the balancer has the cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AuthError {
    #[error("the balancer wants a shared key and this sidecar has none: set trust.shared_key_file in sidecar.yaml")]
    KeyMissing,
    #[error(
        "the balancer has no shared key: set trust.shared_key_file in balancer.yaml, or take it out of sidecar.yaml"
    )]
    NoKeyThere,
    #[error("the balancer has another shared key: give both programs the same trust.shared_key_file")]
    WrongKey,
    #[error("the peer answers with what is no part of the key exchange; run equal versions of sidecar and balancer")]
    Malformed,
}

impl From<Cause> for AuthError {
    fn from(cause: Cause) -> Self {
        match cause {
            Cause::KeyMissing => Self::KeyMissing,
            Cause::NoKeyHere => Self::NoKeyThere,
            Cause::WrongKey => Self::WrongKey,
        }
    }
}

/// Does a frame that begins with these bytes knock?
pub fn is_knock(first: [u8; FIRST_BYTES]) -> bool {
    first[6] == KNOCK
}

/// Is this kind of frame a refusal? A sidecar without a key finds it, as a kind that it does not know, where a welcome should be.
pub fn is_refusal(kind: u8) -> bool {
    kind == REFUSED
}

pub fn encode(message: &Message) -> Bytes {
    let (kind, content): (u8, &[u8]) = match message {
        Message::Knock(nonce) => (KNOCK, nonce),
        Message::Proof(proof) => (PROOF, proof),
        Message::Challenge(nonce) => (CHALLENGE, nonce),
        Message::Granted(proof) => (GRANTED, proof),
        Message::Refused(Cause::KeyMissing) => (REFUSED, &[1]),
        Message::Refused(Cause::NoKeyHere) => (REFUSED, &[2]),
        Message::Refused(Cause::WrongKey) => (REFUSED, &[3]),
    };
    let head = 1 + content.len();
    debug_assert!(2 + head <= AUTH_FRAME_BYTES_MAX, "messages are short");
    let mut frame = Vec::with_capacity(6 + head);
    frame.extend_from_slice(&(2 + head as u32).to_le_bytes());
    frame.extend_from_slice(&(head as u16).to_le_bytes());
    frame.push(kind);
    frame.extend_from_slice(content);
    frame.into()
}

/// Length of the frame that begins with these four bytes, after them.
///
/// # Errors
/// When it is longer than any frame here.
pub fn frame_length(first: [u8; 4]) -> Result<usize, AuthError> {
    let length = u32::from_le_bytes(first) as usize;
    if (3..=AUTH_FRAME_BYTES_MAX).contains(&length) { Ok(length) } else { Err(AuthError::Malformed) }
}

/// Decodes a frame's content, the bytes after its length.
///
/// # Errors
/// When it is none of these messages.
pub fn decode(content: &[u8]) -> Result<Message, AuthError> {
    let Some(([low, high, kind], rest)) = content.split_first_chunk::<3>() else { return Err(AuthError::Malformed) };
    if usize::from(u16::from_le_bytes([*low, *high])) != 1 + rest.len() {
        return Err(AuthError::Malformed);
    }
    let whole = || <[u8; 32]>::try_from(rest).map_err(|_| AuthError::Malformed);
    match (*kind, rest) {
        (KNOCK, _) => whole().map(Message::Knock),
        (PROOF, _) => whole().map(Message::Proof),
        (CHALLENGE, _) => whole().map(Message::Challenge),
        (GRANTED, _) => whole().map(Message::Granted),
        (REFUSED, [1]) => Ok(Message::Refused(Cause::KeyMissing)),
        (REFUSED, [2]) => Ok(Message::Refused(Cause::NoKeyHere)),
        (REFUSED, [3]) => Ok(Message::Refused(Cause::WrongKey)),
        _ => Err(AuthError::Malformed),
    }
}

/// The sidecar's end, from its knock to the balancer's proof.
#[derive(Debug)]
pub struct Dialer {
    key: SharedKey,
    own: Nonce,
    /// Nonce of the balancer, once it came.
    theirs: Option<Nonce>,
}

impl Dialer {
    /// The machine, and the knock to send.
    pub fn new(key: SharedKey, nonce: Nonce) -> (Self, Message) {
        (Self { key, own: nonce, theirs: None }, Message::Knock(nonce))
    }

    /// What to send next; `None` = the balancer is proven, go on with the hello.
    ///
    /// # Errors
    /// When the balancer refuses, or does not prove the key: hang up.
    pub fn on(&mut self, message: Message) -> Result<Option<Message>, AuthError> {
        match (message, self.theirs) {
            (Message::Refused(cause), _) => Err(cause.into()),
            (Message::Challenge(theirs), None) => {
                self.theirs = Some(theirs);
                Ok(Some(Message::Proof(*self.key.proof(SIDECAR, &self.own, &theirs).as_bytes())))
            }
            (Message::Granted(proof), Some(theirs)) => {
                // Comparing hashes takes the same time whatever differs.
                match self.key.proof(BALANCER, &self.own, &theirs) == blake3::Hash::from_bytes(proof) {
                    true => Ok(None),
                    false => Err(AuthError::WrongKey),
                }
            }
            _ => Err(AuthError::Malformed),
        }
    }
}

/// The balancer's end, from the knock to the sidecar's proof.
#[derive(Debug)]
pub struct Acceptor {
    key: SharedKey,
    own: Nonce,
    theirs: Nonce,
}

impl Acceptor {
    /// The machine, and the challenge to send for a knock.
    pub fn new(key: SharedKey, nonce: Nonce, knock: Nonce) -> (Self, Message) {
        (Self { key, own: nonce, theirs: knock }, Message::Challenge(nonce))
    }

    /// The proof to send when the sidecar is proven.
    ///
    /// # Errors
    /// When it is not: send the cause and hang up.
    pub fn on(self, message: Message) -> Result<Message, Cause> {
        let Message::Proof(proof) = message else { return Err(Cause::WrongKey) };
        match self.key.proof(SIDECAR, &self.theirs, &self.own) == blake3::Hash::from_bytes(proof) {
            true => Ok(Message::Granted(*self.key.proof(BALANCER, &self.theirs, &self.own).as_bytes())),
            false => Err(Cause::WrongKey),
        }
    }
}

#[cfg(test)]
mod tests;
