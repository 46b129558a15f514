//! Bytes of the block stream, both ways.
//!
//! A frame is `u32 length ‖ u16 head length ‖ head ‖ body`, little-endian; a head is a kind byte and a postcard record, a body is
//! raw u64 arrays (of a hello and of learnt facts: a record). `docs/protocols/block-stream.md` is the reference.
//!
//! **Invariant:** no allocation follows a length from outside before that length is checked against the frame that holds it.

mod digest;
mod learnt;

use std::marker::PhantomData;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use fovea_kv::{SequenceHash, Tier};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::message::{
    Delta, EngineFacts, FromBalancer, FromSidecar, Hello, LevelDelta, Load, PROTOCOL, Snapshot, Version, WorkerFacts,
};

use digest::AskRepairHead;
pub use learnt::{MAX_LEARNT_PER_FRAME, learnt_frames};

/// Longest frame that a sidecar may send, in bytes after the length field.
pub const FRAME_BYTES_MAX: usize = 1 << 20;
/// The same for a balancer, which has little to say.
pub const BALANCER_FRAME_BYTES_MAX: usize = 1 << 10;
/// Most hashes in one snapshot or delta frame; a sender splits what is longer.
pub const MAX_HASHES_PER_FRAME: usize = 64 << 10;

const HELLO: u8 = 0x01;
const SNAPSHOT: u8 = 0x02;
const DELTA: u8 = 0x03;
const LOAD: u8 = 0x04;
const HEARTBEAT: u8 = 0x05;
const LEARNT: u8 = 0x06;
const DIGEST: u8 = 0x07;
const BUCKET_SUMS: u8 = 0x08;
const REPAIR: u8 = 0x09;
const EMBEDDINGS: u8 = 0x0a;
const WELCOME: u8 = 0x41;
const ACK: u8 = 0x42;
const RESYNC: u8 = 0x43;
const ASK_BUCKETS: u8 = 0x44;
const ASK_REPAIR: u8 = 0x45;

