//! Frames of protocol 1.2: digests, buckets, the head of a repair, and what an encoder holds.

use bytes::Bytes;
use fovea_kv::sums::{BUCKETS, Sums};
use serde::{Deserialize, Serialize};

use super::{BUCKET_SUMS, CodecError, DIGEST, EMBEDDINGS, REPAIR, arrays, count, frame, raw, record};
use crate::message::{BucketMask, Buckets, Digest, Embeddings, Repair};

#[derive(Serialize, Deserialize)]
struct DigestHead {
    worker: u16,
    epoch: u64,
    seq: u64,
    /// Per level: count, low and high half of the sum.
    levels: [(u64, u64, u64); 3],
}

#[derive(Serialize, Deserialize)]
struct BucketsHead {
    worker: u16,
    epoch: u64,
    seq: u64,
}

#[derive(Serialize, Deserialize)]
struct RepairHead {
    worker: u16,
    epoch: u64,
    seq: u64,
    buckets: [BucketMask; 3],
}

/// A balancer's request for buckets.
#[derive(Serialize, Deserialize)]
pub(super) struct AskRepairHead {
    pub worker: u16,
    pub buckets: [BucketMask; 3],
}

#[derive(Serialize, Deserialize)]
struct EmbeddingsHead {
    first: bool,
    stored: u32,
    removed: u32,
}

pub(super) fn encode_digest(digest: &Digest) -> Result<Bytes, CodecError> {
    let levels = digest.levels.map(|Sums { count, sum }| (count, low(sum), low(sum >> 64)));
    let head = DigestHead { worker: digest.worker, epoch: digest.epoch, seq: digest.seq, levels };
    frame(DIGEST, &head, &[])
}

pub(super) fn decode_digest(head: &[u8]) -> Result<Digest, CodecError> {
    let DigestHead { worker, epoch, seq, levels } = record(head, "digest")?;
    let sums = |(count, low, high)| Sums { count, sum: u128::from(high) << 64 | u128::from(low) };
    Ok(Digest { worker, epoch, seq, levels: levels.map(sums) })
}

pub(super) fn encode_buckets(buckets: &Buckets) -> Result<Bytes, CodecError> {
    let Buckets { worker, epoch, seq, ref levels } = *buckets;
    let body: Vec<u8> = levels.iter().flatten().flat_map(|sum| sum.to_le_bytes()).collect();
    frame(BUCKET_SUMS, &BucketsHead { worker, epoch, seq }, &body)
}

pub(super) fn decode_buckets(head: &[u8], body: &[u8]) -> Result<Buckets, CodecError> {
    let BucketsHead { worker, epoch, seq } = record(head, "buckets")?;
    let announced = 3 * BUCKETS * 8;
    if body.len() != announced {
        return Err(CodecError::BodyLength { message: "buckets", announced, actual: body.len() });
    }
    let mut sums = body.as_chunks::<8>().0.iter().map(|chunk| u64::from_le_bytes(*chunk));
    let mut level = || std::array::from_fn(|_| sums.next().unwrap_or_default());
    let levels = Box::new([level(), level(), level()]);
    Ok(Buckets { worker, epoch, seq, levels })
}

pub(super) fn encode_repair(repair: &Repair) -> Result<Bytes, CodecError> {
    let Repair { worker, epoch, seq, buckets } = *repair;
    frame(REPAIR, &RepairHead { worker, epoch, seq, buckets }, &[])
}

pub(super) fn decode_repair(head: &[u8]) -> Result<Repair, CodecError> {
    let RepairHead { worker, epoch, seq, buckets } = record(head, "repair")?;
    Ok(Repair { worker, epoch, seq, buckets })
}

pub(super) fn encode_embeddings(embeddings: &Embeddings) -> Result<Bytes, CodecError> {
    let total = embeddings.stored.len() + embeddings.removed.len();
    count(total)?;
    let head = EmbeddingsHead {
        first: embeddings.first,
        stored: count(embeddings.stored.len())?,
        removed: count(embeddings.removed.len())?,
    };
    let lists = [&embeddings.stored, &embeddings.removed];
    frame(EMBEDDINGS, &head, &raw(lists.iter().map(|list| list.iter().copied()), total))
}

pub(super) fn decode_embeddings(head: &[u8], body: &[u8]) -> Result<Embeddings, CodecError> {
    let EmbeddingsHead { first, stored, removed } = record(head, "embeddings")?;
    let [stored, removed] = arrays(body, [stored, removed], "embeddings", |key| key)?;
    Ok(Embeddings { first, stored, removed })
}

#[expect(clippy::cast_possible_truncation, reason = "the low half is what is wanted")]
fn low(sum: u128) -> u64 {
    sum as u64
}