/// Bytes that are not a message this build takes. The stream must end: what follows cannot be trusted.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CodecError {
    #[error("frame of {bytes} bytes is over the limit of {limit}; the sender must split it")]
    FrameTooLong { bytes: usize, limit: usize },
    #[error("message of {hashes} hashes is over the limit of {MAX_HASHES_PER_FRAME}; the sender must split it")]
    TooManyHashes { hashes: usize },
    #[error("message of {facts} learnt facts is over the limit of {MAX_LEARNT_PER_FRAME}; the sender must split it")]
    TooManyLearnt { facts: usize },
    #[error("head of {head} bytes does not fit its frame of {frame}; the peer is not a fovea program or is broken")]
    HeadLength { head: usize, frame: usize },
    #[error("message kind {kind:#04x} is unknown here; run equal versions of sidecar and balancer")]
    UnknownKind { kind: u8 },
    #[error("peer speaks protocol {}.{}, this build {}.{}; run equal major versions", theirs.major, theirs.minor, PROTOCOL.major, PROTOCOL.minor)]
    Version { theirs: Version },
    #[error("{message} record is malformed; run equal versions of sidecar and balancer")]
    Malformed { message: &'static str },
    #[error("{message} announces {announced} bytes of body and has {actual}; the peer is broken")]
    BodyLength { message: &'static str, announced: usize, actual: usize },
}

/// One direction of the stream.
pub trait Wire: Sized {
    /// Longest frame in this direction, in bytes after the length field.
    const FRAME_BYTES_MAX: usize;

    /// Decodes a frame's content: kind, rest of the head, body.
    ///
    /// # Errors
    /// When it is not a message of this direction and version.
    fn decode(kind: u8, record: &[u8], body: &[u8]) -> Result<Self, CodecError>;
}

#[derive(Serialize, Deserialize)]
struct SnapshotHead {
    worker: u16,
    epoch: u64,
    seq: u64,
    level: u8,
    first: bool,
    last: bool,
    hashes: u32,
}

#[derive(Serialize, Deserialize)]
struct DeltaHead {
    worker: u16,
    epoch: u64,
    seq: u64,
    /// Per level: removed, stored.
    hashes: [u32; 6],
}

#[derive(Serialize, Deserialize)]
struct AckHead {
    worker: u16,
    epoch: u64,
    seq: u64,
}

/// # Errors
/// When the message is longer than a frame may be: split it (the outbox does).
pub fn encode_sidecar(message: &FromSidecar) -> Result<Bytes, CodecError> {
    match message {
        FromSidecar::Hello(hello) => frame(HELLO, &(), &postcard::to_stdvec(hello).map_err(|_| malformed("hello"))?),
        FromSidecar::Snapshot(snapshot) => encode_snapshot(snapshot),
        FromSidecar::Delta(delta) => encode_delta(delta),
        FromSidecar::Load(load) => frame(LOAD, load, &[]),
        FromSidecar::Learnt(facts) => learnt::encode(facts),
        FromSidecar::Digest(digest) => digest::encode_digest(digest),
        FromSidecar::Buckets(buckets) => digest::encode_buckets(buckets),
        FromSidecar::Repair(repair) => digest::encode_repair(repair),
        FromSidecar::Embeddings(embeddings) => digest::encode_embeddings(embeddings),
        FromSidecar::Heartbeat => frame(HEARTBEAT, &(), &[]),
    }
}

pub fn encode_balancer(message: &FromBalancer) -> Bytes {
    let framed = match *message {
        FromBalancer::Welcome(version) => frame(WELCOME, &version, &[]),
        FromBalancer::Ack { worker, epoch, seq } => frame(ACK, &AckHead { worker, epoch, seq }, &[]),
        FromBalancer::Resync { worker } => frame(RESYNC, &worker, &[]),
        FromBalancer::AskBuckets { worker } => frame(ASK_BUCKETS, &worker, &[]),
        FromBalancer::AskRepair { worker, buckets } => frame(ASK_REPAIR, &AskRepairHead { worker, buckets }, &[]),
    };
    framed.expect("records of a few integers are always shorter than a frame")
}

fn encode_snapshot(snapshot: &Snapshot) -> Result<Bytes, CodecError> {
    let Snapshot { worker, epoch, seq, level, first, last, ref hashes } = *snapshot;
    let count = count(hashes.len())?;
    let head = SnapshotHead { worker, epoch, seq, level: level.index(), first, last, hashes: count };
    frame(SNAPSHOT, &head, &raw([raw_hashes(hashes)].into_iter(), hashes.len()))
}

fn encode_delta(delta: &Delta) -> Result<Bytes, CodecError> {
    let lists = || delta.levels.iter().flat_map(|level| [level.removed.as_slice(), level.stored.as_slice()]);
    let total = lists().map(<[_]>::len).sum();
    count(total)?;
    let mut hashes = [0; 6];
    for (to, list) in hashes.iter_mut().zip(lists()) {
        *to = count(list.len())?;
    }
    let head = DeltaHead { worker: delta.worker, epoch: delta.epoch, seq: delta.seq, hashes };
    frame(DELTA, &head, &raw(lists().map(raw_hashes), total))
}

fn count(hashes: usize) -> Result<u32, CodecError> {
    let short = u32::try_from(hashes).ok().filter(|_| hashes <= MAX_HASHES_PER_FRAME);
    short.ok_or(CodecError::TooManyHashes { hashes })
}

fn raw_hashes(hashes: &[SequenceHash]) -> impl Iterator<Item = u64> {
    hashes.iter().map(|hash| hash.0)
}

fn raw(lists: impl Iterator<Item = impl Iterator<Item = u64>>, total: usize) -> Vec<u8> {
    let mut body = Vec::with_capacity(total * 8);
    body.extend(lists.flatten().flat_map(u64::to_le_bytes));
    body
}

fn frame(kind: u8, record: &impl Serialize, body: &[u8]) -> Result<Bytes, CodecError> {
    let head = postcard::to_extend(record, vec![kind]).map_err(|_| malformed("head"))?;
    let length = 2 + head.len() + body.len();
    let too_long = CodecError::FrameTooLong { bytes: length, limit: FRAME_BYTES_MAX };
    let (Ok(frame_field), Ok(head_field)) = (u32::try_from(length), u16::try_from(head.len())) else {
        return Err(too_long);
    };
    if length > FRAME_BYTES_MAX {
        return Err(too_long);
    }
    let mut out = BytesMut::with_capacity(4 + length);
    out.put_u32_le(frame_field);
    out.put_u16_le(head_field);
    out.put_slice(&head);
    out.put_slice(body);
    Ok(out.freeze())
}

fn malformed(message: &'static str) -> CodecError {
    CodecError::Malformed { message }
}

/// Reads the fields this build knows; a later minor version may have put more behind them.
fn record<T: DeserializeOwned>(bytes: &[u8], message: &'static str) -> Result<T, CodecError> {
    postcard::take_from_bytes(bytes).map(|(value, _)| value).map_err(|_| malformed(message))
}

/// A version is the first thing in every record that has one, so that it can be told from any later layout.
fn version(bytes: &[u8], message: &'static str) -> Result<Version, CodecError> {
    let theirs: Version = record(bytes, message)?;
    if theirs.major != PROTOCOL.major {
        return Err(CodecError::Version { theirs });
    }
    Ok(theirs)
}

/// The fields of protocol 1.0; a tuple has the bytes of the struct.
type Hello10 = (Version, String, EngineFacts, Vec<WorkerFacts>, bool);

fn hello(bytes: &[u8]) -> Result<Hello, CodecError> {
    let minor = version(bytes, "hello")?.minor;
    let (fields, later): (Hello10, _) = postcard::take_from_bytes(bytes).map_err(|_| malformed("hello"))?;
    let (protocol, advertised_url, engine, workers, draining) = fields;
    let (media_trusted, encoder_fingerprint) = match minor {
        0 => (true, None),
        1 => (record(later, "hello")?, None),
        _ => record::<(bool, Option<[u8; 32]>)>(later, "hello")?,
    };
    Ok(Hello { protocol, advertised_url, engine, workers, draining, media_trusted, encoder_fingerprint })
}

/// Cuts a body into arrays of the announced lengths.
fn arrays<const N: usize, T>(
    body: &[u8],
    counts: [u32; N],
    message: &'static str,
    of: impl Fn(u64) -> T,
) -> Result<[Vec<T>; N], CodecError> {
    let announced = counts.iter().map(|&count| count as usize * 8).sum();
    if announced != body.len() {
        return Err(CodecError::BodyLength { message, announced, actual: body.len() });
    }
    let mut items = body.as_chunks::<8>().0.iter().map(|chunk| of(u64::from_le_bytes(*chunk)));
    Ok(counts.map(|count| items.by_ref().take(count as usize).collect()))
}

impl Wire for FromSidecar {
    const FRAME_BYTES_MAX: usize = FRAME_BYTES_MAX;

    fn decode(kind: u8, head: &[u8], body: &[u8]) -> Result<Self, CodecError> {
        match kind {
            HELLO => hello(body).map(Self::Hello),
            SNAPSHOT => {
                let SnapshotHead { worker, epoch, seq, level, first, last, hashes } = record(head, "snapshot")?;
                let level = Tier::from_index(level).ok_or(malformed("snapshot"))?;
                let [hashes] = arrays(body, [hashes], "snapshot", SequenceHash)?;
                Ok(Self::Snapshot(Snapshot { worker, epoch, seq, level, first, last, hashes }))
            }
            DELTA => {
                let DeltaHead { worker, epoch, seq, hashes } = record(head, "delta")?;
                let [r0, s0, r1, s1, r2, s2] = arrays(body, hashes, "delta", SequenceHash)?;
                let levels = [(r0, s0), (r1, s1), (r2, s2)].map(|(removed, stored)| LevelDelta { removed, stored });
                Ok(Self::Delta(Delta { worker, epoch, seq, levels }))
            }
            LOAD => record::<Load>(head, "load").map(Self::Load),
            LEARNT => learnt::decode(body).map(Self::Learnt),
            DIGEST => digest::decode_digest(head).map(Self::Digest),
            BUCKET_SUMS => digest::decode_buckets(head, body).map(Self::Buckets),
            REPAIR => digest::decode_repair(head).map(Self::Repair),
            EMBEDDINGS => digest::decode_embeddings(head, body).map(Self::Embeddings),
            HEARTBEAT => Ok(Self::Heartbeat),
            _ => Err(CodecError::UnknownKind { kind }),
        }
    }
}

impl Wire for FromBalancer {
    const FRAME_BYTES_MAX: usize = BALANCER_FRAME_BYTES_MAX;

    fn decode(kind: u8, head: &[u8], _body: &[u8]) -> Result<Self, CodecError> {
        match kind {
            WELCOME => version(head, "welcome").map(Self::Welcome),
            ACK => record(head, "ack").map(|AckHead { worker, epoch, seq }| Self::Ack { worker, epoch, seq }),
            RESYNC => record(head, "resync").map(|worker| Self::Resync { worker }),
            ASK_BUCKETS => record(head, "ask for buckets").map(|worker| Self::AskBuckets { worker }),
            ASK_REPAIR => {
                let AskRepairHead { worker, buckets } = record(head, "ask for a repair")?;
                Ok(Self::AskRepair { worker, buckets })
            }
            _ => Err(CodecError::UnknownKind { kind }),
        }
    }
}

/// Takes bytes as they come and gives messages. Holds one frame and one push at most when `next` is called until it gives `None`.
#[derive(Debug)]
pub struct Decoder<M> {
    buffer: BytesMut,
    messages: PhantomData<fn() -> M>,
}

impl<M> Default for Decoder<M> {
    fn default() -> Self {
        Self { buffer: BytesMut::new(), messages: PhantomData }
    }
}

impl<M: Wire> Decoder<M> {
    pub fn new() -> Self {
        Self::default()
    }

    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole message; `None` = more bytes are needed.
    ///
    /// # Errors
    /// When the bytes are not a message; the decoder must not be used after that.
    #[expect(clippy::should_implement_trait, reason = "not an iterator: `None` means not yet")]
    pub fn next(&mut self) -> Result<Option<M>, CodecError> {
        let Some((length, rest)) = self.buffer.split_first_chunk::<4>() else { return Ok(None) };
        let length = u32::from_le_bytes(*length) as usize;
        if length > M::FRAME_BYTES_MAX {
            return Err(CodecError::FrameTooLong { bytes: length, limit: M::FRAME_BYTES_MAX });
        }
        let Some(content) = rest.get(..length) else { return Ok(None) };
        let message = content_of::<M>(content);
        self.buffer.advance(4 + length);
        message.map(Some)
    }

    /// Has a frame begun that is not complete? At the end of a stream this means it was cut.
    pub fn is_inside_frame(&self) -> bool {
        !self.buffer.is_empty()
    }
}

fn content_of<M: Wire>(content: &[u8]) -> Result<M, CodecError> {
    let split = content.split_first_chunk::<2>().and_then(|(head, rest)| {
        let head = usize::from(u16::from_le_bytes(*head));
        rest.split_at_checked(head)
    });
    match split {
        Some(([kind, record @ ..], body)) => M::decode(*kind, record, body),
        _ => {
            let head = content.first_chunk::<2>().map_or(0, |head| usize::from(u16::from_le_bytes(*head)));
            Err(CodecError::HeadLength { head, frame: content.len() })
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
